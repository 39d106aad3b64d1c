"""Megatron's hybrid model: layers by a pattern, `*-GE`, each of one kind."""

from argparse import Namespace
from dataclasses import dataclass, field

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)
from megatron.training.argument_utils import hybrid_config_from_args
from megatron.training.models import HybridModelConfig
from megatron.training.models.hybrid import HybridModelBuilder

from megatron_tsp.arguments import options_from_args
from megatron_tsp.errors import TSPError
from megatron_tsp.layers.norm import TSPNorm
from megatron_tsp.models.backends import (
    INPUT_NORM,
    PRE_MLP_NORM,
    BaselineSpecProvider,
    TSPSpecProvider,
    attention_part,
    mlp_part,
    mtp_spec,
)
from megatron_tsp.models.local_tokens import LocalTokens
from megatron_tsp.models.recurrent import GDN_NORM, MAMBA_NORM, gdn_part, mamba_part
from megatron_tsp.models.stage import StageBuilder
from megatron_tsp.options import TSPOptions


class TSPHybridStack(HybridStack):
    """Megatron's stack with TSP's final norm: Megatron's is Transformer Engine's, with no spec."""

    def __init__(self, config: TransformerConfig, *args, post_layer_norm: bool = True, **kwargs):
        super().__init__(config, *args, post_layer_norm=False, **kwargs)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = TSPNorm(config, config.hidden_size, config.layernorm_epsilon)


class TSPHybridModel(LocalTokens, HybridModel):
    """Megatron's HybridModel with local tokens inside."""


@dataclass(kw_only=True)
class TSPHybridModelConfig(HybridModelConfig):
    """Megatron's hybrid config with TSP's options; `pretrain` builds from its `builder`."""

    builder = "megatron_tsp.models.hybrid.TSPHybridModelBuilder"
    tsp: TSPOptions = field(default_factory=TSPOptions)


class TSPHybridModelBuilder(StageBuilder, HybridModelBuilder):
    """Builds `TSPHybridModel` stages."""

    model = TSPHybridModel

    def layers(self, backend: TSPSpecProvider, vp_stage: int | None, pp_group) -> dict:
        """As `StageBuilder.layers`."""
        config = self._model_config
        return {
            "hybrid_stack_spec": stack_spec(backend, config.transformer),
            "hybrid_layer_pattern": config.hybrid_layer_pattern,
        }


def stack_spec(backend: BaselineSpecProvider, config: TransformerConfig) -> ModuleSpec:
    """The layers that a pattern may name: attention (*), gated delta net (G), Mamba (M), MLP (-),
    mixture of experts (E).

    Parameters are named as in Megatron's own stack, which is made of Transformer Engine's modules.
    """

    def layer(module, names=None, submodules=TransformerLayerSubmodules, **parts):
        submodules = submodules(**parts, sharded_state_dict_keys_map=names or {})
        return ModuleSpec(module=module, submodules=submodules)

    layers = {
        "attention_layer": layer(TransformerLayer, INPUT_NORM, **attention_part(backend, config)),
        "gdn_layer": layer(TransformerLayer, GDN_NORM, **gdn_part(backend)),
        "mamba_layer": layer(MambaLayer, MAMBA_NORM, MambaLayerSubmodules, **mamba_part(backend)),
        "mlp_layer": layer(MLPLayer, PRE_MLP_NORM, **mlp_part(backend, config)),
    }
    if config.num_moe_experts is not None:
        layers["moe_layer"] = layer(MoETransformerLayer, **mlp_part(backend, config, moe=True))
    further = mtp_spec(backend, config, layer=None)  # its pattern says which layers
    return ModuleSpec(
        module=TSPHybridStack, submodules=HybridStackSubmodules(**layers, mtp_block_spec=further)
    )


def model_config_from_args(args: Namespace) -> HybridModelConfig:
    """The config of the model that the flags ask for: TSP's, the A/B baseline's, or Megatron's.

    Raises:
        TSPError: for Megatron's own model without Transformer Engine.
    """
    if args.tsp_size is not None:
        config = hybrid_config_from_args(args, model_config_cls=TSPHybridModelConfig)
        config.tsp = options_from_args(args)
        return config
    config = hybrid_config_from_args(args)
    if args.tsp_baseline_core:
        config.hybrid_stack_spec = stack_spec(BaselineSpecProvider(), config.transformer)
    elif not HAVE_TE:
        raise TSPError(
            "Megatron's hybrid model is made of Transformer Engine's modules, and it is not "
            "installed; pass --tsp-size D or --tsp-baseline-core"
        )
    return config
