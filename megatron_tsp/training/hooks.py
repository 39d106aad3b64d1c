"""Where TSP reaches into Megatron's `pretrain`: groups made along with Megatron's; records."""

from argparse import Namespace
from datetime import timedelta
from functools import wraps

from megatron.core import parallel_state as mpu
from megatron.training import print_rank_0

from megatron_tsp import arguments, parallel_state
from megatron_tsp.training import recompute


def switch_on(args: Namespace) -> None:
    """What the flags ask for beside the model, just before `pretrain` is called."""
    if args.tsp_size is not None:
        install(args)
    if args.tsp_log_traffic:
        from megatron_tsp.training import log_traffic

        log_traffic.install(args.log_interval)
    if args.tsp_record:
        from megatron_tsp.training import record

        record.install(args.tsp_record)


def install(args: Namespace) -> None:
    """Create the TSP groups whenever Megatron creates its own, and destroy them with those; and
    recompute whole layers in torch's way, but for mixtures of experts."""
    if args.recompute_granularity == "full" and args.num_experts is None:
        recompute.install()
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
