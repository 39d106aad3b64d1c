"""``megatron-tsp trace``: what a rank needs in a training step, without ranks and without a GPU.

    from megatron_tsp.trace import trace
    trace("configs/tiny_cpu/ab.yaml", "tsp").peak_bytes
"""

from megatron_tsp.trace.result import Trace
from megatron_tsp.trace.tracing import trace

__all__ = ["Trace", "trace"]
