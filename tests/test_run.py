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
from texts import SHORT, conversations, documents
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


def assert_equal(theirs, ours):
    assert losses(theirs) == losses(ours)
    assert grad_norms(theirs) == grad_norms(ours)


@pytest.mark.parametrize("flags", [TSP2, TP_SP])
def test_a_script_of_its_own_trains_as_our_entry_to_the_bit(tmp_path, flags):
    ours = train(tmp_path / "ours", 2, flags)
    theirs = train_script(tmp_path / "theirs", 2, flags)
    assert_equal(theirs, ours)
    sent = [[step["bytes_by_group"] for step in rank] for rank in (ours[0], theirs[0])]
    assert sent[0] == sent[1] and any(sent[0])
    assert all(("tsp-weights" in step) == ("--tsp-size" in flags) for step in sent[1])


#: Samples of several documents each, in three steps.
DOCUMENTS = f"{SHORT} --train-iters 3"


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (2, f"{TSP2} {DOCUMENTS} --reset-position-ids"),
        (2, f"{TP_SP} {DOCUMENTS}"),
        (3, f"--tsp-size 1 {DOCUMENTS} --num-layers 3 --pipeline-model-parallel-size 3"),
        (2, f"--tsp-size 1 --context-parallel-size 2 {DOCUMENTS} --calculate-per-token-loss"),
        (2, f"{TSP2} --train-iters 3 --dataloader-inter-document-masking --data-path"),
    ],
)
def test_documents_in_a_script_of_its_own_to_the_bit(tmp_path, world, flags):
    """In every pipeline stage, samples side by side, over context-parallel ranks."""
    flags = flags.replace("--data-path", documents(tmp_path))
    assert_equal(
        train_script(tmp_path / "theirs", world, flags), train(tmp_path / "ours", world, flags)
    )


def _without_numbers(argv, folder):
    from megatron_tsp.training import script_batches

    script_batches._number_documents = lambda post_init, config: post_init(config)
    return _run_script(OWN, argv, folder)


def test_twin_whose_data_do_not_number_the_documents_differs(tmp_path):
    flags = f"--tsp-size 1 {DOCUMENTS}"
    twin = run(_without_numbers, 1, flags.split(), str(tmp_path / "twin"))
    with pytest.raises(AssertionError):
        assert_equal(twin, train(tmp_path / "ours", 1, flags))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--own-flag provider", "makes its model with a model provider, not with gpt_config_from"),
        ("--own-flag config", "asks for a model config of its own (model_config_cls)"),
        ("--own-flag nothing", "ended without a call of Megatron's pretrain"),
        ("--tp-comm-overlap", "--tp-comm-overlap does not work with --tsp-size"),
        ("--logits-load-dir x", "--logits-load-dir is not carried with --tsp-size"),
        (
            "--reset-attention-mask --own-flag batches",
            f"--reset-attention-mask: {OWN} calls its model without packed_seq_params",
        ),
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


GPT = "megatron_tsp.pretrain_gpt"


def in_checkout(megatron_lm, folder, flags, module=GPT) -> tuple:
    """What Megatron-LM's own script records, and our entry."""
    script = megatron_lm / f"{module.rpartition('.')[2]}.py"
    theirs = checkout.train(
        megatron_lm, folder / "theirs", "-m", "megatron_tsp.run", script, flags=flags
    )
    return theirs, checkout.train(megatron_lm, folder / "ours", "-m", module, flags=flags)


@needs_checkout
def test_megatron_lms_own_script_trains_as_our_entry_to_the_bit(tmp_path):
    megatron_lm = checkout.clone(tmp_path)
    for flags in (TSP2, TP_SP):
        theirs, ours = in_checkout(megatron_lm, tmp_path, flags)
        assert_equal(theirs, ours)
        assert [s["bytes_by_group"] for s in theirs[0]] == [s["bytes_by_group"] for s in ours[0]]


@needs_checkout
def test_documents_in_megatron_lms_own_script_to_the_bit(tmp_path):
    megatron_lm = checkout.clone(tmp_path)
    for flags in (
        f"{TSP2} {SHORT}",
        f"{TP_SP} {SHORT}",
        f"{TSP2} --dataloader-inter-document-masking {documents(tmp_path)}",
        f"{TSP2} {conversations(tmp_path)}",
    ):
        assert_equal(*in_checkout(megatron_lm, tmp_path, flags))


@needs_checkout
def test_megatron_lms_hybrid_script_trains_as_our_entry_to_the_bit(tmp_path):
    megatron_lm = checkout.clone(tmp_path)
    flags = f"{TSP2} --hybrid-layer-pattern *-"
    assert_equal(*in_checkout(megatron_lm, tmp_path, flags, "megatron_tsp.pretrain_hybrid"))
    assert git_is_clean(megatron_lm)


def git_is_clean(folder):
    command = ["git", "-C", folder, "status", "--porcelain"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""
