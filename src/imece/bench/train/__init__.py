"""`imece train` beside a plain loop."""
