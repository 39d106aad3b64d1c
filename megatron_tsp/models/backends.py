"""Which modules a layer is made of: Megatron's `BackendSpecProvider`, for TSP and for its baseline."""

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
from megatron_tsp.layers.linear import TSPColumnParallelLinear, TSPRowParallelLinear
from megatron_tsp.layers.mlp import TSPMLP
from megatron_tsp.layers.norm import TSPNorm
from megatron_tsp.options import TSPOptions


class BaselineSpecProvider(LocalSpecProvider):
    """Megatron's tensor-parallel linears with TSP's norm and attention core.

    An A/B run against TSP then compares the parallelism and nothing else.
    """

    self_attention = SelfAttention
    mlp = MLP

    def layer_norm(self, rms_norm=False, for_qk=False, has_residual=False):
        """TSP's norm; `config.normalization` says which."""
        return TSPNorm

    def core_attention(self):
        """Attention by memory-lean kernels."""
        return TSPCoreAttention

    def mlp_linears(self):
        """(first, second) linear of the MLP."""
        return self.column_parallel_linear(), self.row_parallel_linear()


class TSPSpecProvider(BaselineSpecProvider):
    """Everything TSP's."""

    self_attention = TSPSelfAttention
    mlp = TSPMLP

    def __init__(self, options: TSPOptions):
        self.options = options

    def column_parallel_linear(self):
        """QKV."""
        return partial(TSPColumnParallelLinear, schedule=self.options.attention_schedule)

    def row_parallel_linear(self):
        """The projection of the attention's output."""
        return partial(TSPRowParallelLinear, schedule=self.options.attention_schedule)

    def mlp_linears(self):
        """(first, second) linear of the MLP."""
        walk = {"schedule": self.options.mlp_schedule, "kind": "mlp"}
        return partial(TSPColumnParallelLinear, **walk), partial(TSPRowParallelLinear, **walk)


def layer_spec(backend: BaselineSpecProvider, config: TransformerConfig) -> ModuleSpec:
    """A dense layer with causal self-attention."""
    norm = backend.layer_norm(has_residual=True)
    fc1, fc2 = backend.mlp_linears()
    if config.qk_l2_norm:
        qk_norm = L2Norm
    else:
        qk_norm = backend.layer_norm(for_qk=True) if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=backend.self_attention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=backend.column_parallel_linear(),
                    core_attention=backend.core_attention(),
                    linear_proj=backend.row_parallel_linear(),
                    q_layernorm=qk_norm,
                    k_layernorm=qk_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=partial(
                backend.mlp.as_mlp_submodule,
                submodules=MLPSubmodules(linear_fc1=fc1, linear_fc2=fc2),
            ),
            mlp_bda=get_bias_dropout_add,
            # Checkpoints name the norms as Transformer Engine's fused modules do.
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
