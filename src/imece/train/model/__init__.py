"""What a run trains: its weights' origin, adapters, number format, compiled blocks, and what updates it."""
