"""Layers of a hybrid model that scan the sequence: Megatron's, between linears of ours."""

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_tsp.models.backends import BaselineSpecProvider

#: How checkpoints name a norm: as part of the linear behind it.
GDN_NORM = {"input_layernorm.": "self_attention.in_proj.layer_norm_"}
MAMBA_NORM = {"norm.": "mixer.in_proj.layer_norm_"}


def gdn_part(backend: BaselineSpecProvider) -> dict:
    """The submodules of a layer that are a gated delta net."""
    norm, first, last = backend.recurrence()
    submodules = GatedDeltaNetSubmodules(
        in_proj=first, out_norm=backend.layer_norm(), out_proj=last
    )
    return {
        "input_layernorm": norm,
        "self_attention": ModuleSpec(module=GatedDeltaNet, submodules=submodules),
        "self_attn_bda": get_bias_dropout_add,
    }


def mamba_part(backend: BaselineSpecProvider) -> dict:
    """The submodules of a Mamba layer."""
    norm, first, last = backend.recurrence()
    submodules = MambaMixerSubmodules(in_proj=first, out_proj=last)
    return {
        "norm": norm,
        "mixer": ModuleSpec(module=MambaMixer, submodules=submodules),
        "mamba_bda": get_bias_dropout_add,
    }
