"""Which modules a layer is made of: Megatron's `BackendSpecProvider`, for TSP and its baseline."""

from functools import partial

from megatron.core.extensions import transformer_engine
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType, LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
    get_mtp_num_layers_to_build,
)
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
    get_transformer_layer_offset,
)
from megatron.core.utils import get_pg_rank

from megatron_tsp.errors import TSPError
from megatron_tsp.layers.attention import TSPSelfAttention
from megatron_tsp.layers.baseline import BaselineSelfAttention
from megatron_tsp.layers.core_attention import TSPCoreAttention
from megatron_tsp.layers.heads_linear import (
    TSPLayerNormLinearToHeads,
    TSPLinearFromHeads,
    TSPLinearToHeads,
)
from megatron_tsp.layers.latent_attention import LatentCore, TSPLatentAttention
from megatron_tsp.layers.linear import (
    TSPColumnParallelLinear,
    TSPLayerNormColumnParallelLinear,
    TSPRowParallelLinear,
)
from megatron_tsp.layers.mlp import TSPMLP
from megatron_tsp.layers.mtp import TSPMultiTokenPredictionLayer
from megatron_tsp.layers.norm import TSPNorm
from megatron_tsp.layers.shared_experts import TSPSharedExpertMLP
from megatron_tsp.options import TSPOptions


class BaselineSpecProvider(LocalSpecProvider):
    """Megatron's tensor-parallel linears with TSP's norm, rotary embedding and attention core.

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
            BaselineSelfAttention,
            self.layer_norm(has_residual=True),
            self.column_parallel_linear(),
            self.row_parallel_linear(),
        )

    def latent_attention(self):
        """(class, its parameters, linear behind a latent, output linear) of that attention."""
        return MLASelfAttention, {}, self.column_parallel_linear(), self.row_parallel_linear()

    def recurrence(self):
        """(norm in front of it, first linear, last linear) of a layer that scans the sequence."""
        return (
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

    def mtp(self):
        """(class, projection) of a layer that predicts one more token."""
        return MultiTokenPredictionLayer, self.column_parallel_linear()

    def moe(self, config: TransformerConfig):
        """The builder of a mixture of experts: Megatron's, the experts whole on their rank.

        Raises:
            TSPError: for grouped GEMMs without Transformer Engine, whose experts have them.
        """
        if config.moe_grouped_gemm and not transformer_engine.HAVE_TE:
            raise TSPError(
                "--moe-grouped-gemm needs Transformer Engine, which is not installed; drop the flag"
            )
        provider = TESpecProvider() if config.moe_grouped_gemm else self
        experts = provider.grouped_mlp_modules(config.moe_grouped_gemm)
        return partial(
            MoELayer,
            submodules=MoESubmodules(experts=experts, shared_experts=self.shared_experts()),
        )

    def shared_experts(self):
        """The builder of an MLP that every token of a mixture passes."""
        linears = MLPSubmodules(
            linear_fc1=self.column_parallel_linear(), linear_fc2=self.row_parallel_linear()
        )
        return partial(SharedExpertMLP, submodules=linears)


class TSPSpecProvider(BaselineSpecProvider):
    """TSP's blocks where `options.blocks` says so; a streamed block has its norm inside."""

    def __init__(self, options: TSPOptions, config: TransformerConfig | None = None):
        """`config` says whether Transformer Engine's norm is used, if installed; None: not."""
        self.options = options
        asked = config is not None and config.transformer_impl == "transformer_engine"
        self.te_norm = asked and transformer_engine.HAVE_TE

    def layer_norm(self, rms_norm=False, for_qk=False, has_residual=False):
        """Of norms that stand on their own."""
        if self.te_norm:
            return transformer_engine.TENorm
        return super().layer_norm(rms_norm, for_qk, has_residual)

    def fuse_layernorm_and_linear(self) -> bool:
        """The norm is part of the first linear."""
        return True

    def core_attention(self):
        """Over tokens that are spread, by the exchange that the options name."""
        if not self.options.streams_attention:
            return super().core_attention()
        exchange = self.options.attention_exchange
        if self.options.save_kv:
            exchange = "allgather-kept"
        return partial(TSPCoreAttention, exchange=exchange)

    def _how(self, schedule: str, kind: str) -> dict:
        return {"schedule": schedule, "kind": kind, "wide_grads": self.options.wide_grads}

    def _streamed(self, schedule: str, kind: str):
        how = self._how(schedule, kind)
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

    def latent_attention(self):
        """As the baseline's."""
        if not self.options.streams_attention:
            return super().latent_attention()
        how = self._how(self.options.attention_schedule, "attention")
        return (
            TSPLatentAttention,
            {"down": how},
            ModuleSpec(TSPLinearToHeads, params=how),
            partial(TSPLinearFromHeads, **how),
        )

    def recurrence(self):
        """As the baseline's."""
        if not self.options.streams_attention:
            return super().recurrence()
        how = self._how(self.options.attention_schedule, "attention")
        linears = TSPLayerNormLinearToHeads, TSPLinearFromHeads
        return IdentityOp, *(ModuleSpec(linear, params=how) for linear in linears)

    def mlp(self):
        """As the baseline's."""
        if not self.options.streams_mlp:
            return super().mlp()
        keep = {"keep_activations": self.options.mlp_save_activations}
        linears = self._streamed(self.options.mlp_schedule, "mlp")
        return partial(_tsp_mlp, **keep), IdentityOp, *linears

    def mtp(self):
        """As the baseline's."""
        if not self.options.streams_attention:
            return super().mtp()
        how = self._how(self.options.attention_schedule, "attention")
        return TSPMultiTokenPredictionLayer, ModuleSpec(TSPColumnParallelLinear, params=how)

    def shared_experts(self):
        """As the baseline's."""
        if not self.options.streams_mlp:
            return super().shared_experts()
        how = self._how(self.options.mlp_schedule, "mlp")
        linears = MLPSubmodules(
            linear_fc1=partial(TSPColumnParallelLinear, **how),
            linear_fc2=partial(TSPRowParallelLinear, **how),
        )
        keep = self.options.mlp_save_activations
        return partial(TSPSharedExpertMLP, submodules=linears, keep_activations=keep)


def _tsp_mlp(config, submodules, pg_collection, keep_activations, is_mtp_layer=False, name=None):
    return TSPMLP(
        config,
        submodules,
        ffn_hidden_size=config.ffn_hidden_size,
        tp_group=pg_collection.tp,
        keep_activations=keep_activations,
        name=name,
    )


#: How checkpoints name a norm: as part of the linear behind it.
INPUT_NORM = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
PRE_MLP_NORM = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


def attention_part(backend: BaselineSpecProvider, config: TransformerConfig) -> dict:
    """The submodules of a layer that are its causal self-attention."""
    if config.multi_latent_attention:
        return latent_attention_part(backend, config)
    attention, norm, qkv, proj = backend.attention()
    if config.qk_l2_norm:
        qk_norm = L2Norm
    else:
        qk_norm = backend.layer_norm(for_qk=True) if config.qk_layernorm else IdentityOp
    submodules = SelfAttentionSubmodules(
        linear_qkv=qkv,
        core_attention=backend.core_attention(),
        linear_proj=proj,
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    return {
        "input_layernorm": norm,
        "self_attention": ModuleSpec(
            module=attention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=submodules,
        ),
        "self_attn_bda": get_bias_dropout_add,
    }


def latent_attention_part(backend: BaselineSpecProvider, config: TransformerConfig) -> dict:
    """The same, multi-latent; a norm in front, which is a module of its own."""
    attention, params, up, proj = backend.latent_attention()
    norm = backend.layer_norm(for_qk=True) if config.qk_layernorm else IdentityOp
    down = backend.column_parallel_linear()
    submodules = MLASelfAttentionSubmodules(
        linear_q_proj=up, linear_q_down_proj=down, linear_q_up_proj=up,
        linear_kv_down_proj=down, linear_kv_up_proj=up, core_attention=LatentCore, linear_proj=proj,
        q_layernorm=norm, kv_layernorm=norm,
    )  # fmt: skip
    return {
        "input_layernorm": backend.layer_norm(has_residual=True),
        "self_attention": ModuleSpec(
            module=attention,
            params={"attn_mask_type": AttnMaskType.causal, **params},
            submodules=submodules,
        ),
        "self_attn_bda": get_bias_dropout_add,
    }


def mlp_part(backend: BaselineSpecProvider, config: TransformerConfig, moe: bool = False) -> dict:
    """The submodules of a layer that are its MLP, or mixture of experts."""
    if moe:
        mlp, norm = backend.moe(config), backend.layer_norm(has_residual=True)
    else:
        mlp, norm, fc1, fc2 = backend.mlp()
        mlp = partial(mlp, submodules=MLPSubmodules(linear_fc1=fc1, linear_fc2=fc2))
    return {"pre_mlp_layernorm": norm, "mlp": mlp, "mlp_bda": get_bias_dropout_add}


def layer_spec(
    backend: BaselineSpecProvider, config: TransformerConfig, moe: bool = False
) -> ModuleSpec:
    """A layer with causal self-attention and an MLP, or a mixture of experts."""
    names = PRE_MLP_NORM if config.multi_latent_attention else {**INPUT_NORM, **PRE_MLP_NORM}
    if moe and config.transformer_impl == "transformer_engine":
        # there a mixture's norm has its own name
        names = {name: at for name, at in names.items() if name not in PRE_MLP_NORM}
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            **attention_part(backend, config),
            **mlp_part(backend, config, moe),
            sharded_state_dict_keys_map=names,
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
    mixtures = moe_layers(config)
    layers = _layers_of_stage(config, vp_stage, get_pg_rank(pp_group))
    specs = {moe: layer_spec(backend, config, moe) for moe in {mixtures[at] for at in layers}}
    return TransformerBlockSubmodules(
        layer_specs=[specs[mixtures[at]] for at in layers], layer_norm=backend.layer_norm()
    )


def mtp_spec(
    backend: BaselineSpecProvider, config: TransformerConfig, layer: ModuleSpec | None
) -> ModuleSpec:
    """Multi-token prediction: layers that predict one more token each, around `layer`."""
    module, projection = backend.mtp()
    norm = backend.layer_norm()
    spec = ModuleSpec(
        module=module,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=norm, hnorm=norm, eh_proj=projection, mtp_model_layer=layer, layer_norm=norm
        ),
    )
    layers = 1 if config.mtp_use_repeated_layer else config.mtp_num_layers or 1
    return ModuleSpec(
        module=MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[spec] * layers),
    )


def gpt_mtp_spec(
    backend: BaselineSpecProvider, config: TransformerConfig, vp_stage: int | None, pp_group
) -> ModuleSpec | None:
    """What predicts further tokens on this pipeline stage, around a layer like the last one."""
    stage = {"vp_stage": vp_stage, "pp_rank": get_pg_rank(pp_group)}
    if not get_mtp_num_layers_to_build(config, **stage):
        return None
    return mtp_spec(backend, config, layer_spec(backend, config, moe_layers(config)[-1]))


def moe_layers(config: TransformerConfig) -> list[bool]:
    """For each layer of the model whether it has a mixture of experts (--moe-layer-freq)."""
    if config.num_moe_experts is None:
        return [False] * config.num_layers
    if isinstance(config.moe_layer_freq, int):
        return [at % config.moe_layer_freq == 0 for at in range(config.num_layers)]
    return [bool(moe) for moe in config.moe_layer_freq]


def _layers_of_stage(config: TransformerConfig, vp_stage: int | None, pp_rank: int) -> list[int]:
    layout = config.pipeline_model_parallel_layout
    if layout is not None:
        return layout.get_layer_id_list(LayerType.decoder, vp_stage, pp_rank)
    first = get_transformer_layer_offset(config, vp_stage, pp_rank)
    return list(range(first, first + get_num_layers_to_build(config, vp_stage, pp_rank)))
