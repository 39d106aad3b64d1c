"""Which modules a layer is made of: Megatron's `BackendSpecProvider`, for TSP and its baseline."""

from functools import partial

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)
from megatron.core.utils import get_pg_rank

from megatron_tsp.layers.attention import TSPSelfAttention
from megatron_tsp.layers.core_attention import TSPCoreAttention
from megatron_tsp.layers.linear import TSPLayerNormColumnParallelLinear, TSPRowParallelLinear
from megatron_tsp.layers.mlp import TSPMLP
from megatron_tsp.layers.norm import TSPNorm
from megatron_tsp.options import TSPOptions


class BaselineSpecProvider(LocalSpecProvider):
    """Megatron's tensor-parallel linears with TSP's norm and attention core.

    An A/B run against TSP then compares the parallelism and nothing else.
    """

    def layer_norm(self, rms_norm=False, for_qk=False, has_residual=False):
        """TSP's norm; `config.normalization` says which."""
        return TSPNorm

    def core_attention(self):
        """Attention by memory-lean kernels."""
        return TSPCoreAttention

    def attention(self):
        """(class, norm in front of it, QKV linear, output linear)."""
        return (
            SelfAttention,
            self.layer_norm(has_residual=True),
            self.column_parallel_linear(),
            self.row_parallel_linear(),
        )

    def mlp(self):
        """(builder, norm in front of it, first linear, second linear)."""
        return (
            MLP.as_mlp_submodule,
            self.layer_norm(has_residual=True),
            self.column_parallel_linear(),
            self.row_parallel_linear(),
        )


class TSPSpecProvider(BaselineSpecProvider):
    """TSP's blocks where `options.blocks` says so; a streamed block has its norm inside."""

    def __init__(self, options: TSPOptions):
        self.options = options

    def fuse_layernorm_and_linear(self) -> bool:
        """The norm is part of the first linear."""
        return True

    def core_attention(self):
        """Over tokens that are spread, by the exchange that the options name."""
        if not self.options.streams_attention:
            return super().core_attention()
        return partial(TSPCoreAttention, exchange=self.options.attention_exchange)

    def _streamed(self, schedule: str, kind: str):
        how = {"schedule": schedule, "kind": kind, "wide_grads": self.options.wide_grads}
        return (
            partial(TSPLayerNormColumnParallelLinear, **how),
            partial(TSPRowParallelLinear, **how),
        )

    def attention(self):
        """As the baseline's."""
        if not self.options.streams_attention:
            return super().attention()
        linears = self._streamed(self.options.attention_schedule, "attention")
        return TSPSelfAttention, IdentityOp, *linears

    def mlp(self):
        """As the baseline's."""
        if not self.options.streams_mlp:
            return super().mlp()
        keep = {"keep_activations": self.options.mlp_save_activations}
        linears = self._streamed(self.options.mlp_schedule, "mlp")
        return partial(_tsp_mlp, **keep), IdentityOp, *linears


def _tsp_mlp(config, submodules, pg_collection, keep_activations, is_mtp_layer=False, name=None):
    return TSPMLP(
        config,
        submodules,
        ffn_hidden_size=config.ffn_hidden_size,
        tp_group=pg_collection.tp,
        keep_activations=keep_activations,
        name=name,
    )


def layer_spec(backend: BaselineSpecProvider, config: TransformerConfig) -> ModuleSpec:
    """A dense layer with causal self-attention."""
    attention, input_norm, qkv, proj = backend.attention()
    mlp, pre_mlp_norm, fc1, fc2 = backend.mlp()
    if config.qk_l2_norm:
        qk_norm = L2Norm
    else:
        qk_norm = backend.layer_norm(for_qk=True) if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=input_norm,
            self_attention=ModuleSpec(
                module=attention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=qkv,
                    core_attention=backend.core_attention(),
                    linear_proj=proj,
                    q_layernorm=qk_norm,
                    k_layernorm=qk_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=pre_mlp_norm,
            mlp=partial(mlp, submodules=MLPSubmodules(linear_fc1=fc1, linear_fc2=fc2)),
            mlp_bda=get_bias_dropout_add,
            # Checkpoints name a norm as part of the linear behind it.
            sharded_state_dict_keys_map={
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            },
        ),
    )


def block_spec(
    backend: BaselineSpecProvider,
    config: TransformerConfig,
    vp_stage: int | None = None,
    pp_group=None,
) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage, and the final norm."""
    if pp_group is None:
        pp_group = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["pp"]).pp
    layers = get_num_layers_to_build(config, vp_stage, get_pg_rank(pp_group))
    return TransformerBlockSubmodules(
        layer_specs=[layer_spec(backend, config)] * layers, layer_norm=backend.layer_norm()
    )
