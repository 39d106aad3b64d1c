"""`megatron_tsp.run`: training scripts that know nothing of TSP, against our own entry."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import RankFailed, run
from training import TINY, _flags, _recorded, grad_norms, losses, train

from megatron_tsp import run as entry
from megatron_tsp.errors import TSPError
from megatron_tsp.training import script as scripts

ROOT = Path(__file__).parents[1]
OWN = str(Path(__file__).with_name("own_script.py"))
TSP2 = "--tsp-size 2 --group-query-attention --num-query-groups 2"


def _run_script(script, argv, folder):
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    entry.run(script, *_flags(argv), "--tsp-record", folder)
    return _recorded(folder)


def train_script(folder, world, flags):
    return run(_run_script, world, OWN, flags.split(), str(folder), timeout=180)


@pytest.mark.parametrize(
    ("world", "flags"), [(2, TSP2), (2, "--tensor-model-parallel-size 2 --sequence-parallel "
                                        "--tsp-baseline-core")]
)  # fmt: skip
def test_a_script_of_its_own_trains_as_our_entry_to_the_bit(tmp_path, world, flags):
    ours = train(tmp_path / "ours", world, flags)
    theirs = train_script(tmp_path / "theirs", world, flags)
    assert losses(theirs) == losses(ours)
    assert grad_norms(theirs) == grad_norms(ours)
    sent = [[step["bytes_by_group"] for step in rank] for rank in (ours[0], theirs[0])]
    assert sent[0] == sent[1] and any(sent[0])
    # the twin: another parallelism would be seen in the bytes, another model in the losses
    if "--tsp-size" in flags:
        assert all("tsp-weights" in step for step in sent[1])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--own-flag provider", "makes its model with a model provider, not with gpt_config_from"),
        ("--own-flag config", "asks for a model config of its own (model_config_cls)"),
        ("--own-flag nothing", "ended without a call of Megatron's pretrain"),
        ("--tp-comm-overlap", "--tp-comm-overlap does not work with --tsp-size"),
        ("--logits-load-dir x", "--logits-load-dir is not carried with --tsp-size"),
        ("--reset-attention-mask", "--reset-attention-mask works in megatron_tsp.pretrain_gpt on"),
    ],
)
def test_what_would_be_ignored_is_refused_by_name(tmp_path, flags, message):
    with pytest.raises(RankFailed, match=re.escape(message)):
        run(_run_script, 1, OWN, f"--tsp-size 1 {flags}".split(), str(tmp_path))


def _megatron(folder, text):
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise AssertionError('imported')")
    (core / "package_info.py").write_text(text)
    (folder / "pretrain_gpt.py").write_text("")
    return str(folder / "pretrain_gpt.py")


@pytest.mark.parametrize(
    ("text", "shown"),
    [("MAJOR = 0\nMINOR = 18\nPATCH = 0\n", "version 0.18,"), ("VERSION = 1", "version unknown,")],
)
def test_an_unknown_megatron_is_refused_before_it_is_imported(tmp_path, text, shown):
    script = _megatron(tmp_path, text)
    code = f"from megatron_tsp import run; run.main([{script!r}, '--tsp-size', '2'])"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2
    assert f"uses the Megatron in {tmp_path / 'megatron' / 'core'}, {shown}" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_installed_megatron_is_known():
    scripts.check_version("x.py")


@pytest.mark.parametrize("argv", [(), ("none.py", "--tsp-size", "2"), ("--tsp-size", "2")])
def test_without_a_script_it_says_so(argv):
    with pytest.raises(TSPError, match="is followed by the path of a training script"):
        entry.run(*argv)


CHECKOUT = os.environ.get("MEGATRON_LM_PATH")


def _torchrun(folder, words):
    """Two ranks of a command of the user's, with the checkout's Megatron."""
    environment = os.environ | {
        "PYTHONPATH": f"{CHECKOUT}:{ROOT}",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *words]
    command += [*TINY, "--train-iters", "3", "--tsp-record", str(folder)]
    ended = subprocess.run(
        command, env=environment, cwd=folder.parent, capture_output=True, text=True, timeout=400
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    import json

    return [
        [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()]
        for rank in range(2)
    ]


@pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM_PATH names no Megatron-LM checkout")
@pytest.mark.parametrize("flags", [TSP2, "--tensor-model-parallel-size 2 --sequence-parallel "
                                         "--tsp-baseline-core"])  # fmt: skip
def test_megatron_lms_own_script_trains_as_our_entry_to_the_bit(tmp_path, flags):
    words = flags.split()
    ours = _torchrun(tmp_path / "ours", ["-m", "megatron_tsp.pretrain_gpt", *words])
    script = f"{CHECKOUT}/pretrain_gpt.py"
    theirs = _torchrun(tmp_path / "theirs", ["-m", "megatron_tsp.run", script, *words])
    assert losses(theirs) == losses(ours) and len(losses(ours)) == 3
    assert grad_norms(theirs) == grad_norms(ours)
    assert [s["bytes_by_group"] for s in theirs[0]] == [s["bytes_by_group"] for s in ours[0]]
