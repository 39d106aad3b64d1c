"""The planner: its profiles, its rules, what its simulation sends, its crossover, its errors."""

import random
import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from ranks import run

from megatron_tsp import checks, cli, plan
from megatron_tsp.ab import arms
from megatron_tsp.ab import config as config_module
from megatron_tsp.errors import TSPError
from megatron_tsp.plan import (
    calibrate,
    explain,
    hardware,
    plots,
    prediction,
    present,
    search,
    traffic,
)
from megatron_tsp.plan.layout import Layout
from megatron_tsp.plan.model import Experts, Model

#: The 7B of docs/planning.md: MHA, gated ffn of 4h.
SEVEN_B = Model(
    layers=32, hidden=4096, heads=32, kv_heads=32, channels=128, ffn=16384, gated=True, vocab=32000,
    sequence=131072, global_batch=128,
)  # fmt: skip
GQA = replace(SEVEN_B, kv_heads=8, ffn=14336)
#: In every second layer, with shared experts.
MIXTURE = Experts(
    count=64, chosen=8, ffn=1024, layers=(False, True) * 16, shared=2048, shared_gate=True
)  # fmt: skip
H200 = hardware.load("h200")
DISTRIBUTED = Layout(
    fold=False, distributed_optimizer=True, overlap_grads=True, overlap_params=True
)  # fmt: skip


# ---------------------------------------------------------------------------------------------
# Profiles
# ---------------------------------------------------------------------------------------------

NAMED = "a100 ascend_910b b200 gb200_nvl72 h100 h200 mi300x mi355x trainium2".split()


def test_every_profile_loads_and_every_number_has_a_source():
    assert set(NAMED) <= set(hardware.names())
    for name in hardware.names():
        profile = hardware.load(name)
        assert profile.numbers.keys() == hardware.NUMBERS.keys()
        assert all(profile.sources[number].strip() for number in hardware.NUMBERS)
        assert 0 < profile.usable_memory < profile.numbers["memory"] * 2**30


def _profile(tmp_path, **changes):
    content = yaml.safe_load((hardware.FOLDER / "h200.yaml").read_text())
    for key, value in changes.items():
        content.pop(key, None)
        if value is not None:
            content[key] = value
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"matmul": None}, "missing matmul"),
        ({"matmull": 1}, "unknown key 'matmull'; did you mean 'matmul'"),
        ({"fabric": "torus"}, "fabric 'torus': not one of mesh, switch"),
        ({"nic": 50}, "nic: expected {value: a number, source: where it is from}"),
        ({"nic": {"value": -1, "source": "x"}}, "nic: value -1: expected a number above 0"),
        ({"nic": {"value": "fast", "source": "x"}}, "value 'fast': expected a number"),
        ({"nic": {"value": 50, "source": " "}}, "source is empty"),
        ({"nic_efficiency": {"value": 1.5, "source": "x"}}, "a share is at most 1"),
        ({"nic": {"value": "1e3", "source": "x"}}, "above 0; YAML spells it 1000"),
        ({"reserve": {"value": 200, "source": "x"}}, "a reserve of 200 GiB leaves no memory"),
        ({"name": " "}, "name ' ': expected what the machine is called"),
        ({"devices_per_node": True}, "devices_per_node True: expected a whole number from 1"),
        ({"overlap": "no"}, "overlap 'no': expected true or false"),
        ({"price": 0}, "price: expected {value: a number"),
        ({"measured": dict.fromkeys(hardware.COLLECTIVES, {8: {"latency": "x", "bandwidth": 1}})},
         "measured: all_gather: 8: latency 'x', bandwidth 1: expected numbers"),
        ({"measured": dict.fromkeys(hardware.COLLECTIVES, {"8 ranks": {}})},
         "measured: all_gather: 8 ranks: expected a number of ranks"),
        ({"measured": {"all_gather": {8: {}}}}, "measured: expected each of all_gather"),
    ],
)  # fmt: skip
def test_a_wrong_profile_is_refused(tmp_path, changes, message):
    with pytest.raises(TSPError, match=message.replace("{", r"\{")):
        hardware.load(_profile(tmp_path, **changes))


def test_a_key_of_a_profile_given_twice_is_refused(tmp_path):
    path = Path(_profile(tmp_path))
    path.write_text(path.read_text() + "matmul: {value: 1, source: x}\n")
    with pytest.raises(TSPError, match="'matmul' is given twice"):
        hardware.load(str(path))


def test_a_profile_of_ones_own_is_one_file(tmp_path):
    path = _profile(tmp_path, name="mine", price={"value": 2.5, "source": "the bill"})
    assert hardware.load(path).price == 2.5
    with pytest.raises(TSPError, match="no such profile; did you mean 'h200'"):
        hardware.load("h20")
    with pytest.raises(TSPError, match="no such file"):
        hardware.load("nowhere/mine.yaml")


def test_links_of_a_mesh_and_of_a_switch():
    mesh, switch = hardware.load("mi300x"), hardware.load("h200")
    sent = 10e9

    def rate(profile, *args):
        return sent / profile.transfer(args[0], sent, *args[1:]) / 1e9

    # xGMI: a pair has one link of seven, a group of eight all; measured: 47.7 and 312.9 GB/s.
    assert rate(mesh, "all_gather", 2, 1) == pytest.approx(47.7, rel=0.05)
    assert rate(mesh, "all_gather", 8, 1) == pytest.approx(312.9, rel=0.05)
    assert rate(mesh, "send", 8, 1) == pytest.approx(rate(mesh, "all_gather", 2, 1), rel=0.01)
    pair = rate(switch, "all_gather", 2, 1)
    assert pair == pytest.approx(rate(switch, "all_gather", 8, 1), rel=0.01)
    # Beyond the node: the network card of a device, however many of a group share the node.
    assert rate(switch, "send", 2, 8) == pytest.approx(45, rel=0.01)
    assert rate(switch, "all_gather", 16, 8) == pytest.approx(45, rel=0.01)
    assert rate(switch, "all_gather", 16, 1) > 300


# ---------------------------------------------------------------------------------------------
# Bytes
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", [2, 8])
def test_the_crossover_of_the_paper(degree):
    """MHA, gated ffn of 4h, K and V gathered: TSP's forward sends less above N = 8h."""
    fold, flat = Layout(fold=True, degree=degree), Layout(fold=False, degree=degree)
    assert traffic.crossover(SEVEN_B, fold, flat) == 8 * SEVEN_B.hidden
    # The whole step: with dW in bf16 12h, with dW in fp32 16h (docs/design.md).
    narrow = replace(SEVEN_B, wide_grads=False)
    assert traffic.crossover(narrow, fold, flat, whole_step=True) == 12 * SEVEN_B.hidden
    assert traffic.crossover(SEVEN_B, fold, flat, whole_step=True) == 16 * SEVEN_B.hidden


def test_no_crossover_where_the_slopes_do_not_meet():
    fold = Layout(fold=True, degree=8, exchange="alltoall")
    assert traffic.crossover(SEVEN_B, fold, Layout(fold=False, degree=1)) == -1


LAYOUTS = [
    Layout(fold=False, degree=8, micro_batch=2),
    Layout(fold=False, degree=4, context=2),
    Layout(fold=False, degree=2, context=4, exchange="ring"),
    Layout(fold=False, degree=2, context=4, exchange="alltoall", recompute="full"),
    Layout(fold=False, degree=16, recompute="selective", modules=("mlp", "layernorm")),
    *(
        Layout(
            fold=True, degree=degree, exchange=exchange, attention_schedule=a, mlp_schedule=m,
            recompute=recompute,
        )
        for degree, exchange, a, m, recompute in [
            (8, "allgather", "broadcast", "ring", "none"),
            (4, "alltoall", "ring", "ring", "full"),
            (3, "allgather", "ring", "broadcast", "full"),
            (2, "allgather", "gather", "gather", "none"),
        ]
    ),
    Layout(fold=True, degree=4, save_kv=True),
    Layout(fold=True, degree=4, expert=4),
    Layout(fold=True, degree=4, expert=8, recompute="selective", modules=("moe",)),
    Layout(fold=False, degree=4, expert=2, recompute="selective", modules=("moe", "layernorm")),
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.grid}, {layout.options}")
def test_the_simulation_sends_what_the_closed_forms_say(layout, monkeypatch):
    """On a machine on which every byte takes a second."""
    monkeypatch.setattr(hardware.Hardware, "transfer", lambda self, kind, sent, *group: sent)
    model = replace(GQA, sequence=6144, heads=48, kv_heads=12, ffn=12288, hidden=6144)
    profile = replace(hardware.load("h200"))  # nothing is cached for this one
    moe = layout.expert > 1
    model = replace(model, mixture=MIXTURE if moe else None)
    forward, backward = prediction.layer_phases(model, layout, profile, moe)
    again = traffic.backward(model, layout, moe) + traffic.recompute(model, layout, moe)
    for phase, transfers in ((forward, traffic.forward(model, layout, moe)), (backward, again)):
        sent = sum(seconds for stream, seconds in phase.busy.items() if stream != "compute")
        assert sent == pytest.approx(float(sum(t.sent for t in transfers)), rel=1e-12)


# ---------------------------------------------------------------------------------------------
# Search
# ---------------------------------------------------------------------------------------------


def test_what_is_searched_is_what_runs(tmp_path):
    """The rules of `search.check` are those of `checks`, for TSP."""
    flags = config_module.read(_config(tmp_path)).model_args
    parsed = vars(arms.check_flags(arms.Arm("any", 1, flags | {"--tsp-size": "2"})))
    draw, seen = random.Random(0), set()
    for _ in range(400):
        heads, channels = draw.choice([4, 6, 12, 16]), draw.choice([2, 3, 8])
        model = Model(
            layers=2, hidden=heads * channels, heads=heads, kv_heads=draw.choice([1, 2, 3, heads]),
            channels=channels, ffn=draw.choice([32, 36, 48]), gated=True, vocab=64,
            sequence=draw.choice([16, 24, 30, 32, 48]), global_batch=1,
        )  # fmt: skip
        layout = Layout(
            fold=True, degree=draw.choice([2, 3, 4, 6, 8]), context=draw.choice([1, 1, 2]),
            exchange=draw.choice(["allgather", "alltoall"]),
        )  # fmt: skip
        args = parsed | dict(
            tsp_size=layout.degree, tensor_model_parallel_size=layout.degree,
            hidden_size=model.hidden, num_attention_heads=heads, ffn_hidden_size=model.ffn,
            num_query_groups=model.kv_heads, group_query_attention=True, kv_channels=channels,
            seq_length=model.sequence, context_parallel_size=layout.context,
            tsp_attention_exchange=layout.exchange, world_size=layout.ranks,
            padded_vocab_size=None,
        )  # fmt: skip
        try:
            checks.check_sizes(Namespace(**args))
            runs = True
        except TSPError:
            runs = False
        assert (search.check(model, layout) is None) == runs, (model, layout)
        seen.add(runs)
    assert seen == {True, False}


def _search(model, ranks, machine, **changes):
    profile = replace(hardware.load(machine))
    numbers = {**profile.numbers, **changes}
    return search.search(model, ranks, DISTRIBUTED, replace(profile, numbers=numbers), True, False)


def test_memory_decides_where_it_is_short():
    """With plenty of it TSP is not first at a short sequence; at 1M tokens on 80 GB it is."""
    short = replace(SEVEN_B, sequence=2048, global_batch=64)
    fitting, _ = _search(short, 8, "h200")
    assert not fitting[0].layout.fold
    long = replace(SEVEN_B, sequence=2**20, global_batch=1)
    fitting, too_large = _search(long, 8, "h100")
    assert fitting[0].layout.fold and too_large
    assert all(p.memory.peak <= p.hardware.usable_memory for p in fitting)
    assert all(p.memory.peak > p.hardware.usable_memory for p in too_large)
    assert [p.step for p in fitting] == sorted(p.step for p in fitting)


def test_experts_are_spread_over_what_divides():
    model = replace(GQA, mixture=MIXTURE, sequence=16384, global_batch=64)
    fitting, _ = _search(model, 16, "h200")
    spread = {p.layout.expert for p in fitting}
    assert {1, 2, 4, 8, 16} >= spread and max(spread) > 2
    assert all(p.layout.ranks // p.layout.pipeline % p.layout.expert == 0 for p in fitting)
    assert any(p.layout.fold for p in fitting)
    # More ranks a copy of the experts: less memory, more on the wire.
    fold = Layout(fold=True, degree=8, data=2)
    few, many = (prediction.predict(model, replace(fold, expert=n), H200) for n in (2, 8))
    assert few.memory.peak > many.memory.peak
    assert few.phase.busy["experts"] < many.phase.busy["experts"]


def test_interleaving_trades_the_bubble_for_memory():
    model = replace(SEVEN_B, sequence=8192, global_batch=64)
    once = Layout(fold=True, degree=2, pipeline=4, data=1)
    predicted = [
        prediction.predict(model, replace(once, virtual=virtual), H200) for virtual in (1, 2, 4, 8)
    ]
    bubbles = [p.phase.waited["pipeline"] for p in predicted]
    assert bubbles == sorted(bubbles, reverse=True)
    held = [p.memory.activations for p in predicted]
    assert held[0] < min(held[1:])
    # (stages - 1)/virtual micro-batches of idle time, but for the hops.
    assert bubbles[3] == pytest.approx(bubbles[0] / 8, rel=0.3)
    fitting, _ = _search(model, 8, "h100")
    assert {1, 2, 4, 8} <= {p.layout.virtual for p in fitting}


def test_an_impossible_job_is_an_error():
    with pytest.raises(TSPError, match="no layout of 8 ranks fits: the leanest, TSP 8"):
        _search(SEVEN_B, 8, "h100", memory=10)
    with pytest.raises(TSPError, match="a global batch of 3 sequences does not feed them"):
        _search(replace(SEVEN_B, global_batch=3), 2**21, "h100")


def test_in_words():
    long = replace(SEVEN_B, global_batch=64)
    fitting, _ = _search(long, 64, "mi300x")
    best = explain.by_grid(fitting)
    grids = [p.layout.grid for p in best]
    assert len(grids) == len(set(grids))
    fold = next(p for p in best if p.layout.fold)
    flat = next(p for p in best if not p.layout.fold and p.layout.context == 1)
    text = explain.binds(flat)
    assert "waiting for gathers and scatters of activations" in text and "links in a node" in text
    lines = explain.crossovers(fold, flat)
    assert any("tokens a sequence" in line for line in lines)
    assert any("sequences a step" in line for line in lines)
    # Each line that says where the order turns is right on both of its sides.
    for line in lines:
        if found := re.fullmatch(r"up to ([\d,]+) tokens a sequence (.*) is faster, .*", line):
            rates = []
            for p in (fold, flat):
                at = explain.at_sequence(p, int(found[1].replace(",", "")))
                fits = at.memory.peak <= at.hardware.usable_memory
                rates.append(at.tokens_per_s if fits else 0)
            assert found[2] == (fold, flat)[rates[1] > rates[0]].layout.grid
    assert "which would be" in explain.kept_out(fold, flat)
    assert explain.too_many(0) == "All fit" and explain.too_many(2000) == "2,000 do not fit"
    assert "tokens/USD" in explain.table(best[:2], 2.0)
    twice = explain.tokens_per_dollar(fold, 1.0), explain.tokens_per_dollar(fold, 2.0)
    assert twice[0] == 2 * twice[1]


# ---------------------------------------------------------------------------------------------
# Calibration
# ---------------------------------------------------------------------------------------------


def _measured():
    calibrate.LONG_ENOUGH = 0.02
    return calibrate.measure()


def test_a_measured_machine_is_a_profile(tmp_path):
    """Four gloo ranks: what they measure makes a profile that loads and predicts."""
    measured = run(_measured, 4)
    assert all(one == measured[0] for one in measured)
    path = tmp_path / "here.yaml"
    profile = calibrate.profile(hardware.load("cpu"), measured[0], 4)
    path.write_text(yaml.safe_dump(profile))
    here = hardware.load(str(path))
    assert not here.overlap and here.precision == "fp32"
    assert 0.1e9 < here.numbers["matmul"] * 1e12 < 1e13
    assert set(here.measured) == set(hardware.COLLECTIVES)
    assert all(set(table) == {2, 4} for table in here.measured.values())
    small = replace(SEVEN_B, layers=2, hidden=256, heads=8, kv_heads=8, channels=32, ffn=1024)
    small = replace(small, sequence=1024, global_batch=1, element=4)
    fold = prediction.predict(small, Layout(fold=True, degree=4), here)
    # The processor does the transfers: none is hidden.
    assert fold.phase.waited["kv"] == pytest.approx(fold.phase.busy["kv"])
    assert fold.step == pytest.approx(sum(fold.phase.busy.values()))


# ---------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------


def _config(tmp_path, **changes):
    flags = {
        "--num-layers": 4, "--hidden-size": 512, "--num-attention-heads": 8, "--swiglu": True,
        "--ffn-hidden-size": 2048, "--normalization": "RMSNorm", "--disable-bias-linear": True,
        "--untie-embeddings-and-output-weights": True, "--position-embedding-type": "rope",
        "--vocab-size": 1000, "--tokenizer-type": "NullTokenizer", "--seq-length": 4096,
        "--micro-batch-size": 1, "--global-batch-size": 16, "--tensor-model-parallel-size": 4,
        "--sequence-parallel": True, "--bf16": True, "--attention-dropout": 0,
        **changes,
    }  # fmt: skip
    path = tmp_path / "config.yaml"
    flags = {flag: value for flag, value in flags.items() if value is not None}
    path.write_text(yaml.safe_dump({"MODEL_ARGS": flags}))
    return str(path)


EXPERTS = {"--num-experts": 8, "--expert-tensor-parallel-size": 1}


def test_the_command(tmp_path, capsys):
    out = tmp_path / "out.json"
    words = [_config(tmp_path), "--hardware", "h200", "--gpus", "8", "--json", str(out)]
    assert cli.main(["plan", *words, "--price", "3"]) == 0
    text = capsys.readouterr().out
    for part in ("First: ", "Runner-up: ", "Present: TP 4+SP × DP 2", "A flip to TSP 4 × DP 2"):
        assert part in text
    layouts = yaml.safe_load(out.read_text())["layouts"]
    assert layouts[0]["step_s"] == min(layout["step_s"] for layout in layouts)
    flags = {flag for layout in layouts for flag in layout["flags"]}
    assert {"--tsp-size", "--tensor-model-parallel-size"} <= flags


def test_a_mixture_of_experts_is_planned(capsys):
    config = Path(__file__).parents[1] / "configs/moe/8gpus.yaml"
    assert cli.main(["plan", str(config), "--hardware", "mi300x"]) == 0
    text = capsys.readouterr().out
    assert "6.92 B parameters" in text and "Present: TP 8+SP, EP 8" in text
    assert "waiting for tokens to experts and back" in text
    assert "A flip to TSP 8, EP 8" in text
    model, present_one, _ = plan.read(str(config), 8)
    assert model.mixture.count == 64 and all(model.mixture.layers) and present_one.expert == 8
    # 1.3 B of the parameters are at work on a token.
    assert model.active_weights + 2 * model.vocab * model.hidden == pytest.approx(1.28e9, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "words", "message"),
    [
        ({"--vocab-size": None}, [], "--vocab-size is missing"),
        ({"--num-experts": 8}, [], "--expert-tensor-parallel-size 4: megatron-tsp plan prices"),
        (EXPERTS | {"--moe-latent-size": 64}, [], "does not price --moe-latent-size"),
        (EXPERTS | {"--moe-token-dispatcher-type": "flex"}, [],
         "--moe-token-dispatcher-type flex: megatron-tsp plan prices alltoall and allgather"),
        (EXPERTS | {"--expert-model-parallel-size": 3}, [],
         "--expert-model-parallel-size 3 does not divide the 8 ranks"),
        (EXPERTS | {"--moe-layer-freq": "([1,0])"}, [], "--moe-layer-freq names 2 layers of 4"),
        ({"--hidden-sizes": 8}, [], "no flag '--hidden-sizes'; did you mean '--hidden-size'"),
        ({"--bf16": None}, [], "is for bf16, and the configuration trains in fp32"),
        ({"--tsp-size": 4, "--tsp-blocks": "mlp"}, [], "does not price --tsp-blocks mlp"),
        ({"--sequence-parallel": None}, [], "with --sequence-parallel only"),
        ({"--recompute-granularity": "selective", "--recompute-modules": "moe"}, [],
         "--recompute-modules moe"),
        ({}, ["--gpus", "6"], "a replica of the present layout takes 4 x 1 x 1 = 4 ranks"),
        ({}, ["--gpus", "0"], "--gpus 0: expected a number from 1"),
        ({}, ["--seq-len", "0"], "--seq-len 0"),
        ({}, ["--global-batch-tokens", "5000"], "not a multiple of the sequence"),
        ({}, ["--json", "/nowhere/out.json"], "no folder /nowhere"),
        ({}, ["--plot", "plot.gif"], "expected a name that ends in .png or .svg or .pdf"),
        ({}, ["--price", "0"], "--price 0: expected a number above 0"),
        ({}, ["--hardware", "abacus"], "no such profile"),
    ],
)  # fmt: skip
def test_wrong_input_is_a_clear_error(tmp_path, capsys, changes, words, message):
    machine = [] if "--hardware" in words else ["--hardware", "h200"]
    assert cli.main(["plan", _config(tmp_path, **changes), *machine, *words]) == 2
    assert message in capsys.readouterr().err


def test_calibration_wants_ranks_and_a_folder(tmp_path, capsys):
    words = ["plan", "--hardware", "cpu", "--calibrate"]
    assert cli.main([*words, "/nowhere/mine.yaml"]) == 2
    assert cli.main([*words, str(tmp_path / "mine.yaml"), "--gpus", "1"]) == 2
    assert cli.main(["plan", "--hardware", "cpu"]) == 2
    error = capsys.readouterr().err
    for part in ("no folder /nowhere", "--gpus 1: expected 2", "needs CONFIG.yaml, or --calibrate"):
        assert part in error


def test_a_plot_is_a_picture(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "SEQUENCES", (8192, 131072))
    monkeypatch.setattr(plots, "TOKENS", (4096, 131072))
    monkeypatch.setattr(plots, "SIZES", (2, 8))
    path = tmp_path / "plot.png"
    plots.write(str(path), SEVEN_B, DISTRIBUTED, hardware.load("mi300x"), True)
    assert path.read_bytes().startswith(b"\x89PNG")
    found = plots.winners(SEVEN_B, DISTRIBUTED, hardware.load("h100"), True)
    assert found[4096, 8] in ("TP+SP", "TP×CP") and found[131072, 2] is None


def test_a_model_that_tsp_refuses_is_planned_without_it(tmp_path, capsys):
    config = _config(tmp_path, **{"--use-mup": True})
    assert cli.main(["plan", config, "--hardware", "h200", "--gpus", "8"]) == 0
    text = capsys.readouterr().out
    assert "Without TSP: --use-mup" in text and "| TSP" not in text


def test_the_present_layout_and_its_flip(tmp_path):
    recompute = {"--recompute-granularity": "full", "--recompute-method": "uniform"}
    config = _config(tmp_path, **recompute)
    model, layout, refusal = plan.read(config, 8, seq_len=8192)
    assert (model.sequence, model.global_batch, refusal) == (8192, 8, "")
    assert (layout.degree, layout.data, layout.recompute) == (4, 2, "full")
    other, _ = present.flipped(model, layout)
    assert other.fold and other.recompute == "full" and other.degree == 4
    assert present.flipped(model, replace(other))[0] == layout
    assert present.flipped(model, Layout(fold=False))[0] is None
