"""Pretraining functions for Megatron's `pretrain`: data, batch, forward step and loss.

They report what Megatron's pretrain_gpt.py and pretrain_hybrid.py report, digit for digit. The
batch is the same on every rank of a tensor-parallel group, so these functions are the same with and
without TSP.
"""

import json
from functools import partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import (
    StragglerDetector,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_tsp.errors import TSPError
from megatron_tsp.training import packing

BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids", *packing.KEYS)

# A loss this many times the largest seen so far is spiky (--check-for-spiky-loss).
SPIKY_FACTOR = 10

# dest: flag, with and without TSP.
NOT_CARRIED = {
    "hybrid_context_parallel": "--hybrid-context-parallel",
    "logits_load_dir": "--logits-load-dir",
    "inprocess_restart": "--inprocess-restart",
    "perform_rl_step": "--perform-rl-step",
}

straggler_timer = StragglerDetector()


def check_args(args, model="gpt") -> None:
    """Raise `TSPError` for a kind of training that these functions do not carry, by flag.

    model: "gpt" or "hybrid", by the entry.
    """
    for dest, flag in NOT_CARRIED.items():
        if getattr(args, dest, None):
            raise TSPError(
                f"megatron_tsp.pretrain_{model} does not carry {flag}; "
                f"use Megatron-LM's own pretrain_{model}.py for it."
            )
    pattern = getattr(args, "hybrid_layer_pattern", None)
    pattern = pattern or getattr(args, "hybrid_override_pattern", None)
    if model == "gpt" and pattern:
        raise TSPError(
            f"--hybrid-layer-pattern {pattern} is for hybrid models: use "
            "megatron_tsp.pretrain_hybrid"
        )
    if args.position_embedding_type == "mrope":
        raise TSPError(
            f"megatron_tsp.pretrain_{model} does not carry --position-embedding-type mrope: its "
            "data are text, with one position a token, at which Megatron's multimodal RoPE fails. "
            "Use megatron_tsp.run with a script whose batches have positions [3, b, s]"
        )
    if model == "hybrid" and not pattern:
        raise TSPError("megatron_tsp.pretrain_hybrid needs --hybrid-layer-pattern, e.g. '*-*-'")


def _has_mtp(vp_stage) -> bool:
    args = get_args()
    if not args.mtp_num_layers:
        return False
    return mtp_on_this_rank(
        layout=core_transformer_config_from_args(args).pipeline_model_parallel_layout,
        mtp_num_layers=args.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )


def needs_batch(vp_stage=None) -> bool:
    """Whether this pipeline stage reads tokens or labels."""
    return is_first_or_last_pipeline_stage(vp_stage) or _has_mtp(vp_stage)


def get_batch(data_iterator, vp_stage=None) -> dict:
    """The next micro-batch, by `BATCH_KEYS`; each value [b, s / CP], or None where not needed.

    Tensor-parallel rank 0 reads it and broadcasts it to its group. On a pipeline stage in the
    middle every value is None, except what says where documents begin, in packed sequences
    (`packing.KEYS`). The attention mask is [b, 1, s / CP, s], or None.
    """
    args = get_args()
    packs = packing.packs(args)
    if not needs_batch(vp_stage) and not packs:
        return dict.fromkeys(BATCH_KEYS)
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch = {}
    if tp_rank == 0:
        batch = {
            key: value.cuda(non_blocking=True) if isinstance(value, torch.Tensor) else None
            for key, value in next(data_iterator).items()
        }
        batch = {key: batch.get(key) for key in BATCH_KEYS}
        if packing.resets(args):
            packing.mark(batch, args)
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=packs,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        # evaluation runs without gradients, and may have another size
        micro_batch_size=(
            args.micro_batch_size if torch.is_grad_enabled() else args.eval_micro_batch_size
        ),
        seq_length=args.seq_length,
        mtp_on_this_rank=_has_mtp(vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    if packs:
        batch = packing.flatten(batch, args)
    batch = get_batch_on_this_cp_rank(
        batch,
        is_hybrid_cp=False,
        cp_group=mpu.get_context_parallel_group(),
        use_per_sequence_balancing=packing.cuts_samples(args),
    )
    return {key: batch[key] for key in BATCH_KEYS}


def loss_func(loss_mask, output_tensor):
    """Sum the per-token losses [b, s] that the mask [b, s] keeps.

    Returns the sum (fp32, scalar), the number of tokens kept (int, scalar), and for the log
    ``{"lm loss": [sum, number of tokens]}``, which Megatron sums over data-parallel ranks and
    micro-batches and divides.
    Raises through Megatron's rerun state machine for a NaN or infinite sum, unless
    --no-check-for-nan-in-loss-and-grad.
    """
    args = get_args()
    losses = output_tensor.view(-1).float()
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    if args.check_for_nan_in_loss_and_grad:
        _validate(loss, torch.isnan, "NaN in the local loss of the forward pass", fatal=True)
        _validate(loss, torch.isinf, "Inf in the local loss of the forward pass", fatal=True)
    if args.check_for_spiky_loss:
        unexpectedly_large = get_rerun_state_machine().is_unexpectedly_large
        spiky = partial(unexpectedly_large, threshold=SPIKY_FACTOR, context="loss")
        _validate(loss, spiky, "Spiky loss", fatal=False)
    # a copy: the schedule scales the loss in place before the log is read
    report = torch.cat([loss.detach().clone().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": report}


def _validate(loss, rejected, message, fatal) -> None:
    get_rerun_state_machine().validate_result(
        result=loss,
        rejection_func=rejected,
        message=message,
        tolerance=0.0,  # the forward pass repeats exactly
        fatal=fatal,
    )


def forward_step(data_iterator, model, return_schedule_plan=False):
    """One micro-batch: the model's output, and the loss function to apply to it.

    With `return_schedule_plan` the first value is the model's schedule plan instead, for
    --overlap-moe-expert-parallel-comm.
    """
    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    with straggler_timer(bdata=True):
        batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timer.stop()

    inputs = batch["tokens"], batch["position_ids"], batch["attention_mask"]
    more = {"labels": batch["labels"], "loss_mask": batch["loss_mask"]}
    more["packed_seq_params"] = packing.parameters(batch, get_args().seq_length)
    with straggler_timer:
        run = model.build_schedule_plan if return_schedule_plan else model
        output = run(*inputs, **more)
    return output, partial(loss_func, batch["loss_mask"])


def dataset_config(args) -> GPTDatasetConfig:
    """The dataset configuration that the command line describes (fill-in-the-middle included)."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences_per_dataset = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path) as file:
            sequences_per_dataset = json.load(file)
    fields = {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "tokenizer": build_tokenizer(args),
        # which data
        "blend": blend,
        "blend_per_split": blend_per_split,
        "split": args.split,
        "multiple_validation_sets": args.multiple_validation_sets,
        "full_validation": args.full_validation,
        "sequences_per_dataset": sequences_per_dataset,
        # how it is read
        "path_to_cache": args.data_cache_path,
        "mmap_bin_files": args.mmap_bin_files,
        "object_storage_cache_path": args.object_storage_cache_path,
        "num_dataset_builder_threads": args.num_dataset_builder_threads,
        "mid_level_dataset_surplus": args.mid_level_dataset_surplus,
        "fast_cache_load": args.dataloader_fast_cache_load,
        "defer_npy_index_mmap": args.dataloader_defer_npy_index_mmap,
        # what a sample looks like
        "reset_position_ids": args.reset_position_ids or packing.resets(args),
        "reset_attention_mask": args.reset_attention_mask,
        "eod_mask_loss": args.eod_mask_loss,
        "create_attention_mask": args.create_attention_mask_in_dataloader,
        "allow_ambiguous_pad_tokens": args.allow_ambiguous_pad_tokens,
        # who gets it
        "data_parallel_size": args.data_parallel_size,
        "context_parallel_size": args.context_parallel_size,
        "sequence_parallel_size": args.tensor_model_parallel_size if args.sequence_parallel else 0,
        "hybrid_context_parallel": False,
        "inter_document_masking": args.dataloader_inter_document_masking,
    }
    if not args.fim_data:
        return GPTDatasetConfig(**fields)
    return GPTFIMDatasetConfig(
        **fields,
        fim_rate=args.fim_rate,
        fim_spm_rate=args.fim_spm_rate,
        fim_split_sample=args.fim_split_sample,
        fim_fragment_rate=args.fim_fragment_rate,
        fim_no_prefix=args.fim_no_prefix,
        fim_extra_tokens={
            part: getattr(args, f"fim_{part}_token")
            for part in ("prefix", "middle", "suffix", "pad", "eod")
        },
    )


def datasets(train_valid_test_num_samples, vp_stage=None):
    """Build the training, validation and test datasets, or None each where no rank reads them.

    Megatron passes `vp_stage`, the virtual pipeline stage, under an interleaved pipeline.
    """
    args = get_args()
    if args.sft:
        kind = SFTDataset
    elif args.mock_data:
        kind = MockGPTDataset
    else:
        kind = GPTFIMDataset if args.fim_data else GPTDataset

    def read_here():
        reads = needs_batch(vp_stage) or packing.packs(args)
        return mpu.get_tensor_model_parallel_rank() == 0 and reads

    print_rank_0("> building train, validation, and test datasets for GPT ...")
    built = BlendedMegatronDatasetBuilder(
        kind, train_valid_test_num_samples, read_here, dataset_config(args)
    ).build()
    print_rank_0("> finished creating GPT datasets ...")
    return built


# every rank calls `datasets`; without this mark Megatron calls it on tensor-parallel rank 0 only
datasets.is_distributed = True


def embedding_ranks(pp_ranks):
    """The ranks of a pipeline group that hold the word embedding, in order."""
    ranks = {pp_ranks[0]}
    if len(pp_ranks) > 1:
        args = get_args()
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pp_ranks[-1])
        ranks.update(get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args)))
    return sorted(ranks)
