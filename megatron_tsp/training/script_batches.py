"""Packed sequences in a training script of Megatron's: what makes its batches, hooked.

The script reads the flags and knows nothing of TSP. With documents in the samples its batches
become those of `training.gpt`; otherwise each function does what it did.
"""

import inspect
import sys

from megatron.core import utils
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.models.gpt import GPTModel
from megatron.training import get_args
from megatron.training import utils as training_utils

from megatron_tsp.errors import TSPError
from megatron_tsp.training import packing


def install(hook) -> None:
    """Hook what a script imports from Megatron to make batches, before it does.

    hook(owner, name, function): calls `function(original, ...)` for `owner.name(...)`.
    """
    hook(GPTDatasetConfig, "__post_init__", _number_documents)
    hook(training_utils, "is_first_or_last_pipeline_stage", _reads_batches)
    hook(utils, "get_batch_on_this_tp_rank", _share)
    hook(utils, "flatten_batch_for_packed_sequences", _flatten)
    hook(utils, "get_batch_on_this_cp_rank", _cut)


def check_documents(hook) -> None:
    """From now on refuse a batch that does not say where documents begin, as the flags ask."""
    hook(GPTModel, "forward", _require_documents)


def packs(args) -> bool:
    """Whether TSP's attention needs to know where documents begin."""
    return packing.core_is_ours(args) and packing.packs(args)


def _number_documents(post_init, config) -> None:
    if packing.resets(get_args()):
        config.reset_position_ids = True  # `packing.mark` reads them, and puts them back
    post_init(config)


def _reads_batches(is_first_or_last, vp_stage) -> bool:
    """Every stage does: it needs the boundaries."""
    return packs(get_args()) or is_first_or_last(vp_stage)


def _share(get_batch, batch, *rest, **keywords):
    args = get_args()
    if packing.resets(args):
        keywords["has_cu_seqlens"] = True
        if batch:  # of the rank that reads
            packing.mark(batch, args)
    return get_batch(batch, *rest, **keywords)


def _flatten(flatten, batch):
    args = get_args()
    return packing.flatten(batch, args) if packs(args) else flatten(batch)


def _cut(get_batch, batch, *rest, **keywords):
    args = get_args()
    if packs(args):
        keywords["use_per_sequence_balancing"] = packing.cuts_samples(args)
    return get_batch(batch, *rest, **keywords)


def _require_documents(forward, *args, **keywords):
    given = inspect.signature(forward).bind(*args, **keywords).arguments
    if given.get("packed_seq_params") is None:
        raise TSPError(
            f"{packing.flag(get_args())}: {sys.argv[0]} calls its model without packed_seq_params, "
            "which say where documents begin. Make its batches with get_batch_on_this_tp_rank and "
            "flatten_batch_for_packed_sequences of megatron.core.utils, as Megatron-LM's "
            "pretrain_gpt.py does, or use megatron_tsp.pretrain_gpt"
        )
    return forward(*args, **keywords)
