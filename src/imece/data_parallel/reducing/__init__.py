"""What the reducer consists of: where gradients lie, in which order they leave, what is known of them."""
