"""The A/B harness: configurations, command lines, arithmetic, failures, and one whole run."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from megatron_tsp import ab, cli
from megatron_tsp.ab import arms, config, initial, plots, report, runner
from megatron_tsp.errors import TSPError

ROOT = Path(__file__).parents[1]


def write(folder, content):
    path = folder / "ab.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def read(folder, **top):
    return config.read(write(folder, {"MODEL_ARGS": {"--num-layers": 2}, **top}))


# ---------------------------------------------------------------------------------------------
# Configuration
# ---------------------------------------------------------------------------------------------


def test_megatrons_yaml_form(tmp_path, monkeypatch):
    monkeypatch.setenv("WHERE", "/data")
    read_back = config.read(
        write(
            tmp_path,
            """
ENV_VARS: {CUBLAS_WORKSPACE_CONFIG: ":4096:8", N: 1}
MODEL_ARGS:
  --swiglu: true
  --bf16: false
  --lr: 1e-2
  --split: 949,50,1
  --blend: [0.5, "${WHERE}/a", 0.5, b]
  --tensor-model-parallel-size: 2
TEST_TYPE: regular
""",
        )
    )
    assert read_back.env == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "N": "1"}
    assert (read_back.ranks, read_back.degree) == (4, 2)
    words = arms.make("tsp", read_back).words()
    assert " ".join(words) == "--swiglu --lr 1e-2 --split 949,50,1 --blend 0.5 /data/a 0.5 b " + (
        "--tsp-size 2"
    )


BAD_CONFIGS = {
    "MODEL_ARG: {--a: 1}": "unknown key 'MODEL_ARG'; did you mean 'MODEL_ARGS'?",
    "ENV_VARS: {A: 1}": "has no MODEL_ARGS",
    "": "has no MODEL_ARGS",
    "[1, 2]": "the file: expected `key: value` lines, not a list",
    "MODEL_ARGS: [1]": "MODEL_ARGS: expected `key: value` lines, not a list",
    "MODEL_ARGS: {num_layers: 1}": "'num_layers' is not a flag; did you mean '--num-layers'?",
    "MODEL_ARGS: {--a: {b: 1}}": "MODEL_ARGS: --a: expected one value, not a mapping",
    "MODEL_ARGS: {--a: }": "MODEL_ARGS: --a has no value; for a flag without one write `true`",
    "MODEL_ARGS: {--a: 1, --a: 2}": "'--a' is given twice",
    "MODEL_ARGS: {--a: '${NO_SUCH}'}": "--a: the environment variable NO_SUCH is not set",
    "MODEL_ARGS: {--a: 1}\nNPROC_PER_NODE: four": "NPROC_PER_NODE: expected a whole number",
    "MODEL_ARGS: {--a: 1}\nTSP_SIZE: 3": "TSP_SIZE 3 does not divide NPROC_PER_NODE 4",
    "MODEL_ARGS: {--a: 1}\nDATA: {OUTPUT: x}": "DATA: unknown key 'OUTPUT'; did you mean 'OUT'?",
    "MODEL_ARGS: {--a: 1}\nDATA: {INPUT: x}": "DATA: OUT is missing",
    "MODEL_ARGS: {--a: 1}\nINITIAL_WEIGHTS: seeds": "unknown key 'seeds'; did you mean 'seed'?",
    "MODEL_ARGS: {--a: 1}\nARMS: {x: {lr: 1}}": "ARMS: x: 'lr' is not a flag",
    "MODEL_ARGS: {--a: 1": "not YAML",
}


@pytest.mark.parametrize("text", BAD_CONFIGS)
def test_bad_configuration_names_the_key(text, tmp_path, capsys):
    assert cli.main(["ab", str(write(tmp_path, text)), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("megatron-tsp: error: ") and BAD_CONFIGS[text] in error
    assert not (tmp_path / "out").exists()


def test_missing_file_and_unknown_arm(tmp_path):
    with pytest.raises(TSPError, match="cannot read the configuration .*none.yaml: No such file"):
        config.read(tmp_path / "none.yaml")
    with pytest.raises(TSPError, match="no arm 'tsq'; did you mean 'tsp'?"):
        arms.make("tsq", read(tmp_path))


def test_flags_are_checked_by_megatrons_parser(tmp_path):
    unknown = read(tmp_path, MODEL_ARGS={"--hiden-size": 64})
    with pytest.raises(TSPError, match="no flag '--hiden-size'; did you mean '--hidden-size'?"):
        arms.check_flags(arms.make("tsp", unknown))
    mistyped = read(tmp_path, MODEL_ARGS={"--hidden-size": "big"})
    with pytest.raises(TSPError, match="tsp: argument --hidden-size: invalid int value: 'big'"):
        arms.check_flags(arms.make("tsp", mistyped))
    missing = read(tmp_path, MODEL_ARGS={"--data-path": f"0.5 {tmp_path}/nothing"})
    with pytest.raises(TSPError, match="no file .*/nothing.idx"):
        arms.check_data(arms.make("tsp", missing))


# ---------------------------------------------------------------------------------------------
# Arms
# ---------------------------------------------------------------------------------------------


def test_built_in_arms_differ_in_parallelism_only(tmp_path):
    both = {"--num-layers": "2", "--seed": "1"}
    read_back = read(
        tmp_path,
        MODEL_ARGS={**both, "--save": "x", "--tensor-model-parallel-size": 4},
        ARMS={"wide": {"--tsp-size": 8, "--seed": 2, "NPROC_PER_NODE": 8}},
    )
    tp_sp, tsp, tp1, wide = (arms.make(n, read_back) for n in ("tp_sp", "tsp", "tp1", "wide"))
    assert tsp.flags == {**both, "--tsp-size": "4"}
    assert tp_sp.flags == {
        **both,
        "--tensor-model-parallel-size": "4",
        "--sequence-parallel": True,
        "--tsp-baseline-core": True,
    }
    # The same padded vocabulary: Megatron pads to a multiple of this times the TP size.
    assert tp1.flags == {
        **both, "--make-vocab-size-divisible-by": "512", "--tsp-baseline-core": True
    }  # fmt: skip
    assert wide.flags == {"--num-layers": "2", "--seed": "2", "--tsp-size": "8"}
    assert [arm.ranks for arm in (tp_sp, tsp, tp1, wide)] == [4, 4, 1, 8]
    assert tsp.env["OMP_NUM_THREADS"] == "1"


def test_arms_named_by_their_sizes(tmp_path):
    read_back = read(
        tmp_path,
        NPROC_PER_NODE=8,
        MODEL_ARGS={"--seed": 1, "--cp-comm-type": "all_gather", "--context-parallel-size": 4},
        ARMS={"tp4_cp2": {"--seed": 2}, "tp2_cp2": {"NPROC_PER_NODE": 4}},
    )
    assert read_back.degree == 2
    made = {
        name: arms.make(name, read_back)
        for name in ("tp4_cp2", "tp2_cp2", "cp8", "tp8", "tsp4_cp2", "tsp8", "tsp")
    }
    words = {name: " ".join(arm.words()) for name, arm in made.items()}
    seed, kind, unit = "--seed 1 ", "--cp-comm-type all_gather ", "--make-vocab-size-divisible-by "
    both = kind + seed
    tensor = "--tensor-model-parallel-size {} --sequence-parallel --tsp-baseline-core"
    assert words == {
        "tp4_cp2": f"{kind}--seed 2 {unit}64 --context-parallel-size 2 " + tensor.format(4),
        "tp2_cp2": f"{both}--context-parallel-size 2 " + tensor.format(2),
        "cp8": f"{both}{unit}256 --context-parallel-size 8 --tsp-baseline-core",
        "tp8": f"{both}{unit}32 " + tensor.format(8),
        "tsp4_cp2": f"{seed}{unit}64 --context-parallel-size 2 --tsp-size 4",
        "tsp8": f"{seed}{unit}32 --tsp-size 8",
        "tsp": f"--context-parallel-size 4 {seed}--tsp-size 2",
    }
    assert all(arm.ranks == (4 if name == "tp2_cp2" else 8) for name, arm in made.items())
    for wrong, message in (
        ("tp3_cp2", "arm tp3_cp2 needs a multiple of 6 ranks, not 8"),
        ("tp4_", "no arm 'tp4_'"),
        ("tp4cp2", "did you mean 'tp4_cp2'"),
        ("cp", "sizes are named as in tp4_cp2"),
    ):
        with pytest.raises(TSPError, match=message):
            arms.make(wrong, read_back)


def test_how_the_weights_are_made_the_same(tmp_path):
    def how(**top):
        read_back = read(tmp_path, **top)
        return initial.choose(read_back, [arms.make(n, read_back) for n in ("tp_sp", "tsp")])[0]

    on_cpu = {"--use-cpu-initialization": True}
    assert how(MODEL_ARGS=on_cpu) == "seed"
    assert how(MODEL_ARGS={"--num-layers": 2}) == "checkpoint"
    assert how(MODEL_ARGS=on_cpu, INITIAL_WEIGHTS="checkpoint") == "checkpoint"
    assert how(MODEL_ARGS={**on_cpu, "--load": "x"}) == "loaded"
    assert how(MODEL_ARGS={"--load": "x"}, ARMS={"tsp": {"--load": "y"}}) == "loaded"
    assert how(MODEL_ARGS={"--num-layers": 2}, ARMS={"tsp": on_cpu, "tp_sp": on_cpu}) == "seed"
    two = {**on_cpu, "--pipeline-model-parallel-size": 2}
    assert how(MODEL_ARGS=two) == "seed"
    # The default, written out, is the same seed; one stage has no split.
    written = {"tsp": {"--seed": 1234, "--account-for-loss-in-pipeline-split": True}}
    assert how(MODEL_ARGS=on_cpu, ARMS=written) == "seed"


NOT_THE_SAME = {
    "a GPU's generator": (
        {"--use-cpu-initialization": False}, {}, "without --use-cpu-initialization (arms: tp_sp"
    ),
    "one arm's": ({}, {"--use-cpu-initialization": False}, "(arms: tsp) each rank draws its own"),
    "seed": ({}, {"--seed": 7}, "the arms differ in --seed: tp_sp 1234, tsp 7. Make them alike"),
    "stages": ({}, {"--pipeline-model-parallel-size": 2}, "pipeline stages, which enter the seed"),
    "split": (
        {"--pipeline-model-parallel-size": 2},
        {"--decoder-first-pipeline-num-layers": 1},
        "tp_sp 2, tsp 2 --decoder-first-pipeline-num-layers 1",
    ),
    "experts": ({}, {"--expert-model-parallel-size": 2}, "--expert-model-parallel-size: tp_sp 1"),
    "vocabulary": ({}, {"--tsp-size": 2}, "tp_sp multiples of 512, tsp multiples of 256"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_THE_SAME)
def test_the_seed_is_claimed_only_where_it_gives_the_same_weights(case, tmp_path):
    changes, own, message = NOT_THE_SAME[case]
    top = {
        "MODEL_ARGS": {"--use-cpu-initialization": True, **changes},
        "TSP_SIZE": 4,
        "ARMS": {"tsp": own},
    }

    def choose(**more):
        read_back = read(tmp_path, **top, **more)
        return initial.choose(read_back, [arms.make(n, read_back) for n in ("tp_sp", "tsp")])

    assert choose()[0] == "checkpoint"
    with pytest.raises(TSPError, match="INITIAL_WEIGHTS: seed does not give every arm") as error:
        choose(INITIAL_WEIGHTS="seed")
    assert message in str(error.value)
    assert "INITIAL_WEIGHTS: checkpoint" in str(error.value)


def test_arms_that_load_are_not_seeded(tmp_path):
    def choose(names, **top):
        read_back = read(tmp_path, **top)
        return initial.choose(read_back, [arms.make(n, read_back) for n in names])

    both, on_cpu = ("tp_sp", "tsp"), {"--use-cpu-initialization": True}
    with pytest.raises(TSPError, match=r"tp_sp loads x\. Drop INITIAL_WEIGHTS"):
        choose(both, MODEL_ARGS={**on_cpu, "--load": "x"}, INITIAL_WEIGHTS="seed")
    one = {"tsp": {"--load": "y"}}
    with pytest.raises(TSPError, match="tsp loads y"):
        choose(both, MODEL_ARGS=on_cpu, INITIAL_WEIGHTS="seed", ARMS=one)
    with pytest.raises(TSPError, match=r"tp_sp nothing, tsp y\): give --load to every arm"):
        choose(both, MODEL_ARGS=on_cpu, ARMS=one)
    assert choose(["tsp"], ARMS=one) == ("loaded", "every arm loads y")


def test_an_earlier_runs_checkpoint_is_gone_before_the_new_one(tmp_path, monkeypatch):
    old = tmp_path / "checkpoint" / "iter_0000001"
    old.mkdir(parents=True)

    def fails(arm, folder, iterations):
        assert not (tmp_path / "checkpoint").exists()
        raise runner.ArmFailed("no memory")

    monkeypatch.setattr(runner, "run", fails)
    with pytest.raises(runner.ArmFailed):
        initial.save(arms.make("tsp", read(tmp_path)), tmp_path)
    assert not old.parent.exists()


# ---------------------------------------------------------------------------------------------
# Report
# ---------------------------------------------------------------------------------------------


def record(folder, ranks, losses, norms, seconds, memory, sent):
    """Write ranks' records: `seconds`, `memory` and `sent` of a rank are functions of its rank."""
    folder.mkdir(parents=True)
    for rank in range(ranks):
        lines = []
        for i, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=1):
            measured = i in (3, 4)
            lines.append(
                {
                    "iteration": i,
                    "loss": loss if rank == ranks - 1 else None,
                    "grad_norm": norm,
                    "step_time_s": seconds(rank) * (100 if measured or i <= 2 else 1),
                    "timed": not measured,
                    "peak_memory_bytes": memory(rank) + i if measured else None,
                    "bytes_sent": {"send": sent(rank), "all_reduce": 8 if i == 1 else 4},
                    "bytes_by_block": {"mlp": sent(rank), "other": 4},
                    "tokens": 600,
                }
            )
        (folder / f"rank{rank}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return report.read_arm(folder, ranks)


@pytest.fixture
def built(tmp_path):
    steps = 30
    losses = [5 - 0.1 * i for i in range(steps)]
    norms = [2.0] * steps
    other_losses = [x + (3e-7 if i == 7 else 0) + (1e-3 if i == 25 else 0) for i, x in
                    enumerate(losses)]  # fmt: skip
    other_norms = [2.0 + (2e-6 if i == 3 else 0) + (0.5 if i == 29 else 0) for i in range(steps)]
    results = {
        "tp_sp": record(
            tmp_path / "a", 2, losses, norms, lambda r: 2.0 + r, lambda r: 1000 + r, lambda r: 96
        ),
        "tsp": record(
            tmp_path / "b", 2, other_losses, other_norms, lambda r: 1.5, lambda r: 500,
            lambda r: 40 + 6 * r,
        ),
    }  # fmt: skip
    for arm in results.values():
        arm["command"] = "torchrun"
    return report.build(results, {"config": "ab.yaml", "notes": ["a note"]})


def test_report_arithmetic(built):
    tp_sp, tsp = built["arms"]["tp_sp"], built["arms"]["tsp"]
    assert built["between"] == ["tsp", "tp_sp"]
    assert tp_sp["loss"][0] == 5 and len(tp_sp["loss"]) == 30
    assert tp_sp["step_time_s"] == 3.0  # the slowest rank, without warm-up and measured steps
    assert tp_sp["timed_steps"] == 26
    assert tp_sp["tokens_per_s"] == 200
    assert tp_sp["peak_memory_bytes"] == [1004, 1005]
    assert tsp["bytes_sent_per_rank_per_step"] == {"all_reduce": [4, 4], "send": [40, 46]}
    assert tsp["bytes_by_block"] == {"mlp": 86, "other": 8}
    assert built["parity"] == {
        "steps": 20,
        "max_abs_loss_diff": pytest.approx(3e-7, rel=1e-6),
        "max_rel_grad_norm_diff": pytest.approx(1e-6, rel=1e-6),
        "first_loss_diff": 0,
    }
    assert built["drift"]["max_abs_loss_diff"] == pytest.approx(1e-3)
    assert built["drift"]["max_rel_grad_norm_diff"] == pytest.approx(0.25)
    assert built["ratios"] == {"time": 0.5, "memory": 504 / 1005, "bytes": 0.5}


def test_a_nan_is_not_parity(built):
    arm = dict(built["arms"]["tsp"], loss=[float("nan"), *built["arms"]["tsp"]["loss"][1:]])
    difference = report.compare(arm, built["arms"]["tp_sp"])["parity"]["max_abs_loss_diff"]
    assert difference != difference


def test_a_loss_that_is_not_finite_is_told_and_json_stays_json(built, tmp_path):
    tp_sp, tsp = built["arms"]["tp_sp"], built["arms"]["tsp"]
    tsp = dict(tsp, loss=[*tsp["loss"][:6], float("nan"), float("nan"), *tsp["loss"][8:]])
    tp_sp = dict(tp_sp, grad_norm=[*tp_sp["grad_norm"][:-1], float("inf")])
    broken = report.build({"tp_sp": tp_sp, "tsp": tsp}, {"config": "ab.yaml"})
    assert broken["not_finite"] == [
        "arm tp_sp: the gradient norm became infinite at iteration 30",
        "arm tsp: the loss became NaN at iteration 7",
    ]
    report.write(broken, tmp_path, plots.draw(broken, tmp_path))

    def bare(constant):
        raise AssertionError(f"{constant} is not JSON")

    text = (tmp_path / "report.json").read_text()
    result = json.loads(text, parse_constant=bare)
    assert result["arms"]["tsp"]["loss"][6] is None
    assert result["parity"]["max_abs_loss_diff"] is None
    assert result["not_finite"] == broken["not_finite"]
    assert "- arm tsp: the loss became NaN at iteration 7" in (tmp_path / "report.md").read_text()
    assert built["not_finite"] == []


@pytest.mark.parametrize(
    ("happens", "code", "said"),
    [
        (lambda: {"not_finite": []}, 0, ""),
        (lambda: {"not_finite": ["arm tsp: the loss became NaN at iteration 7"]}, 1, "became NaN"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), 143, "terminated"),
        (lambda: os.kill(os.getpid(), signal.SIGINT), 130, "interrupted"),
    ],
    ids=["fine", "nan", "sigterm", "ctrl-c"],
)
def test_exit_code(happens, code, said, tmp_path, monkeypatch, capsys):
    previous = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(ab, "_run", lambda config, arms, folder: happens())
    monkeypatch.setattr(ab, "_print", lambda report, folder: None)
    path = write(tmp_path, {"MODEL_ARGS": {"--num-layers": 2}})
    assert cli.main(["ab", str(path), "--out", str(tmp_path / "out")]) == code
    assert said in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is previous


def test_flags_that_arms_run_without_are_noted(tmp_path):
    read_back = read(
        tmp_path,
        MODEL_ARGS={
            "--num-layers": 2, "--save": "x", "--save-interval": 5, "--tsp-record": "y",
            "--tensor-model-parallel-size": 2, "--pipeline-model-parallel-size": 2, "--bf16": False,
        },
        ARMS={"tp_sp": {"--save": "z"}},
    )  # fmt: skip
    made = [arms.make(name, read_back) for name in ("tp_sp", "tsp", "tp1")]
    assert ab._left_out(read_back, made) == [
        "left out of MODEL_ARGS: --save-interval, --tsp-record",
        "left out of MODEL_ARGS by tsp: --save, --tensor-model-parallel-size",
        "left out of MODEL_ARGS by tp1: --pipeline-model-parallel-size, --save, "
        "--tensor-model-parallel-size",
    ]
    notes = ab._about(read_back, made, "the seed")["notes"]
    assert "left out of MODEL_ARGS: --save-interval, --tsp-record" in notes


def test_tokens_per_s_are_the_global_batchs_by_the_median_step(built):
    for arm in built["arms"].values():
        assert arm["tokens_per_s"] == 600 / arm["step_time_s"]


def test_report_files(built, tmp_path):
    report.write(built, tmp_path, plots.draw(built, tmp_path))
    assert json.loads((tmp_path / "report.json").read_text())["parity"]["steps"] == 20
    text = (tmp_path / "report.md").read_text()
    for expected in ("| tsp / tp_sp |", "a note", "3.00e-07", "| send ", "40, 46", "loss.png"):
        assert expected in text
    for name in plots.NAMES:
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"


def test_a_record_of_unequal_length_is_an_error(tmp_path, built):
    lines = (tmp_path / "a" / "rank1.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a" / "rank1.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(runner.ArmFailed, match="differ in length"):
        report.read_arm(tmp_path / "a", 2)
    with pytest.raises(runner.ArmFailed, match="rank2.jsonl: the rank finished no"):
        report.read_arm(tmp_path / "a", 3)


# ---------------------------------------------------------------------------------------------
# Jobs
# ---------------------------------------------------------------------------------------------

FAIL_ON_RANK_1 = """
import os, sys, time
if os.environ["RANK"] == "1":
    raise RuntimeError("the shard of rank 1 is bent")
time.sleep(60)
"""

SLEEP = """
import os, pathlib, time
pathlib.Path(os.environ["HERE"], "pid" + os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(60)
"""


class Script(arms.Arm):
    """An arm that runs a script instead of Megatron, for failures that come fast."""

    def command(self, record, logs):
        command = super().command(record, logs)
        return [*command[: command.index("-m", 2)], self.flags["script"]]


def script_arm(folder, text, ranks=2):
    path = folder / "script.py"
    path.write_text(text)
    return Script("broken", ranks, {"script": str(path)}, {"HERE": str(folder)})


def test_a_failing_arm_shows_the_ranks_own_error_and_its_log(tmp_path):
    start = time.monotonic()
    with pytest.raises(runner.ArmFailed) as caught:
        runner.run(script_arm(tmp_path, FAIL_ON_RANK_1), tmp_path / "out", 10)
    assert time.monotonic() - start < 45
    message = str(caught.value)
    assert message.startswith("arm broken: rank 1 failed:\nTraceback")
    assert "RuntimeError: the shard of rank 1 is bent" in message
    log = Path(message.rsplit("log: ", 1)[1])
    assert "bent" in log.read_text()


def test_a_users_error_is_shown_as_one_line():
    text = "noise\n[rank0]: megatron-tsp: error: --a contradicts --b\nTraceback (most recent call"
    assert runner.error_in(text) == "megatron-tsp: error: --a contradicts --b"
    assert runner.error_in("UserWarning: harmless\n") == ""


def test_a_lost_connection_is_not_the_cause(tmp_path):
    for rank, error in (("0", "Connection closed by peer"), ("1", "ValueError: bad shard")):
        folder = tmp_path / "none_x" / "attempt_0" / rank
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(f"Traceback (most recent call last):\n{error}\n")
    # torchrun saw rank 0 end first, but it only lost its peer.
    path, error = runner._rank_error(tmp_path, "0")
    assert path.parent.name == "1" and "bad shard" in error


def test_interrupt_ends_the_ranks(tmp_path):
    (tmp_path / "main.py").write_text(
        "import sys, pathlib, test_ab\n"
        "from megatron_tsp.ab import runner\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "runner.run(test_ab.script_arm(folder, test_ab.SLEEP), folder / 'out', 10)\n"
    )
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    job = subprocess.Popen(
        [sys.executable, str(tmp_path / "main.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
    )
    try:
        files = [tmp_path / "pid0", tmp_path / "pid1"]
        deadline = time.monotonic() + 60
        while not all(f.exists() and f.read_text() for f in files):
            assert time.monotonic() < deadline and job.poll() is None
            time.sleep(0.1)
        ranks = [psutil.Process(int(f.read_text())) for f in files]
        job.send_signal(signal.SIGINT)
        assert b"KeyboardInterrupt" in job.communicate(timeout=40)[1]
        gone, alive = psutil.wait_procs(ranks, timeout=5)
        assert not alive
    finally:
        job.kill()


def test_the_whole_of_it(tmp_path, capsys):
    """Two ranks, TP+SP against TSP, from one saved checkpoint, with data made on the way."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 300)
    top = yaml.safe_load((ROOT / "configs/tiny_cpu/ab.yaml").read_text())
    top["NPROC_PER_NODE"] = 2
    top["INITIAL_WEIGHTS"] = "checkpoint"
    top["DATA"] = {"OUT": str(tmp_path / "data"), "INPUT": str(tmp_path / "text.txt")}
    top["MODEL_ARGS"] |= {
        "--num-layers": 1, "--hidden-size": 32, "--ffn-hidden-size": 64, "--train-iters": 5,
        "--seq-length": 64, "--max-position-embeddings": 64, "--lr-warmup-iters": 1,
    }  # fmt: skip
    out = tmp_path / "out"
    assert cli.main(["ab", str(write(tmp_path, top)), "--out", str(out)]) == 0
    result = json.loads((out / "report.json").read_text())
    assert result["initial_weights"].startswith("the initial weights of tp_sp were saved")
    assert result["between"] == ["tsp", "tp_sp"]
    assert result["parity"]["max_abs_loss_diff"] <= 2e-6
    # The weights saved were the initial ones: the step that made them saw the same loss.
    saved = json.loads((out / "initial/record/rank1.jsonl").read_text().splitlines()[0])
    assert saved["loss"] == result["arms"]["tp_sp"]["loss"][0]
    for arm in result["arms"].values():
        assert len(arm["loss"]) == 5 and arm["loss"][-1] < arm["loss"][0]
        assert all(size > 0 for size in arm["peak_memory_bytes"])
        assert sum(map(sum, arm["bytes_sent_per_rank_per_step"].values())) > 0
    assert "tsp / tp_sp" in capsys.readouterr().out


def test_steps(tmp_path, monkeypatch, capsys):
    """`--prepare` lists the jobs; `--rank-of` becomes a rank of one, and refuses another world."""
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 50)
    top = yaml.safe_load((ROOT / "configs/tiny_cpu/ab.yaml").read_text())
    top["INITIAL_WEIGHTS"] = "checkpoint"
    top["DATA"] = {"OUT": str(tmp_path / "the data"), "INPUT": str(tmp_path / "text.txt")}
    words = ["ab", str(write(tmp_path, top)), "--arms", "tsp,tp1", "--out", str(tmp_path / "out")]
    old = tmp_path / "out/tsp/record/rank0.jsonl"
    old.parent.mkdir(parents=True)
    old.touch()
    assert cli.main([*words, "--prepare"]) == 0
    assert (tmp_path / "out/jobs").read_text() == "4 initial\n4 tsp\n1 tp1\n"
    assert not old.exists()

    class Became(Exception):
        pass

    def execve(program, argv, env):
        raise Became(argv, env)

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setenv("WORLD_SIZE", "4")
    for job, flags in (("initial", "--save"), ("tsp", "--load")):
        with pytest.raises(Became) as became:
            cli.main([*words, "--rank-of", job])
        argv, env = became.value.args
        assert argv[1:3] == ["-m", "megatron_tsp.pretrain_gpt"] and env["OMP_NUM_THREADS"] == "1"
        assert argv[-2:] == ["--tsp-record", str(tmp_path / "out" / job / "record")]
        assert argv[argv.index(flags) + 1] == str(tmp_path / "out/initial/checkpoint")
        assert argv[argv.index("--data-path") + 1] == str(tmp_path / "the data/text_document")
    assert cli.main([*words, "--rank-of", "tp1"]) == 2
    assert "--rank-of tp1: WORLD_SIZE is 4, and this job has 1 ranks" in capsys.readouterr().err
    assert cli.main([*words, "--rank-of", "tsq"]) == 2
    assert "--rank-of: no job 'tsq'; did you mean 'tsp'?" in capsys.readouterr().err
    assert cli.main([*words, "--report-only"]) == 1
    assert "rank0.jsonl: the rank finished no training step" in capsys.readouterr().err
