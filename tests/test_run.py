"""`megatron_tsp.run`: training scripts that know nothing of TSP, against our own entry."""

import os
import re
import subprocess
import sys
from pathlib import Path

import checkout
import pytest
from checkout import needs_checkout
from ranks import RankFailed, run
from training import _flags, _recorded, grad_norms, losses, train

from megatron_tsp import run as entry
from megatron_tsp.errors import TSPError
from megatron_tsp.training import script as scripts

ROOT = Path(__file__).parents[1]
OWN = str(Path(__file__).with_name("own_script.py"))
TP_SP = "--tensor-model-parallel-size 2 --sequence-parallel --tsp-baseline-core"
TSP2 = "--tsp-size 2 --group-query-attention --num-query-groups 2"


def _run_script(script, argv, folder):
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    entry.run(script, *_flags(argv), "--tsp-record", folder)
    return _recorded(folder)


def train_script(folder, world, flags):
    return run(_run_script, world, OWN, flags.split(), str(folder), timeout=180)


@pytest.mark.parametrize("flags", [TSP2, TP_SP])
def test_a_script_of_its_own_trains_as_our_entry_to_the_bit(tmp_path, flags):
    ours = train(tmp_path / "ours", 2, flags)
    theirs = train_script(tmp_path / "theirs", 2, flags)
    assert losses(theirs) == losses(ours)
    assert grad_norms(theirs) == grad_norms(ours)
    sent = [[step["bytes_by_group"] for step in rank] for rank in (ours[0], theirs[0])]
    assert sent[0] == sent[1] and any(sent[0])
    assert all(("tsp-weights" in step) == ("--tsp-size" in flags) for step in sent[1])


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


@needs_checkout
def test_megatron_lms_own_script_trains_as_our_entry_to_the_bit(tmp_path):
    megatron_lm = checkout.clone(tmp_path)
    script = megatron_lm / "pretrain_gpt.py"
    for flags in (TSP2, TP_SP):
        ours = ["-m", "megatron_tsp.pretrain_gpt", *flags.split()]
        ours = checkout.train(megatron_lm, tmp_path / "ours", *ours)
        theirs = ["-m", "megatron_tsp.run", script, *flags.split()]
        theirs = checkout.train(megatron_lm, tmp_path / "theirs", *theirs)
        assert losses(theirs) == losses(ours)
        assert grad_norms(theirs) == grad_norms(ours)
        assert [s["bytes_by_group"] for s in theirs[0]] == [s["bytes_by_group"] for s in ours[0]]


@needs_checkout
def test_megatron_lms_hybrid_script_trains_as_our_entry_to_the_bit(tmp_path):
    megatron_lm = checkout.clone(tmp_path)
    flags = [*TSP2.split(), "--hybrid-layer-pattern", "*-"]
    ours = checkout.train(
        megatron_lm, tmp_path / "ours", "-m", "megatron_tsp.pretrain_hybrid", *flags
    )
    script = megatron_lm / "pretrain_hybrid.py"
    theirs = checkout.train(
        megatron_lm, tmp_path / "theirs", "-m", "megatron_tsp.run", script, *flags
    )
    assert losses(theirs) == losses(ours)
    assert grad_norms(theirs) == grad_norms(ours)
    assert git_is_clean(megatron_lm)


def git_is_clean(folder):
    command = ["git", "-C", folder, "status", "--porcelain"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""
