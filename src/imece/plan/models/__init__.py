"""The model that is planned for: its widths, and where they come from."""
