"""Packed sequences: where documents begin in the samples of a batch.

Megatron's SFT and inter-document masking data say it by cu_seqlens. For --reset-attention-mask
Megatron's data says it by an s x s mask, which TSP has no use for: the same boundaries are read off
the positions, which the data set numbers from 0 in each document when asked to.
"""

from argparse import Namespace

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import flatten_batch_for_packed_sequences
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from torch import Tensor

KEYS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")

#: dest: flag, of each source of boundaries.
FLAGS = {
    "sft": "--sft",
    "dataloader_inter_document_masking": "--dataloader-inter-document-masking",
    "reset_attention_mask": "--reset-attention-mask",
}


def core_is_ours(args: Namespace) -> bool:
    """Whether attention is TSP's, or Megatron's with TSP's core."""
    return args.tsp_size is not None or args.tsp_baseline_core


def resets(args: Namespace) -> bool:
    """Whether --reset-attention-mask is to be honoured by packing, not by a mask."""
    asked = args.reset_attention_mask and not args.create_attention_mask_in_dataloader
    return core_is_ours(args) and asked


def packs(args: Namespace) -> bool:
    """Whether batches hold cu_seqlens; every pipeline stage then reads data."""
    return bool(args.sft or args.dataloader_inter_document_masking or resets(args))


def flag(args: Namespace) -> str:
    """What asks for boundaries, as the user typed it."""
    return next(text for dest, text in FLAGS.items() if getattr(args, dest))


def side_by_side(args: Namespace) -> bool:
    """Whether attention takes samples side by side; Megatron's, one after the other."""
    return args.tsp_size is not None and args.tsp_blocks != "mlp"


def mark(batch: dict, args: Namespace) -> None:
    """Add cu_seqlens int32 [b, s+1] and max_seqlen int32 [b], from the position ids [b, s].

    As Megatron's data sets give them: rows are filled up with s. The position ids are then put
    back to what the user asked for. A batch with cu_seqlens stays as it is.
    """
    if batch.get("cu_seqlens") is not None:
        return
    ids = batch["position_ids"]
    samples, length = ids.shape
    bounds = torch.full((samples, length + 1), length, dtype=torch.int32, device=ids.device)
    for row, positions in zip(bounds, ids, strict=True):
        begins = (positions == 0).nonzero().squeeze(1)
        row[: begins.numel()] = begins
    batch["cu_seqlens"] = bounds
    batch["max_seqlen"] = bounds.diff().amax(1)
    if not args.reset_position_ids:
        whole = torch.arange(length, dtype=ids.dtype, device=ids.device)
        batch["position_ids"] = whole.repeat(samples, 1)


def flatten(batch: dict, args: Namespace) -> dict:
    """cu_seqlens through the whole micro-batch; tokens [b, s] as [1, b·s] where attention wants."""
    if not side_by_side(args):
        return flatten_batch_for_packed_sequences(batch)
    return {**batch, **flatten_batch_for_packed_sequences({key: batch[key] for key in KEYS})}


def cuts_samples(args: Namespace) -> bool:
    """Whether context-parallel ranks share each sample, and not each of its documents."""
    return side_by_side(args) or not args.sft


def parameters(batch: dict, tokens_per_sample: int) -> PackedSeqParams | None:
    """What the model takes, from a flattened batch; None if it is not packed."""
    if batch.get("cu_seqlens") is None:
        return None
    cu_seqlens, padded = (_one_row(batch[key]) for key in KEYS[:2])
    update_seqlen_stats_from_cu_seqlens(cu_seqlens)  # Megatron's count of FLOPs
    bounds = cu_seqlens if padded is None else padded
    longest = int(batch["max_seqlen"].item())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        tokens_per_sample=tokens_per_sample,
    )


def _one_row(bounds: Tensor | None) -> Tensor | None:
    return None if bounds is None else bounds.squeeze(0)
