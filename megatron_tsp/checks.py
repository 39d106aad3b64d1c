"""What the flags say together: sizes that D does not fit, masks, exchanges, offloading.

Each check raises `TSPError`, with the nearest sizes that fit, or with what to do instead. Flags
that are refused whatever the others say are in `refusals.py`.
"""

from argparse import Namespace

import torch

from megatron_tsp import zigzag
from megatron_tsp.errors import TSPError
from megatron_tsp.layers import kernels
from megatron_tsp.options import CP_COMM_TYPES


def check_sizes(args: Namespace) -> None:
    """Sizes that D does not fit, each with the nearest that do."""
    degree = args.tsp_size
    heads = args.num_attention_heads
    sizes = {
        "--num-attention-heads": heads,
        "--ffn-hidden-size": args.ffn_hidden_size,
        **_latents(args),
        "--moe-shared-expert-intermediate-size": args.moe_shared_expert_intermediate_size,
        "--padded-vocab-size": args.padded_vocab_size,
    }
    if not args.pad_vocab_size:
        sizes["--no-pad-vocab-size: --vocab-size"] = args.vocab_size
    for flag, size in sizes.items():
        if size and size % degree:
            raise TSPError(
                f"{flag} {size} is not divisible by --tsp-size {degree}: the nearest are "
                f"{nearest(size, lambda n: n % degree == 0)}"
            )
    if heads:
        _check_heads(args, heads)
    _check_experts(args)
    if args.seq_length:
        beside = ""
        if args.context_parallel_size > 1:
            beside = f" --context-parallel-size {args.context_parallel_size}"
        try:
            zigzag.chunk_length(args.seq_length, degree * args.context_parallel_size)
        except TSPError as error:
            raise TSPError(f"--seq-length with --tsp-size {degree}{beside}: {error}") from None
    _check_validation(args)
    masks = "--eod-mask-loss" if args.eod_mask_loss else "--sft" if args.sft else None
    if args.context_parallel_size > 1 and masks and not args.calculate_per_token_loss:
        raise TSPError(
            f"{masks} with --context-parallel-size: the ranks count different numbers of tokens, "
            "and Megatron averages their averages; pass --calculate-per-token-loss"
        )
    if args.tsp_blocks == "mlp":
        check_context_parallel(args)
    elif args.tsp_attention_exchange == "alltoall":
        _check_exchanged_heads(args, "--tsp-attention-exchange alltoall")
    _check_world(args)


def _latents(args: Namespace) -> dict[str, int | None]:
    """The features in front of multi-latent attention's heads."""
    if not args.multi_latent_attention:
        return {}
    return {
        "--q-lora-rank": args.q_lora_rank,
        "--kv-lora-rank + --qk-pos-emb-head-dim": args.kv_lora_rank + args.qk_pos_emb_head_dim,
    }


def _check_heads(args: Namespace, heads: int) -> None:
    """Megatron interleaves the rows of QKV by query group and cuts them in D."""
    degree = args.tsp_size
    groups = args.num_query_groups if args.group_query_attention else heads

    def fits(n):
        return heads % n == 0 and (n % degree == 0 or degree % n == 0)

    if groups % degree and degree % groups:
        raise TSPError(
            f"--num-query-groups {groups} neither divides --tsp-size {degree} nor is a multiple "
            f"of it, as Megatron's sharding of QKV needs: the nearest are {nearest(groups, fits)}"
        )
    channels = args.kv_channels or (args.hidden_size or 0) // heads
    queries = 2 * heads if args.attention_output_gate else heads
    rows = queries + 2 * groups
    if rows * channels % degree:
        near = nearest(channels, lambda n: rows * n % degree == 0)
        raise TSPError(
            f"the QKV weight has {rows * channels} rows, ({queries} + 2 x {groups}) heads of "
            f"{channels}, which --tsp-size {degree} does not divide: the nearest --kv-channels are "
            f"{near}"
        )


def _check_validation(args: Namespace) -> None:
    """Whole validation sets end in a micro-batch of what is left."""
    samples = args.eval_micro_batch_size or args.micro_batch_size or 1
    if args.full_validation and samples > 1 and args.tsp_size > 1:
        raise TSPError(
            f"--full-validation in micro-batches of {samples}: the last one of a set may be "
            "smaller, and Megatron's other tensor-parallel ranks take it for a whole one; pass "
            "--eval-micro-batch-size 1"
        )


def _check_world(args: Namespace) -> None:
    """Ranks come in whole copies of the model."""
    stages = args.pipeline_model_parallel_size or 1
    context = args.context_parallel_size
    ranks = args.tsp_size * stages * context
    if args.world_size % ranks:
        sizes = f"--tsp-size {args.tsp_size}"
        sizes += f" x --pipeline-model-parallel-size {stages}" if stages > 1 else ""
        sizes += f" x --context-parallel-size {context}" if context > 1 else ""
        raise TSPError(
            f"{args.world_size} ranks are not a multiple of {sizes}: "
            f"the nearest are {nearest(args.world_size, lambda n: n % ranks == 0)}"
        )


def _check_experts(args: Namespace) -> None:
    """Experts that do not spread evenly, over ranks that do not divide evenly."""
    experts, spread = args.num_experts, args.expert_model_parallel_size
    if experts and experts % spread:
        raise TSPError(
            f"--num-experts {experts} is not divisible by --expert-model-parallel-size {spread}: "
            f"the nearest are {nearest(experts, lambda n: n % spread == 0)}"
        )
    ranks = args.world_size // args.pipeline_model_parallel_size
    width = args.expert_tensor_parallel_size or 1
    if experts and ranks % (spread * width):
        raise TSPError(
            f"--expert-model-parallel-size {spread} x --expert-tensor-parallel-size {width} does "
            f"not divide the {ranks} ranks of a pipeline stage"
        )
    inner = args.moe_ffn_hidden_size
    if experts and inner and inner % width:
        raise TSPError(
            f"--moe-ffn-hidden-size {inner} is not divisible by --expert-tensor-parallel-size "
            f"{width}: the nearest are {nearest(inner, lambda n: n % width == 0)}"
        )


def nearest(size: int, fits) -> str:
    """The next smaller and the next larger number that fits, as text."""
    found = [next(filter(fits, range(size - 1, 0, -1)), None),
             next(filter(fits, range(size + 1, 16 * size + 10**4)), None)]  # fmt: skip
    return " or ".join(str(n) for n in found if n)


def check_attention(args: Namespace) -> None:
    """Kernels that are not there, and masks that no layer could honour."""
    dropout = args.attention_dropout
    if not 0 <= dropout < 1:
        raise TSPError(f"--attention-dropout {dropout}: it is a probability, from 0 to below 1")
    attention_kernel(args)
    if torch.cuda.is_available() and args.num_attention_heads:
        channels = args.kv_channels or args.hidden_size // args.num_attention_heads
        if args.multi_latent_attention:
            channels = args.qk_head_dim + args.qk_pos_emb_head_dim
        kernels.check_shapes(channels, args.bf16 or args.fp16)
    window = args.window_size
    if window is not None and (len(window) != 2 or window[0] < -1 or window[1] != 0):
        shown = ",".join(map(str, window))
        raise TSPError(
            f"--window-size {shown}: attention is causal, so a window is L,0: L tokens back, or -1 "
            "for all"
        )
    if args.reset_attention_mask and (args.dataloader_inter_document_masking or args.sft):
        raise TSPError(
            "--reset-attention-mask beside --dataloader-inter-document-masking or --sft: both say "
            "where documents begin; drop --reset-attention-mask"
        )
    packs = args.reset_attention_mask or args.dataloader_inter_document_masking or args.sft
    if packs and (args.tsp_size is None or args.tsp_blocks == "mlp"):
        _check_flat_samples(args)


def attention_kernel(args: Namespace) -> type:
    """The kernel's class, in training."""
    return kernels.choose(
        args.attention_backend.name,
        args.flash_attention_version,
        dropout=args.attention_dropout > 0,
        engine=args.transformer_impl == "transformer_engine",
    )


def _check_flat_samples(args: Namespace) -> None:
    """Documents in Megatron's own attention, which takes the samples of a batch as one."""
    stages, samples = args.pipeline_model_parallel_size or 1, args.micro_batch_size or 1
    evaluated = args.eval_micro_batch_size or samples
    for flag, at_once in (("--micro-batch-size", samples), ("--eval-micro-batch-size", evaluated)):
        if stages > 1 and at_once > 1:
            raise TSPError(
                f"documents in samples with {flag} {at_once} and "
                f"--pipeline-model-parallel-size {stages}: where attention is Megatron's it takes "
                f"one sample; use {flag} 1"
            )
    if args.context_parallel_size > 1:
        raise TSPError(
            f"documents in samples with --context-parallel-size {args.context_parallel_size}: "
            "where attention is Megatron's, RoPE takes each document to be spread over the ranks, "
            "and samples are; use --tsp-size, with --tsp-blocks all or attention"
        )
    if samples > 1 and args.tensor_model_parallel_size > 1 and _balances_samples(args):
        raise TSPError(
            f"documents in samples with --micro-batch-size {samples} and seq_aux_loss: where "
            "attention is Megatron's, a rank's tokens are not of all samples, and Megatron "
            "balances over all of them at once; use --micro-batch-size 1, or --tsp-size with "
            "--tsp-blocks all or attention"
        )


def _balances_samples(args: Namespace) -> bool:
    """Whether the experts' load is balanced in each sample by itself."""
    kinds = args.moe_router_load_balancing_type
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return bool(args.num_experts) and "seq_aux_loss" in kinds


def check_context_parallel(args: Namespace) -> None:
    """What attention over Megatron's context-parallel group carries, where its core is ours."""
    if args.context_parallel_size == 1:
        return
    if args.hierarchical_context_parallel_sizes:
        raise TSPError(
            "--hierarchical-context-parallel-sizes needs Transformer Engine's attention; drop it"
        )
    for kind in args.cp_comm_type:
        if kind not in CP_COMM_TYPES:
            raise TSPError(
                f"--cp-comm-type {kind}: without Transformer Engine's attention it is one of "
                f"{', '.join(CP_COMM_TYPES)}"
            )
        if CP_COMM_TYPES[kind] == "alltoall":
            _check_exchanged_heads(args, f"--cp-comm-type {kind}")


def _check_exchanged_heads(args: Namespace, exchange: str) -> None:
    """Tokens are exchanged for heads: every rank of a sequence takes as many heads."""
    tensor, context = args.tensor_model_parallel_size, args.context_parallel_size
    ranks, heads = tensor * context, args.num_attention_heads
    if heads and heads % ranks:
        raise TSPError(
            f"{exchange} gives each rank some of the heads: --num-attention-heads {heads} is not "
            f"divisible by {tensor} x {context} ranks: the nearest are "
            f"{nearest(heads, lambda n: n % ranks == 0)}. Or use allgather"
        )


def check_recompute(args: Namespace) -> None:
    """What Megatron's recompute never comes back from."""
    modules = args.recompute_modules if args.recompute_granularity == "selective" else ()
    if "mlp" in (modules or ()) and args.add_bias_linear:
        raise TSPError(
            "--recompute-modules mlp with biases: the MLP returns one, and Megatron's recompute of "
            "a module that returns a parameter never ends; drop mlp (a streamed MLP keeps its "
            "input and nothing else), or pass --disable-bias-linear"
        )


def check_offload(args: Namespace) -> None:
    """Activations that --offload-modules names and nothing keeps."""
    if not args.fine_grained_activation_offloading:
        return
    from megatron.core.extensions import transformer_engine

    if transformer_engine.cpu_offload is None:
        raise TSPError(
            "--fine-grained-activation-offloading needs Transformer Engine, in Megatron's code; "
            "use --recompute-granularity"
        )
    if args.recompute_granularity == "full":
        raise TSPError(
            "--fine-grained-activation-offloading with --recompute-granularity full: only the "
            "inputs of layers are kept, and Megatron does not move those; drop one of the two"
        )
    modules, again = set(args.offload_modules), set(args.recompute_modules or ())
    if "mlp_norm" in modules and "mlp" in again and args.tsp_blocks != "attention":
        raise TSPError(
            "--offload-modules mlp_norm with --recompute-modules mlp: a streamed MLP keeps its "
            "input and nothing else; drop mlp from --recompute-modules"
        )
    experts = sorted(modules & {"expert_fc1", "moe_act"})
    if experts and not (args.num_experts and args.moe_grouped_gemm):
        raise TSPError(
            f"--offload-modules {' '.join(experts)}: only grouped experts move these; add "
            "--num-experts and --moe-grouped-gemm, or drop them"
        )
