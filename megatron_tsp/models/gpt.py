"""From parsed flags to the config, and from the config to the model, as `pretrain` wants them."""

from argparse import Namespace
from dataclasses import dataclass, field

from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.models import GPTModelConfig
from megatron.training.models.gpt import GPTModelBuilder

from megatron_tsp.arguments import options_from_args
from megatron_tsp.models.backends import (
    BaselineSpecProvider,
    TSPSpecProvider,
    block_spec,
    gpt_mtp_spec,
)
from megatron_tsp.models.gpt_model import TSPGPTModel
from megatron_tsp.models.stage import StageBuilder
from megatron_tsp.options import TSPOptions


@dataclass(kw_only=True)
class TSPGPTModelConfig(GPTModelConfig):
    """Megatron's GPT config with TSP's options; `pretrain` builds from its `builder`."""

    builder = "megatron_tsp.models.gpt.TSPGPTModelBuilder"
    tsp: TSPOptions = field(default_factory=TSPOptions)


class TSPGPTModelBuilder(StageBuilder, GPTModelBuilder):
    """Builds `TSPGPTModel` stages."""

    model = TSPGPTModel

    def layers(self, backend: TSPSpecProvider, vp_stage: int | None, pp_group) -> dict:
        """As `StageBuilder.layers`."""
        config = self._model_config
        return {
            "transformer_layer_spec": block_spec(backend, config.transformer, vp_stage, pp_group),
            "mtp_block_spec": gpt_mtp_spec(backend, config.transformer, vp_stage, pp_group),
            "rope_scaling": config.rope_scaling,
            "rope_scaling_factor": config.rope_scaling_factor,
            "scatter_embedding_sequence_parallel": config.scatter_embedding_sequence_parallel,
        }


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
