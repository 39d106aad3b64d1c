"""Megatron's modules with TSP inside: weights stream past, tokens stay."""
