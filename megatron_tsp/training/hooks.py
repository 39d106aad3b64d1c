"""The one place where TSP reaches into Megatron's `pretrain`: groups made along with Megatron's."""

from argparse import Namespace
from datetime import timedelta
from functools import wraps

from megatron.core import parallel_state as mpu
from megatron.training import print_rank_0

from megatron_tsp import arguments, parallel_state


def install(args: Namespace) -> None:
    """Create the TSP groups whenever Megatron creates its own, and destroy them with those."""
    create, destroy = mpu.initialize_model_parallel, mpu.destroy_model_parallel

    @wraps(create)
    def create_both(*positional, **keywords):
        create(*positional, **keywords)
        timeout = timedelta(minutes=args.distributed_timeout_minutes)
        parallel_state.initialize_model_parallel(args.tsp_size, timeout)
        print_rank_0(f"> {arguments.describe(args)}")

    @wraps(destroy)
    def destroy_both():
        parallel_state.destroy_model_parallel()
        destroy()

    mpu.initialize_model_parallel, mpu.destroy_model_parallel = create_both, destroy_both
