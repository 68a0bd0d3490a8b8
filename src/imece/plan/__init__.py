"""What fits, how fast, and why, before anything is rented: arithmetic on shapes, no torch and no ranks."""
