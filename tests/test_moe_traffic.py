"""What a layer with experts sends, to the byte: shared experts' weights and tokens, no expert's.

Besides attention, elements that a rank sends, with f = (D-1)/D, N tokens of the micro-batch, E
experts, D = expert-parallel size, and the dispatcher

    allgather   f·N·(2h + E) forward and backward, and f·N·E bytes of routing map forward
    alltoall    (token, expert) pairs that leave this rank, there and back: h + 1 and h elements,
                forward and backward; and f·D·E integers to agree on the counts
"""

from fractions import Fraction

import pytest
import torch
from layers_common import config, random, sent, start
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_layer import TransformerLayer
from ranks import run

from megatron_tsp import traffic
from megatron_tsp.models.backends import TSPSpecProvider, layer_spec
from megatron_tsp.options import TSPOptions
from megatron_tsp.plan.experts import dispatch
from megatron_tsp.plan.layout import Layout
from megatron_tsp.plan.model import Experts, Model

SEQ, BATCH, HEADS, WIDTH, HIDDEN, FFN, SHARED, EXPERTS = 48, 2, 12, 4, 48, 96, 24, 12
TOKENS = SEQ * BATCH


def _layer(degree, dispatcher, moe, also=None):
    start(degree, expert_model_parallel_size=degree, expert_tensor_parallel_size=1)
    settings = config(
        degree, hidden_size=HIDDEN, kv_channels=WIDTH, ffn_hidden_size=FFN,
        params_dtype=torch.float32, transformer_impl="local", num_moe_experts=EXPERTS,
        moe_ffn_hidden_size=FFN, moe_shared_expert_intermediate_size=SHARED,
        expert_model_parallel_size=degree, expert_tensor_parallel_size=1,
        moe_token_dispatcher_type=dispatcher,
    )  # fmt: skip
    spec = layer_spec(TSPSpecProvider(TSPOptions()), settings, moe)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layer = TransformerLayer(settings, spec.submodules, pg_collection=groups)
    x = random(SEQ // degree, BATCH, HIDDEN).float().requires_grad_()
    counter = traffic.install()
    counter.reset()
    y, _ = layer(x, None)
    if also:
        also(layer)
    forward = sent(counter)
    y.sum().backward()
    pairs = None
    if moe and dispatcher == "alltoall":
        splits = layer.mlp.token_dispatcher
        mine = groups.ep.rank()
        pairs = [int(s.sum() - s[mine]) for s in (splits.input_splits, splits.output_splits)]
    return forward, sent(counter), pairs


def _expected(degree, dispatcher, pairs):
    f = Fraction(degree - 1, degree)
    attention, shared = 4 * HIDDEN * HIDDEN, 3 * HIDDEN * SHARED
    exchange = 2 * TOKENS * HIDDEN
    if dispatcher == "allgather":
        tokens = f * TOKENS * (2 * HIDDEN + EXPERTS) * 4
        there, back = tokens + f * TOKENS * EXPERTS, tokens
    else:
        leave, arrive = pairs
        there = (leave * (HIDDEN + 1) + arrive * HIDDEN) * 4 + f * degree * EXPERTS * 8
        back = (leave * HIDDEN + arrive * (HIDDEN + 1)) * 4
    forward = {"attention": f * (attention + exchange) * 4, "mlp": f * shared * 4, "other": there}
    backward = {
        "attention": f * 2 * (attention + exchange) * 4,
        "mlp": f * 2 * shared * 4,
        "other": back,
    }
    return forward, backward


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize("degree", [2, 4])
def test_experts_stay_and_tokens_travel(degree, dispatcher):
    for forward, backward, pairs in run(_layer, degree, degree, dispatcher, True):
        assert (forward, backward) == _expected(degree, dispatcher, pairs)


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize("degree", [2, 4])
def test_the_planner_has_these_forms(degree, dispatcher):
    """Of alltoall with a balanced router."""
    mixture = Experts(
        count=EXPERTS, chosen=2, ffn=FFN, layers=(True,), dispatcher=dispatcher, router_element=4
    )
    model = Model(
        layers=1, hidden=HIDDEN, heads=HEADS, kv_heads=HEADS, channels=WIDTH, ffn=FFN, gated=True,
        vocab=1, sequence=SEQ, global_batch=BATCH, element=4, mixture=mixture,
    )  # fmt: skip
    layout = Layout(fold=True, degree=degree, micro_batch=BATCH, expert=degree)
    leave = Fraction(degree - 1, degree) * 2 * TOKENS / degree
    for planned, measured in zip(
        dispatch(model, layout), _expected(degree, dispatcher, (leave, leave)), strict=True
    ):
        assert sum(transfer.sent for transfer in planned) == measured["other"]


def test_a_dense_layer_of_such_a_model_streams_its_mlp():
    f, weights = Fraction(1, 2), 3 * HIDDEN * FFN
    for forward, backward, _ in run(_layer, 2, 2, "allgather", False):
        assert forward["mlp"] == f * weights * 4 and backward["mlp"] == f * 2 * weights * 4
        assert "other" not in forward and "other" not in backward


def _send_an_expert(layer):
    """As if the experts' weights streamed too."""
    weight = layer.mlp.experts.local_experts[0].linear_fc1.weight.detach()
    group = layer.mlp.ep_group
    torch.distributed.all_gather([torch.empty_like(weight)] * group.size(), weight, group=group)


def test_twin_an_expert_that_travels_is_seen():
    forward, *_ = run(_layer, 2, 2, "allgather", True, _send_an_expert)[0]
    assert forward != _expected(2, "allgather", None)[0]
