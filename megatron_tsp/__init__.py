"""Folded tensor and sequence parallelism (TSP) for Megatron-LM: ``--tsp-size D``."""

__version__ = "0.1.0"
