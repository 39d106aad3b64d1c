"""From parsed flags to the config, and from the config to the model, as `pretrain` wants them."""

from argparse import Namespace
from dataclasses import dataclass, field

from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.models import GPTModelConfig
from megatron.training.models.gpt import GPTModelBuilder
from megatron.training.vocab_utils import calculate_padded_vocab_size

from megatron_tsp.arguments import options_from_args
from megatron_tsp.models.backends import (
    BaselineSpecProvider,
    TSPSpecProvider,
    block_spec,
    gpt_mtp_spec,
)
from megatron_tsp.models.gpt_model import TSPGPTModel
from megatron_tsp.options import TSPOptions


@dataclass(kw_only=True)
class TSPGPTModelConfig(GPTModelConfig):
    """Megatron's GPT config with TSP's options; `pretrain` builds from its `builder`."""

    builder = "megatron_tsp.models.gpt.TSPGPTModelBuilder"
    tsp: TSPOptions = field(default_factory=TSPOptions)


class TSPGPTModelBuilder(GPTModelBuilder):
    """Builds `TSPGPTModel` stages; wrapping them for training is Megatron's."""

    def build_model(
        self,
        pg_collection: ProcessGroupCollection,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> GPTModel:
        """One pipeline stage, as `GPTModelBuilder.build_model`."""
        config = self._model_config
        transformer = config.transformer
        stage = {"vp_stage": vp_stage, "vp_size": transformer.virtual_pipeline_model_parallel_size}
        if pre_process is None:
            pre_process = is_vp_first_stage(**stage) and is_pp_first_stage(pg_collection.pp)
        if post_process is None:
            post_process = is_vp_last_stage(**stage) and is_pp_last_stage(pg_collection.pp)
        vocab_size = config.vocab_size
        if config.should_pad_vocab:
            vocab_size = calculate_padded_vocab_size(
                vocab_size,
                config.make_vocab_size_divisible_by,
                transformer.tensor_model_parallel_size,
            )
        backend = TSPSpecProvider(config.tsp, transformer)
        return TSPGPTModel(
            config=transformer,
            transformer_layer_spec=block_spec(backend, transformer, vp_stage, pg_collection.pp),
            vocab_size=vocab_size,
            max_sequence_length=config.seq_length,
            fp16_lm_cross_entropy=config.fp16_lm_cross_entropy,
            parallel_output=config.parallel_output,
            share_embeddings_and_output_weights=config.share_embeddings_and_output_weights,
            position_embedding_type=config.position_embedding_type,
            rotary_percent=config.rotary_percent,
            rotary_base=config.rotary_base,
            rope_scaling=config.rope_scaling,
            rope_scaling_factor=config.rope_scaling_factor,
            seq_len_interpolation_factor=config.seq_len_interpolation_factor,
            scatter_embedding_sequence_parallel=config.scatter_embedding_sequence_parallel,
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
            mtp_block_spec=gpt_mtp_spec(backend, transformer, vp_stage, pg_collection.pp),
            options=config.tsp,
        )


def _baseline_spec(config: GPTModelConfig, vp_stage: int | None = None):
    return block_spec(BaselineSpecProvider(), config.transformer, vp_stage)


def model_config_from_args(args: Namespace) -> GPTModelConfig:
    """The config of the model that the flags ask for: TSP's, the A/B baseline's, or Megatron's."""
    if args.tsp_size is not None:
        config = gpt_config_from_args(args, model_config_cls=TSPGPTModelConfig)
        config.tsp = options_from_args(args)
        return config
    config = gpt_config_from_args(args)
    if args.tsp_baseline_core:
        config.transformer_layer_spec = _baseline_spec
    return config
