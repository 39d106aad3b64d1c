"""The bytes of a layer and of a model, counted, equal the planner's closed forms, to the byte.

The forms are in megatron_tsp/plan/traffic.py; docs/design.md has them as a table.
"""

import pytest
import torch
import torch.nn.functional as F
from layers_common import config, random, sent, start
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.transformer_layer import TransformerLayer
from ranks import run

from megatron_tsp import traffic
from megatron_tsp.models.backends import TSPSpecProvider, layer_spec
from megatron_tsp.models.gpt import TSPGPTModelBuilder, TSPGPTModelConfig
from megatron_tsp.options import TSPOptions
from megatron_tsp.plan import traffic as forms
from megatron_tsp.plan.layout import Layout
from megatron_tsp.plan.model import Model

SEQ, BATCH, HEADS, WIDTH, HIDDEN, FFN, VOCAB = 48, 2, 12, 4, 48, 96, 48
TOKENS = SEQ * BATCH
PLAIN = dict(gated_linear_unit=False, activation_func=F.gelu)


def _settings(degree, changes):
    return config(
        degree, hidden_size=HIDDEN, kv_channels=WIDTH, ffn_hidden_size=FFN,
        transformer_impl="local", **{"params_dtype": torch.float32, **changes},
    )  # fmt: skip


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
    forward = sent(counter)
    y.sum().backward()
    return forward, sent(counter)


def _forms(degree, changes, options, recompute=False, fold=True):
    """The planner's model and layout for the settings of a test."""
    model = Model(
        layers=2, hidden=HIDDEN, heads=HEADS, kv_heads=changes.get("num_query_groups", HEADS),
        channels=WIDTH, ffn=FFN, gated="activation_func" not in changes, vocab=VOCAB,
        vocab_divisor=1, sequence=SEQ, global_batch=BATCH,
        biases=changes.get("add_bias_linear", False), wide_grads=options.wide_grads,
        element=changes.get("params_dtype", torch.float32).itemsize,
    )  # fmt: skip
    layout = Layout(
        fold=fold, degree=degree, micro_batch=BATCH, recompute="full" if recompute else "none",
        exchange=options.attention_exchange, attention_schedule=options.attention_schedule,
        mlp_schedule=options.mlp_schedule, vocab_schedule=options.vocab_schedule,
    )  # fmt: skip
    return model, layout


def _expected(degree, changes, options, recompute=False, fold=True):
    """{block: bytes} of a layer, forward and backward."""
    given = _forms(degree, changes, options, recompute, fold)
    backward = forms.backward(*given) + forms.recompute(*given)
    return forms.total(forms.forward(*given), "block"), forms.total(backward, "block")


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
    expected = _expected(degree, changes, options, recompute)
    for counted in run(_layer, degree, degree, changes, options, recompute):
        assert counted == expected


def test_twin_one_more_transfer_is_seen():
    expected = _expected(2, {}, TSPOptions())
    counted = run(_layer_and_more, 2)[0]
    assert counted != expected


def _layer_and_more():
    from megatron_tsp.streaming import Ring, Slots

    forward = Ring.forward

    def twice(self, shards, then):
        self._hop(shards, Slots()).wait()
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
    return sent(counter), rows


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_a_model_sends_nothing_else(degree):
    forward, backward = _expected(degree, {}, TSPOptions())
    there, back = forms.loss(*_forms(degree, {}, TSPOptions()))
    for counted, rows in run(_model, degree, degree, "all"):
        assert counted == {
            "attention": 2 * (forward["attention"] + backward["attention"]),
            "mlp": 2 * (forward["mlp"] + backward["mlp"]),
            "embedding": rows * HIDDEN * 4,
            **forms.total(there + back, "block"),
        }


@pytest.mark.parametrize("degree", [2, 4])
def test_half_a_fold_moves_half_of_each(degree):
    """`mlp`: attention's two gathers and scatters stay; `attention`: the MLP's."""
    forward, backward = _expected(degree, {}, TSPOptions())
    of_blocks = _expected(degree, {}, TSPOptions(), fold=False)
    # 2 layers, half of each; what Megatron's own modules send bears no label
    tensor_parallel = sum(part[block] for part in of_blocks for block in ("attention", "mlp"))
    ends = _forms(degree, {}, TSPOptions(), fold=False)
    halves = [*forms.embedding(*ends), *forms.loss(*ends)]
    at_ends = sum(transfer.sent for half in halves for transfer in half)
    for counted, _ in run(_model, degree, degree, "attention"):
        assert counted["attention"] == 2 * (forward["attention"] + backward["attention"])
        assert "mlp" not in counted
        assert counted["other"] == tensor_parallel
    for counted, _ in run(_model, degree, degree, "mlp"):
        assert counted["mlp"] == 2 * (forward["mlp"] + backward["mlp"])
        assert "attention" not in counted
        assert counted["other"] == tensor_parallel + at_ends
