"""The model to plan for: its widths, read from a name, a config file or code."""
