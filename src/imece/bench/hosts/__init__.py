"""Two hosts on one machine, and a slow cable between them."""
