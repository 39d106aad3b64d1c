"""Recomputed activations: every way that Megatron has, against TP 1 that keeps them."""

from argparse import Namespace
from contextlib import nullcontext

import pytest
import torch
from layers_common import config, random, start
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_layer import TransformerLayer
from ranks import RankFailed, run
from training import LLAMA, assert_same, train

from megatron_tsp.models.backends import TSPSpecProvider, layer_spec
from megatron_tsp.options import TSPOptions
from megatron_tsp.trace.memory import LiveBytes
from megatron_tsp.training import hooks, recompute

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


def _dropped_out(breaking):
    """Random numbers of both trackers, forward and again: gradients with and without recompute."""
    if breaking is not None:
        breaking()
    start(1)

    def function(x, scale):
        x = torch.nn.functional.dropout(x * scale, 0.5)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return torch.nn.functional.dropout(x.sin(), 0.5), None

    def gradient(call):
        tensor_parallel.model_parallel_cuda_manual_seed(7)
        torch.manual_seed(7)
        x = random(64, 64).requires_grad_()
        first, _ = call(x, 2.0)
        second, _ = call(first, 3.0)  # what was drawn in between is put back
        second.square().sum().backward()
        return x.grad

    again = gradient(lambda *args: recompute.checkpoint(function, False, *args))
    torch.testing.assert_close(again, gradient(function), rtol=0, atol=0)


def _of_torch_2_6():
    """What its `checkpoint` takes; another keyword it would hand on to the function."""
    call = torch.utils.checkpoint.checkpoint

    def checkpoint(function, *args, use_reentrant, preserve_rng_state, context_fn):
        return call(
            function, *args, use_reentrant=use_reentrant, preserve_rng_state=preserve_rng_state,
            context_fn=context_fn,
        )  # fmt: skip

    torch.utils.checkpoint.checkpoint = checkpoint


@pytest.mark.parametrize("before", [None, _of_torch_2_6])
def test_the_same_random_numbers_again(before):
    run(_dropped_out, 1, before)


def _other_random_numbers():
    recompute._random_states = lambda states: nullcontext()


def test_twin_other_random_numbers_are_seen():
    with pytest.raises(RankFailed, match="not equal|not close"):
        run(_dropped_out, 1, _other_random_numbers)


def _peak_of_the_attentions_backward(own):
    """Of a layer that is computed again, less what was there, in [s/D, b, h] tensors."""
    start(1)
    settings = config(1, hidden_size=32, num_attention_heads=4, num_query_groups=4)
    spec = layer_spec(TSPSpecProvider(TSPOptions()), settings)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layer = TransformerLayer(settings, spec.submodules, pg_collection=groups)
    checkpoint = recompute.checkpoint if own else tensor_parallel.checkpoint
    x, live = random(256, 2, 32).requires_grad_(), LiveBytes()
    # The attention's backward begins with its projection's.
    projection = layer.self_attention.linear_proj
    projection.register_full_backward_pre_hook(lambda *_: live.reset_peak())
    y, _ = checkpoint(lambda x: layer(x, None), False, x)
    dy = torch.ones_like(y)
    with live:
        before = live.current
        torch.autograd.backward(y, dy)
        return (live.peak - before) / x.untyped_storage().nbytes()


def test_the_output_goes_with_its_last_user():
    """Megatron's own recompute holds the output that it made again until the unit is done."""
    (own,), (megatrons,) = (
        run(_peak_of_the_attentions_backward, 1, own) for own in (True, False)
    )
    assert own <= megatrons - 0.99


def _installed(num_experts):
    megatrons = tensor_parallel.checkpoint
    hooks.install(Namespace(num_experts=num_experts, recompute_granularity="full"))
    return tensor_parallel.checkpoint is megatrons


def test_a_mixture_of_experts_is_recomputed_by_megatron():
    """It tells the second time by gradients being enabled only then."""
    assert run(_installed, 1, 4) == [True]
    assert run(_installed, 1, None) == [False]
