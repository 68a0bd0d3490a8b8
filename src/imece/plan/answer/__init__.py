"""Which way is best, why, and how a person is told."""
