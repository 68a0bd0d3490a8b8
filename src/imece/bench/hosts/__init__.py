"""Benchmarks two emulated hosts on one machine with a slow cable between them."""
