"""The bytes of a layer and of a model, counted, against the closed forms: equal, to the byte.

Elements that a rank sends, times f = (D-1)/D (docs/design.md):

    forward     P + 2·N·kv          weights, K and V
    recompute   the same once more
    backward    P + P_dW + 4·N·kv   weights, dW, K and V again, dK and dV

and with tokens exchanged for heads (2h + 2kv)·N/D each way instead of 2·N·kv and 4·N·kv,

with P the weights of the layer, N tokens, kv the width of K.
"""

from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from layers_common import config, random, start
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.transformer_layer import TransformerLayer
from ranks import run

from megatron_tsp import traffic
from megatron_tsp.models.backends import TSPSpecProvider, layer_spec
from megatron_tsp.models.gpt import TSPGPTModelBuilder, TSPGPTModelConfig
from megatron_tsp.options import TSPOptions

SEQ, BATCH, HEADS, WIDTH, HIDDEN, FFN, VOCAB = 48, 2, 12, 4, 48, 96, 48
TOKENS = SEQ * BATCH
PLAIN = dict(gated_linear_unit=False, activation_func=F.gelu)


def _settings(degree, changes):
    return config(
        degree, hidden_size=HIDDEN, kv_channels=WIDTH, ffn_hidden_size=FFN,
        transformer_impl="local", **{"params_dtype": torch.float32, **changes},
    )  # fmt: skip


def _sent(counter):
    """{block: bytes}, and start again."""
    sums = {}
    for (_, _, block), size in counter.snapshot(exact=True).items():
        sums[block] = sums.get(block, 0) + size
    counter.reset()
    return {block: size for block, size in sums.items() if size}


def _layer(degree, changes, options, recompute):
    start(degree)
    settings = _settings(degree, changes)
    spec = layer_spec(TSPSpecProvider(options), settings)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    layer = TransformerLayer(settings, spec.submodules, pg_collection=groups)
    x = random(SEQ // degree, BATCH, HIDDEN).to(settings.params_dtype).requires_grad_()
    counter = traffic.install()
    counter.reset()
    if recompute:
        y = checkpoint(lambda t: layer(t, None)[0], False, x)
    else:
        y, _ = layer(x, None)
    forward = _sent(counter)
    y.sum().backward()
    return forward, _sent(counter)


def _expected(degree, changes, recompute, wide, alltoall=False):
    f = Fraction(degree - 1, degree)
    kv = changes.get("num_query_groups", HEADS) * WIDTH
    element = torch.empty(0, dtype=changes.get("params_dtype", torch.float32)).element_size()
    dw_element = max(element, 4) if wide else element
    bias = changes.get("add_bias_linear", False)
    width = FFN if "activation_func" in changes else 2 * FFN
    attention = HIDDEN * (2 * HIDDEN + 2 * kv) + bias * (HIDDEN + 2 * kv)
    mlp = HIDDEN * (width + FFN) + bias * width
    back = 2
    if alltoall:  # tokens for heads; KV heads fewer than D go to all ranks that query them
        kv_sent = max(kv, degree * WIDTH)
        exchange, back = (2 * HIDDEN + 2 * kv_sent) * TOKENS * Fraction(element, degree), 1
    else:
        exchange = 2 * TOKENS * kv * element
    forward = {
        "attention": f * (attention * element + exchange),
        "mlp": f * mlp * element,
    }
    backward = {
        "attention": f * (attention * (element + dw_element) + back * exchange),
        "mlp": f * mlp * (element + dw_element),
    }
    if recompute:
        backward = {block: backward[block] + forward[block] for block in backward}
    return forward, backward


ALL_TO_ALL = TSPOptions(attention_exchange="alltoall")
CASES = [
    (2, {}, ALL_TO_ALL, False),
    (3, {}, ALL_TO_ALL, True),
    (4, {"num_query_groups": 4}, ALL_TO_ALL, False),
    (4, {"num_query_groups": 2}, ALL_TO_ALL, False),
    (2, {}, TSPOptions(), False),
    (3, {}, TSPOptions(), False),
    (4, {}, TSPOptions(), False),
    (2, {"num_query_groups": 2}, TSPOptions(), False),
    (4, {"num_query_groups": 4}, TSPOptions(), True),
    (4, {"num_query_groups": 2}, TSPOptions(), False),
    (2, {"add_bias_linear": True, **PLAIN}, TSPOptions(), False),
    (3, {"add_bias_linear": True, **PLAIN}, TSPOptions(), True),
    (2, {"params_dtype": torch.bfloat16}, TSPOptions(), False),
    (3, {"params_dtype": torch.bfloat16}, TSPOptions(wide_grads=False), False),
    *(
        (degree, {"num_query_groups": 12}, TSPOptions(attention_schedule=s, mlp_schedule=s), True)
        for s in ("ring", "broadcast", "gather")
        for degree in (2, 3, 4)
    ),
]


@pytest.mark.parametrize(("degree", "changes", "options", "recompute"), CASES)
def test_a_layer_sends_what_the_formula_says(degree, changes, options, recompute):
    alltoall = options.attention_exchange == "alltoall"
    expected = _expected(degree, changes, recompute, options.wide_grads, alltoall)
    for counted in run(_layer, degree, degree, changes, options, recompute):
        assert counted == expected


def test_twin_one_more_transfer_is_seen():
    expected = _expected(2, {}, False, True)
    counted = run(_layer_and_more, 2)[0]
    assert counted != expected


def _layer_and_more():
    from megatron_tsp.streaming import Ring

    forward = Ring.forward

    def twice(self, shards, then):
        self._hop(shards).wait()
        return forward(self, shards, then)

    Ring.forward = twice
    return _layer(2, {}, TSPOptions(), False)


def _model(degree, blocks):
    """Bytes of a step of a model of 2 layers: what is left besides the layers."""
    group = start(degree)
    settings = _settings(degree, {})
    gpt = TSPGPTModelConfig(
        transformer=settings, vocab_size=VOCAB, seq_length=SEQ, position_embedding_type="rope",
        tsp=TSPOptions(blocks=blocks),
    )  # fmt: skip
    model = TSPGPTModelBuilder(gpt).build_model(ProcessGroupCollection.use_mpu_process_groups())
    ids = torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
    counter = traffic.install()
    counter.reset()
    model(ids, torch.arange(SEQ).expand(BATCH, SEQ), None, labels=ids).sum().backward()
    first = group.rank() * VOCAB // degree
    owned = (ids >= first) & (ids < first + VOCAB // degree)
    from megatron_tsp import zigzag

    mine = int(zigzag.take(owned, 1, degree, group.rank()).sum())
    tokens = TOKENS // degree
    # rows of its shard that others need, forward; gradients of rows that others own, backward
    rows = (int(owned.sum()) - mine) + (tokens - mine)
    return _sent(counter), rows


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_a_model_sends_nothing_else(degree):
    f = Fraction(degree - 1, degree)
    forward, backward = _expected(degree, {}, False, True)
    for counted, rows in run(_model, degree, degree, "all"):
        assert counted == {
            "attention": 2 * (forward["attention"] + backward["attention"]),
            "mlp": 2 * (forward["mlp"] + backward["mlp"]),
            "embedding": rows * HIDDEN * 4,
            "loss": f * (3 * VOCAB * HIDDEN + TOKENS) * 4,
        }


@pytest.mark.parametrize("degree", [2, 4])
def test_half_a_fold_moves_half_of_each(degree):
    """`mlp`: attention's two gathers and scatters stay; `attention`: the MLP's."""
    f = Fraction(degree - 1, degree)
    forward, backward = _expected(degree, {}, False, True)
    tensor_parallel = f * 2 * 5 * TOKENS * HIDDEN * 4  # 2 forward and 3 backward, in 2 layers
    for counted, _ in run(_model, degree, degree, "attention"):
        assert counted["attention"] == 2 * (forward["attention"] + backward["attention"])
        assert "mlp" not in counted
        assert counted["other"] == tensor_parallel
    for counted, _ in run(_model, degree, degree, "mlp"):
        assert counted["mlp"] == 2 * (forward["mlp"] + backward["mlp"])
        assert "attention" not in counted
        # besides attention: the embedding's reduce-scatter and the output layer's gathers, and what
        # Megatron's cross-entropy reduces
        embedding, output = f * 2 * TOKENS * HIDDEN * 4, f * 3 * TOKENS * HIDDEN * 4
        loss = counted["other"] - tensor_parallel - embedding - output
        assert loss == 3 * 2 * f * TOKENS * 4  # three all-reduces of [s, b]
