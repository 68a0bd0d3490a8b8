"""What a run sees of itself while it trains: time, memory, drift, slow ranks, signals; and what it shows."""
