"""A training script as a fork of Megatron-LM has it: Megatron's calls, and a flag of its own."""

from functools import partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

KEYS = (
    "tokens labels loss_mask attention_mask position_ids "
    "cu_seqlens cu_seqlens_padded max_seqlen local_cp_size hybrid_cp_group"
).split()


def add_own_flags(parser):
    parser.add_argument("--own-flag", choices=("provider", "config", "nothing", "batches"))
    return parser


def reads(vp_stage=None):
    return mpu.get_tensor_model_parallel_rank() == 0 and is_first_or_last_pipeline_stage(vp_stage)


def datasets(samples, vp_stage=None):
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed, sequence_length=args.seq_length, blend=blend,
        blend_per_split=blend_per_split, split=args.split, tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask, eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        inter_document_masking=args.dataloader_inter_document_masking,
        path_to_cache=args.data_cache_path, mid_level_dataset_surplus=0.005,
    )  # fmt: skip
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, samples, partial(reads, vp_stage), config).build()


datasets.is_distributed = True


def get_batch(data_iterator, vp_stage):
    documents = args.dataloader_inter_document_masking
    if not is_first_or_last_pipeline_stage(vp_stage) and not documents:
        return dict.fromkeys(KEYS)
    rank, batch = mpu.get_tensor_model_parallel_rank(), {}
    if rank == 0:
        given = next(data_iterator)
        batch = {key: given[key].cuda() if given.get(key) is not None else None for key in KEYS}
    batch = get_batch_on_this_tp_rank(
        batch, has_cu_seqlens=documents, is_hybrid_cp=False, tp_rank=rank,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(), cp_size=args.context_parallel_size,
        micro_batch_size=args.micro_batch_size, seq_length=args.seq_length, mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )  # fmt: skip
    batch = flatten_batch_for_packed_sequences(batch)
    return get_batch_on_this_cp_rank(
        batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group(),
        use_per_sequence_balancing=documents,
    )  # fmt: skip


def loss_func(mask, losses):
    mask = mask.view(-1).float()
    loss, count = (losses.view(-1).float() * mask).sum(), mask.sum().int()
    return loss, count, {"lm loss": torch.cat([loss.detach().clone().view(1), count.view(1)])}


def forward_step(data_iterator, model):
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    packed = None
    if batch["cu_seqlens"] is not None and args.own_flag != "batches":
        bounds, longest = batch["cu_seqlens"].squeeze(0), int(batch["max_seqlen"])
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds,
            max_seqlen_q=longest, max_seqlen_kv=longest, tokens_per_sample=args.seq_length,
        )  # fmt: skip
    losses = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"],
        loss_mask=batch["loss_mask"], packed_seq_params=packed,
    )  # fmt: skip
    return losses, partial(loss_func, batch["loss_mask"])


if __name__ == "__main__":
    args = parse_and_validate_args(add_own_flags, args_defaults={"tokenizer_type": "NullTokenizer"})
    if args.own_flag == "config":
        gpt_config_from_args(args, model_config_cls=type("Own", (), {}))
    if args.own_flag != "nothing":
        model = None if args.own_flag == "provider" else gpt_config_from_args(args)
        config = pretrain_cfg_container_from_args(args, model)
        pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
