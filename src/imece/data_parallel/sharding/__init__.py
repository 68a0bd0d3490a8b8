"""What a model in parts consists of: what a rank keeps, what is gathered and when, who steps what."""
