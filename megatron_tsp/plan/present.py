"""The layout that a configuration has now, and its flip."""

from argparse import Namespace
from dataclasses import replace

from megatron_tsp.errors import TSPError
from megatron_tsp.options import CP_COMM_TYPES
from megatron_tsp.plan.layout import Layout
from megatron_tsp.plan.model import Model
from megatron_tsp.plan.search import check

_MODULES = ("core_attn", "mlp", "layernorm")


def from_args(args: Namespace, ranks: int) -> Layout:
    """The layout of parsed flags on so many ranks.

    Raises:
        TSPError: the ranks are not a multiple of what a replica takes, or a setting is not priced.
    """
    degree = args.tsp_size or args.tensor_model_parallel_size
    if args.tsp_size and args.tsp_blocks != "all":
        raise TSPError(f"megatron-tsp plan does not price --tsp-blocks {args.tsp_blocks}; use all")
    if not args.tsp_size and degree > 1 and not args.sequence_parallel:
        raise TSPError("megatron-tsp plan prices tensor parallelism with --sequence-parallel only")
    context, pipeline = args.context_parallel_size, args.pipeline_model_parallel_size
    replica = degree * context * pipeline
    if ranks % replica:
        raise TSPError(
            f"--gpus {ranks}: a replica of the present layout takes {degree} x {context} x "
            f"{pipeline} = {replica} ranks; the nearest are {_near(ranks, replica)}"
        )
    expert = args.expert_model_parallel_size if args.num_experts else 1
    width = args.expert_tensor_parallel_size or (1 if args.tsp_size else degree)
    if args.num_experts and width > 1:
        raise TSPError(
            f"--expert-tensor-parallel-size {width}: megatron-tsp plan prices whole experts, 1"
        )
    if ranks // pipeline % expert:
        raise TSPError(
            f"--expert-model-parallel-size {expert} does not divide the {ranks // pipeline} ranks "
            "of a pipeline stage"
        )
    recompute, modules, layers = _recompute(args)
    exchange = "allgather"
    if args.tsp_size:
        from megatron_tsp.arguments import attention_exchange  # imports Megatron

        exchange = attention_exchange(args)[0]
    elif context > 1:
        kind = args.cp_comm_type[0]
        exchange = CP_COMM_TYPES.get(kind)
        if exchange is None:
            priced = ", ".join(CP_COMM_TYPES)
            raise TSPError(f"--cp-comm-type {kind}: megatron-tsp plan prices {priced}")
    return Layout(
        fold=bool(args.tsp_size),
        degree=degree,
        context=context,
        pipeline=pipeline,
        data=ranks // replica,
        expert=expert,
        virtual=args.num_virtual_stages_per_pipeline_rank or 1,
        micro_batch=args.micro_batch_size or 1,
        recompute=recompute,
        modules=modules,
        recompute_layers=layers,
        save_activations=args.tsp_mlp_save_activations,
        save_kv=bool(args.tsp_save_kv and exchange == "allgather"),
        exchange=exchange,
        attention_schedule=args.tsp_attention_schedule,
        mlp_schedule=args.tsp_mlp_schedule,
        vocab_schedule=args.tsp_vocab_schedule,
        distributed_optimizer=bool(args.use_distributed_optimizer),
        overlap_grads=bool(args.overlap_grad_reduce),
        overlap_params=bool(args.overlap_param_gather),
    )


def flipped(model: Model, layout: Layout) -> tuple[Layout | None, str]:
    """(the same grid the other way: TP+SP as TSP, TSP as TP+SP; why there is none)."""
    if layout.degree == 1:
        return None, "no tensor parallelism to fold"
    other = replace(layout, fold=not layout.fold, save_activations=False, save_kv=False)
    if other.fold:  # TSP recomputes norms and hidden activations anyway
        other = replace(other, exchange="allgather")
        if other.recompute == "selective":
            other = replace(other, recompute="none", modules=())
    reason = check(model, other)
    return (None, reason) if reason else (other, "")


def _recompute(args: Namespace) -> tuple[str, tuple[str, ...], int]:
    granularity = args.recompute_granularity
    if getattr(args, "recompute_activations", False):
        granularity = "selective"
    if granularity == "selective":
        modules = tuple(args.recompute_modules or ("core_attn",))
        priced = (*_MODULES, "moe") if args.num_experts else _MODULES
        for module in modules:
            if module not in priced:
                raise TSPError(
                    f"--recompute-modules {module}: megatron-tsp plan prices {', '.join(priced)}"
                )
        return "selective", modules, 1
    if granularity == "full":
        if args.recompute_method not in (None, "uniform"):
            raise TSPError("--recompute-method block: megatron-tsp plan prices uniform only")
        return "full", (), args.recompute_num_layers or 1
    return "none", (), 1


def _near(number: int, multiple: int) -> str:
    below = number // multiple * multiple
    return f"{below} or {below + multiple}" if below else f"{multiple}"
