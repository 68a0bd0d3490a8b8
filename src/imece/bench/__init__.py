"""Benchmarks: this host's collectives beside other libraries, two emulated hosts, a model's step."""
