"""How long the ranks of a pipeline idle, beside what its schedule is known for."""
