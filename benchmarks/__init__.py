"""Benchmarks of TSP against TP+SP on one machine's CPUs: see README.md."""
