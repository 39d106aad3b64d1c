"""`megatron-tsp plan`: which layout to run, on which machine."""
