"""Megatron's models put together from TSP's layers."""
