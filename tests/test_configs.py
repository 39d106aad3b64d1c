"""Every configuration in configs/: read, and checked as Megatron and TSP would on its ranks."""

import os
import sys
from pathlib import Path

import pytest
from ranks import run

from megatron_tsp.ab import arms, config
from megatron_tsp.trace import trace

FOLDER = Path(__file__).parents[1] / "configs"
CONFIGS = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.yaml"))
BIG = ("tsp", "tp_sp", "tp4_cp2", "tp2_cp4")

#: What an arm is, and what TP is given so that it keeps as little as TSP.
LAYOUT = {
    "--tsp-size", "--tensor-model-parallel-size", "--sequence-parallel", "--tsp-baseline-core",
    "--context-parallel-size", "--make-vocab-size-divisible-by", "--recompute-granularity",
    "--recompute-modules",
}  # fmt: skip


def arms_of(name):
    return BIG if "128k" in name else ("tsp", "tp_sp")


def _sizes(words, ranks):
    """Parse and validate as a rank of so many does; the sizes that come out."""
    from megatron_tsp import cpu
    from megatron_tsp.training.main import parse

    os.environ.update(WORLD_SIZE=str(ranks), CUDA_DEVICE_MAX_CONNECTIONS="1")
    sys.argv = ["pretrain_gpt.py", *words]
    cpu.engage()
    args = parse(on_cpu=True)
    return {
        "data": args.data_parallel_size,
        "padded vocabulary": args.padded_vocab_size,
        "micro-batches": args.global_batch_size // args.micro_batch_size // args.data_parallel_size,
        "bf16": args.bf16,
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_every_arm_is_valid_and_they_differ_in_the_layout_only(name):
    read = config.read(FOLDER / name)
    sizes, rest = {}, {}
    for arm_name in arms_of(name):
        arm = arms.make(arm_name, read)
        arms.check_flags(arm)
        if read.data is None:
            sizes[arm_name] = run(_sizes, 1, arm.words(), arm.ranks)[0]
        rest[arm_name] = {flag: v for flag, v in arm.flags.items() if flag not in LAYOUT}
    first, *others = rest.values()
    assert all(other == first for other in others)
    if sizes:
        first, *others = sizes.values()
        assert all(other == first for other in others), sizes
        assert first["micro-batches"] >= 1 and first["data"] == read.ranks // 8


@pytest.mark.parametrize("folder", ["7b_128k", "llama3_8b_128k"])
def test_the_larger_job_is_the_smaller_one_with_more_replicas(folder):
    small = config.read(FOLDER / folder / "8gpus.yaml")
    large = config.read(FOLDER / folder / "1024gpus.yaml")
    assert (small.ranks, large.ranks) == (8, 1024)
    differ = {f for f in small.model_args if small.model_args[f] != large.model_args.get(f)}
    assert differ == {"--global-batch-size"} and small.arms == large.arms


def test_flags_that_are_not_obvious_have_their_reason():
    """Each flag about dropout, masks, fusion, padding, recompute and the like has a comment."""
    needed = ("dropout", "mask", "fusion", "divisible", "transformer-impl", "mock", "TSP_SIZE")
    for name in [name for name in CONFIGS if name.endswith("gpus.yaml")]:
        for line in (FOLDER / name).read_text().splitlines():
            assert not any(word in line for word in needed) or "#" in line, (name, line)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_traces_and_tsp_sends_less_where_sequences_are_long(name):
    """One layer and one micro-batch, as rank 0 of all."""
    read = config.read(FOLDER / name)
    small = {"--num-layers": "1", "--global-batch-size": str(max(1, read.ranks // 8))}
    tsp = trace(read, "tsp", settings=small)
    assert tsp.world == read.ranks and tsp.sent_bytes > 0
    if "1024" not in name:
        tp_sp = trace(read, "tp_sp", settings=small)
        assert tsp.peak_bytes < tp_sp.peak_bytes
        assert "128k" not in name or tsp.sent_bytes < tp_sp.sent_bytes
