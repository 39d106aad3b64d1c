"""`scripts/patch_megatron.sh`: on a checkout of the same form, and on Megatron-LM itself."""

import os
import shutil
import subprocess

import checkout
import pytest
from checkout import ROOT, needs_checkout
from texts import SHORT
from training import grad_norms, losses

SCRIPT = "scripts/patch_megatron.sh"


def git(folder, *words):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    ended = subprocess.run(
        ["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True
    )
    return ended.stdout


def state(folder):
    """All tracked files and their content."""
    names = git(folder, "ls-files", "-z").split("\0")[:-1]
    return {n: (folder / n).read_bytes() for n in names if (folder / n).is_file()}


@pytest.fixture
def patched_by(tmp_path):
    """A small checkout in a folder with a blank, and the script with two patches for it."""
    checkout, ours = tmp_path / "a checkout", tmp_path / "our repository"
    (checkout / "megatron" / "core").mkdir(parents=True)
    (checkout / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\nMINOR = 19\n")
    for name in ("a.py", "b.py"):
        (checkout / name).write_text("one\ntwo\nthree\n")
    git(checkout, "init", "-q")
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "x")
    (ours / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / SCRIPT, ours / SCRIPT)
    patches = ours / "patches" / "core_v0.19.0"
    patches.mkdir(parents=True)
    for name in ("a.py", "b.py"):
        (checkout / name).write_text("one\nadded\ntwo\nthree\n")
        diff = git(checkout, "diff", "-U0", "--full-index", name)
        (patches / f"{name}.patch").write_text(diff)
    git(checkout, "checkout", "-q", ".")

    def patch(*words):
        command = ["bash", str(ours / SCRIPT), *words, str(checkout)]
        ended = subprocess.run(command, capture_output=True, text=True)
        return ended.returncode, ended.stdout + ended.stderr

    return checkout, patch


def test_it_patches_once_and_reverts(patched_by):
    checkout, patch = patched_by
    before = state(checkout)
    assert patch() == (0, f"patch_megatron: patched a.py b.py in {checkout}\n")
    after = state(checkout)
    assert after["a.py"] == after["b.py"] == b"one\nadded\ntwo\nthree\n"
    assert patch() == (0, "patch_megatron: applied already\n")
    assert state(checkout) == after
    assert patch("--revert") == (0, f"patch_megatron: unpatched a.py b.py in {checkout}\n")
    assert state(checkout) == before
    assert patch("--revert") == (0, "patch_megatron: nothing to revert\n")
    assert git(checkout, "status", "--porcelain") == ""


def _half(checkout):
    (checkout / "b.py").write_text("one\nadded\ntwo\nthree\n")


def _dirty(checkout):
    (checkout / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\nMINOR = 19\n#\n")


def _other_file(checkout):
    (checkout / "b.py").write_text("one\ntwo\nfour\n")
    git(checkout, "commit", "-qam", "y")


def _other_version(checkout):
    (checkout / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\nMINOR = 18\n")
    git(checkout, "commit", "-qam", "y")


def _no_file(checkout):
    git(checkout, "rm", "-q", "b.py")
    git(checkout, "commit", "-qam", "y")


def _no_megatron(checkout):
    shutil.rmtree(checkout / "megatron")


def _no_git(checkout):
    shutil.rmtree(checkout / ".git")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_half, "half applied: b.py is patched and a.py is not; git checkout b.py"),
        (_dirty, "uncommitted changes in"),
        (_other_file, "b.py is not that of core_v0.19.0; use python -m megatron_tsp.run"),
        (_other_version, "no patches for core_v0.18.0; there are some for core_v0.19.0"),
        (_no_file, "has no b.py"),
        (_no_megatron, "is not Megatron-LM: it has no megatron/core/package_info.py"),
        (_no_git, "is not a git checkout"),
        (lambda checkout: (checkout / "b.py").chmod(0o444), "b.py is not writable"),
    ],
)
@pytest.mark.parametrize("words", [(), ("--revert",)])
def test_it_refuses_and_changes_nothing(patched_by, change, message, words):
    checkout, patch = patched_by
    change(checkout)
    if "writable" in message and os.access(checkout / "b.py", os.W_OK):
        pytest.skip("this user may write everything")
    before = {path: path.read_bytes() for path in checkout.rglob("*.py")}
    code, said = patch(*words)
    assert code == 2 and message in said
    assert {path: path.read_bytes() for path in checkout.rglob("*.py")} == before


def test_our_patches_only_add_lines_and_hold_none_of_megatrons():
    patches = list((ROOT / "patches").rglob("*.patch"))
    assert patches
    for patch in patches:
        for line in patch.read_text().splitlines():
            header = line.startswith(("diff --git ", "index ", "--- a/", "+++ b/"))
            bare = line.startswith("@@ ") and line.endswith(" @@")
            assert header or bare or line.startswith("+"), line


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_shellcheck_is_content():
    subprocess.run(["shellcheck", ROOT / SCRIPT], check=True)


@needs_checkout
def test_megatron_lm_patched_is_our_entry_to_the_bit(tmp_path):
    megatron_lm = checkout.clone(tmp_path)
    before = state(megatron_lm)
    subprocess.run([ROOT / SCRIPT, megatron_lm], check=True)
    for script in ("pretrain_gpt.py", "pretrain_hybrid.py"):
        assert "--tsp-size D" in checkout.python(megatron_lm, megatron_lm / script, "--help")
    script = megatron_lm / "pretrain_gpt.py"
    for flags in ("--tsp-size 2", f"--tsp-size 2 {SHORT}"):
        theirs = checkout.train(megatron_lm, tmp_path / "theirs", script, flags=flags)
        ours = checkout.train(
            megatron_lm, tmp_path / "ours", "-m", "megatron_tsp.pretrain_gpt", flags=flags
        )
        assert losses(theirs) == losses(ours)
        assert grad_norms(theirs) == grad_norms(ours)
    subprocess.run([ROOT / SCRIPT, "--revert", megatron_lm], check=True)
    assert state(megatron_lm) == before
