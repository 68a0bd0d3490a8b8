"""Configuration files of other programs, read: what each of their values is here."""
