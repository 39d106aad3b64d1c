"""Flags of TSP's that would do nothing beside the others: refused, not ignored."""

from argparse import Namespace
from collections.abc import Mapping

from megatron_tsp.errors import TSPError

_OF_KEYS = ("--tsp-attention-exchange", "--tsp-save-kv")
_OF_ATTENTION = ("--tsp-attention-schedule", *_OF_KEYS)
_OF_MLP = ("--tsp-mlp-schedule", "--tsp-mlp-save-activations")
#: Flags of the blocks that stay Megatron's, by --tsp-blocks.
_OF_THE_OTHERS = {
    "mlp": (*_OF_ATTENTION, "--tsp-vocab-schedule", "--tsp-loss-chunk"),
    "attention": _OF_MLP,
}


def refuse(args: Namespace, written: set[str]) -> None:
    """Stop a run with a flag of `written` that says something of what is not there.

    Raises:
        TSPError: the flag is of blocks that do not stream, or that no layer has, or of another
            exchange.
    """
    if args.tsp_save_kv and args.tsp_attention_exchange == "alltoall":
        raise TSPError(
            "--tsp-save-kv keeps gathered K and V; --tsp-attention-exchange alltoall keeps what it "
            "exchanged anyway: drop the flag"
        )
    if args.multi_latent_attention:
        for flag in written.intersection(_OF_KEYS):
            raise TSPError(
                f"{flag} does nothing: multi-latent attention exchanges tokens for heads; drop the "
                "flag"
            )
    for flag in _OF_THE_OTHERS.get(args.tsp_blocks, ()):
        if flag in written:
            raise TSPError(
                f"{flag} does nothing with --tsp-blocks {args.tsp_blocks}: drop the flag"
            )
    pattern = args.hybrid_layer_pattern or args.hybrid_override_pattern
    if pattern and "*" not in pattern:
        _refuse_flags_of("attention", _OF_KEYS, written)
    shared = args.num_experts and args.moe_shared_expert_intermediate_size
    if not shared and not _has_dense_mlp(args, pattern):
        blocks = ["--tsp-blocks mlp"] if args.tsp_blocks == "mlp" else []
        _refuse_flags_of("a dense MLP or shared experts", _OF_MLP, written, *blocks)


def _has_dense_mlp(args: Namespace, pattern: str | None) -> bool:
    if pattern:
        return "-" in pattern
    every = args.moe_layer_freq
    return not args.num_experts or (every != 1 if isinstance(every, int) else not all(every))


def _refuse_flags_of(what: str, flags: tuple[str, ...], written: set[str], *given: str) -> None:
    for flag in (*given, *(flag for flag in flags if flag in written)):
        raise TSPError(f"{flag} does nothing: no layer of this model has {what}; drop the flag")


def refuse_kept_kv(args: Namespace, exchange: str, sent: Mapping[str, int]) -> None:
    """Stop a run that would keep gathered K and V, where `auto` found the other exchange.

    Args:
        exchange: of this run.
        sent: bytes by exchange.
    """
    if args.tsp_save_kv and exchange != "allgather":
        sizes = ", ".join(f"{name} {size:,}" for name, size in sent.items())
        raise TSPError(
            f"--tsp-save-kv keeps gathered K and V, and --tsp-attention-exchange auto takes "
            f"{exchange} here (bytes a rank sends for a layer and micro-batch: {sizes}). Drop "
            "--tsp-save-kv, or pass --tsp-attention-exchange allgather"
        )
