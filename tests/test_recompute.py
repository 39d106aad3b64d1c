"""Recomputed activations: every way that Megatron has, against TP 1 that keeps them."""

import pytest
from training import LLAMA, assert_same, train

FULL = "--recompute-granularity full --recompute-num-layers"
SELECTIVE = "--recompute-granularity selective --recompute-modules"


@pytest.mark.parametrize(
    "flags",
    [
        f"{FULL} 2 --recompute-method uniform",
        f"{FULL} 1 --recompute-method block --tsp-attention-exchange alltoall",
        f"{FULL} 2 --recompute-method block --tsp-blocks attention",
        "--recompute-activations --tsp-blocks mlp",
        f"{SELECTIVE} core_attn",
        f"{SELECTIVE} layernorm",
        f"{SELECTIVE} mlp --tsp-mlp-schedule broadcast",
    ],
)
def test_recomputed_it_trains_as_at_tp_1(reference, tmp_path, flags):
    assert_same(train(tmp_path, 2, f"{LLAMA} --tsp-size 2 {flags}"), reference(LLAMA))


def _computed_otherwise_again():
    import torch
    from megatron.core.transformer.transformer_layer import TransformerLayer

    forward = TransformerLayer.forward

    def broken(self, hidden_states, *args, **kwargs):
        if torch._C._current_graph_task_id() != -1:  # inside a backward
            hidden_states = hidden_states * 1.01
        return forward(self, hidden_states, *args, **kwargs)

    TransformerLayer.forward = broken


def test_twin_that_recomputes_something_else_differs(reference, tmp_path):
    flags = f"{LLAMA} --tsp-size 2 {FULL} 1 --recompute-method uniform"
    broken = train(tmp_path, 2, flags, before=_computed_otherwise_again)
    with pytest.raises(AssertionError):
        assert_same(broken, reference(LLAMA))
