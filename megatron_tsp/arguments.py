"""The `--tsp-*` flags: added to Megatron's parser, checked, and translated into Megatron's own.

`--tsp-size D` implies `--tensor-model-parallel-size D`, `--sequence-parallel` and
`--no-create-attention-mask-in-dataloader`. What Megatron does with a tensor-parallel group of D
(shapes, checkpoints, data, clipping, optimizer) is then right for TSP as it stands.
"""

import importlib.util
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence

from megatron_tsp import idle
from megatron_tsp.checkpoint import check_checkpoint
from megatron_tsp.checks import (
    attention_kernel,
    check_attention,
    check_context_parallel,
    check_offload,
    check_recompute,
    check_sizes,
)
from megatron_tsp.checks_hybrid import check_hybrid
from megatron_tsp.errors import TSPError
from megatron_tsp.exchanges import Shape, cheapest
from megatron_tsp.layers.kernels import Tiled
from megatron_tsp.options import BLOCKS, EXCHANGES, TSPOptions
from megatron_tsp.refusals import LATENT_OVER_TP, refuse, refuse_combinations
from megatron_tsp.settings import refuse_unknown
from megatron_tsp.streaming import SCHEDULES


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add the TSP flags to a Megatron parser; returns it, as `extra_args_provider` wants."""
    _mend_help(parser)
    defaults = TSPOptions()
    group = parser.add_argument_group("TSP", "folded tensor and sequence parallelism")
    group.add_argument(
        "--tsp-size",
        type=int,
        metavar="D",
        help="Each rank of a group of D keeps 1/D of the weights and 1/D of the sequence. Implies "
        "--tensor-model-parallel-size D and --sequence-parallel. With --context-parallel-size C a "
        "sequence is spread over C such groups, 1/(D x C) on each rank.",
    )
    group.add_argument(
        "--tsp-blocks",
        choices=BLOCKS,
        default=defaults.blocks,
        help="Which blocks of a layer stream their weights; the others keep Megatron's tensor and "
        "sequence parallelism (default: %(default)s).",
    )
    for kind in ("attention", "mlp", "vocab"):
        group.add_argument(
            f"--tsp-{kind}-schedule",
            choices=sorted(SCHEDULES),
            default=getattr(defaults, f"{kind}_schedule"),
            help=f"How the {kind} weights travel (default: %(default)s).",
        )
    group.add_argument(
        "--tsp-attention-exchange",
        choices=(*EXCHANGES, "auto"),
        default=defaults.attention_exchange,
        help="How queries meet the keys of other ranks: gather K and V, one head group at a time, "
        "or exchange tokens for heads, all to all; auto takes the one that sends fewer bytes "
        "(default: %(default)s).",
    )
    group.add_argument(
        "--tsp-save-kv",
        action="store_true",
        help="With the exchange allgather, keep gathered K and V for the backward instead of "
        "gathering them again: fewer bytes to send, D times the memory of K and V.",
    )
    group.add_argument(
        "--tsp-grad-dtype",
        choices=("fp32", "param"),
        default="fp32",
        help="Sum dW over ranks in fp32, or in the parameters' dtype with fewer bytes on the wire "
        "and an error that grows with D (default: %(default)s).",
    )
    group.add_argument(
        "--tsp-mlp-save-activations",
        action="store_true",
        help="Keep the MLP's hidden activations for the backward instead of computing them again.",
    )
    group.add_argument(
        "--tsp-loss-chunk",
        type=int,
        default=defaults.loss_chunk,
        metavar="TOKENS",
        help="Tokens whose logits exist at a time in the loss (default: %(default)s).",
    )
    group.add_argument(
        "--tsp-baseline-core",
        action="store_true",
        help="Without --tsp-size: give Megatron's own model TSP's norm and attention core, so that "
        "an A/B run compares the parallelism only.",
    )
    group.add_argument(
        "--tsp-log-traffic",
        action="store_true",
        help="Log the bytes that rank 0 sends in a step, by block, group and collective, every "
        "--log-interval steps.",
    )
    group.add_argument(
        "--tsp-record",
        metavar="DIR",
        help="Write loss, gradient norm, time, memory and bytes sent of each step to DIR, one JSON "
        "lines file a rank.",
    )
    return parser


def _mend_help(parser: ArgumentParser) -> None:
    """Let --help print: argparse stops at a bare % in a help text, and Megatron 0.19 has one."""
    formatter = parser._get_formatter()
    for action in filter(lambda action: action.help, parser._actions):
        try:
            formatter._expand_help(action)
        except ValueError:
            action.help = action.help.replace("%", "%%")


def translate(args: Namespace, argv: Sequence[str], flags: Mapping[str, str]) -> None:
    """Turn the TSP flags into Megatron's; between Megatron's `parse_args` and `validate_args`.

    Args:
        args: parsed by Megatron's parser, changed in place.
        argv: the command line, to tell what the user wrote from a default.
        flags: the dest of each flag of Megatron's parser.

    Raises:
        TSPError: for a flag that contradicts `--tsp-size`, a TSP flag without it, a setting that
            TSP does not carry or does not know, or sizes that do not fit D.
    """
    written = {word.split("=")[0] for word in argv if word.startswith("--")}
    if args.tsp_size is None:
        _require_no_tsp_flags(args, written)
        if args.tsp_baseline_core:
            _translate_baseline(args)
        return
    degree = args.tsp_size
    if degree < 1:
        raise TSPError(f"--tsp-size {degree}: the degree is at least 1")
    if args.tsp_loss_chunk < 1:
        raise TSPError(f"--tsp-loss-chunk {args.tsp_loss_chunk}: it takes at least 1 token")
    if args.tsp_baseline_core:
        raise TSPError(
            "--tsp-baseline-core is for the runs that TSP is compared with; drop it or --tsp-size"
        )
    tp_flag = "--tensor-model-parallel-size"
    if tp_flag in written and args.tensor_model_parallel_size != degree:
        raise TSPError(
            f"{tp_flag} {args.tensor_model_parallel_size} contradicts --tsp-size {degree}: the TSP "
            f"group is the tensor-parallel group. Drop {tp_flag}, or give both the same value"
        )
    if args.tensor_parallel_num_weight_shards not in (None, degree):
        raise TSPError(
            "--tensor-parallel-num-weight-shards does not work with --tsp-size: TSP shards the "
            "weights itself; drop the flag"
        )
    idle.refuse(args, written)
    if "--cp-comm-type" in written and args.tsp_blocks != "mlp":
        raise TSPError(
            "--cp-comm-type does not work with --tsp-size: --tsp-attention-exchange says how the "
            "ranks of both exchange K and V; drop the flag"
        )
    args.tensor_model_parallel_size = degree
    args.sequence_parallel = degree > 1
    args.create_attention_mask_in_dataloader = False
    if args.num_experts and args.expert_tensor_parallel_size is None:
        args.expert_tensor_parallel_size = 1  # Megatron's default is the tensor-parallel size
    if not importlib.util.find_spec("fused_weight_gradient_mlp_cuda"):
        # Megatron's default asks for Apex's kernel; TSP sums as exactly without it.
        args.gradient_accumulation_fusion = False
    # The optimizer's other format is flat buckets in the order of the parameters, which TSP and TP
    # do not share: read by the other one it would scramble the weights.
    args.dist_ckpt_optim_fully_reshardable = True
    refuse(args)
    refuse_combinations(args)
    refuse_unknown(written, flags)
    check_attention(args)
    check_hybrid(args)
    check_sizes(args)
    check_recompute(args)
    check_offload(args)


def check(args: Namespace) -> None:
    """What can only be checked after Megatron's `validate_args` has filled in its defaults.

    Raises:
        TSPError: as `translate`.
    """
    if args.tsp_size is None:
        return
    refuse(args)
    check_attention(args)
    check_hybrid(args)
    check_sizes(args)
    check_checkpoint(args)
    idle.refuse_kept_kv(args, *attention_exchange(args))
    if args.tensor_model_parallel_size != args.tsp_size:
        raise TSPError(
            f"a checkpoint or configuration set tensor parallel size "
            f"{args.tensor_model_parallel_size} against --tsp-size {args.tsp_size}"
        )


def options_from_args(args: Namespace) -> TSPOptions:
    """The settings that Megatron's configs have no field for."""
    return TSPOptions(
        blocks=args.tsp_blocks,
        attention_schedule=args.tsp_attention_schedule,
        mlp_schedule=args.tsp_mlp_schedule,
        vocab_schedule=args.tsp_vocab_schedule,
        attention_exchange=attention_exchange(args)[0],
        save_kv=args.tsp_save_kv,
        wide_grads=args.tsp_grad_dtype == "fp32",
        mlp_save_activations=args.tsp_mlp_save_activations,
        loss_chunk=args.tsp_loss_chunk,
    )


def attention_exchange(args: Namespace) -> tuple[str, dict[str, int]]:
    """The attention exchange of this run; and if it is the cheapest one, what each would send for a
    layer and micro-batch, in bytes."""
    if args.multi_latent_attention:
        return "alltoall", {}
    if args.tsp_attention_exchange != "auto":
        return args.tsp_attention_exchange, {}
    heads = args.num_attention_heads
    selective = args.recompute_granularity == "selective"
    shape = Shape(
        heads=heads,
        kv_heads=args.num_query_groups if args.group_query_attention else heads,
        channels=args.kv_channels or args.hidden_size // heads,
        tokens=args.micro_batch_size * args.seq_length,
        ranks=args.tsp_size * args.context_parallel_size,
        element=2 if args.bf16 or args.fp16 else 4,
        recompute=args.recompute_granularity == "full"
        or (selective and "core_attn" in (args.recompute_modules or ())),
        save_kv=args.tsp_save_kv,
    )
    return cheapest(shape)


def describe(args: Namespace) -> str:
    """One line for the log: what TSP does in this run."""
    degree, options = args.tsp_size, options_from_args(args)
    travels = []
    if options.streams_attention:
        travels.append(f"attention by {options.attention_schedule}")
    if options.streams_mlp:
        travels.append(f"MLP by {options.mlp_schedule}")
    if options.streams_attention:
        travels.append(f"vocabulary by {options.vocab_schedule}")
    context = args.context_parallel_size
    local = args.seq_length // (degree * context)
    tokens = f"{local} of {args.seq_length} tokens a sequence"
    if context > 1:
        tokens += f" (spread over {context} groups)"
    exchange = {
        "allgather": "in zigzag order; K and V are all-gathered",
        "alltoall": "in zigzag order; attention exchanges tokens for heads",
    }[options.attention_exchange]
    if options.save_kv:
        exchange += " and kept for the backward"
    costs = attention_exchange(args)[1]
    if costs:
        sizes = ", ".join(f"{name} {size:,}" for name, size in costs.items())
        exchange += f" (auto: bytes a rank sends for a layer and micro-batch: {sizes})"
    rest = {
        "all": exchange,
        "attention": f"{exchange}; the MLP stays tensor-parallel",
        "mlp": "as in sequence parallelism; the rest stays tensor-parallel",
    }[options.blocks]
    return (
        f"TSP: groups of {degree} ranks, each with 1/{degree} of the weights and {tokens}, {rest}. "
        f"Weights that travel: {', '.join(travels)}{_kernel(args)}. "
        f"{_libraries(args)}"
    )


def _libraries(args: Namespace) -> str:
    """What is whose, where another library has it too."""
    from megatron.core.extensions import transformer_engine  # here: `run` looks at it first

    te = args.transformer_impl == "transformer_engine" and transformer_engine.HAVE_TE
    dw = "Apex's kernel" if args.gradient_accumulation_fusion else "PyTorch"
    return (
        f"Attention kernel: {attention_kernel(args).__name__}; norms that stand alone: "
        f"{'Transformer Engine' if te else 'TSP'}'s; dW summed by {dw}"
    )


def _kernel(args: Namespace) -> str:
    if attention_kernel(args) is not Tiled:
        return ""
    return (
        f". --attention-dropout {args.attention_dropout}: attention is computed by tiles in "
        "PyTorch, slower than by its flash kernel without dropout"
    )


def _require_no_tsp_flags(args: Namespace, written: set[str]) -> None:
    alone = {"--tsp-baseline-core", "--tsp-log-traffic", "--tsp-record"}
    for flag in sorted(written):
        if flag.startswith("--tsp-") and flag not in alone:
            raise TSPError(f"{flag} needs --tsp-size D")


def _translate_baseline(args: Namespace) -> None:
    """For Megatron's own model with TSP's attention core: no mask, and what the core carries."""
    if args.multi_latent_attention and args.tensor_model_parallel_size > 1:
        raise TSPError(f"--tsp-baseline-core does not work with {LATENT_OVER_TP}")
    args.create_attention_mask_in_dataloader = False
    check_context_parallel(args)
    check_attention(args)
