"""Train a tiny GPT with Megatron's own `pretrain` on gloo ranks, and read what each step gave."""

import json
import os
import runpy
import sys

from ranks import run

SEQ_LENGTH = 64

TINY = f"""
--num-layers 2 --hidden-size 64 --num-attention-heads 8 --ffn-hidden-size 128
--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
--untie-embeddings-and-output-weights
--seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH}
--micro-batch-size 2 --global-batch-size 4 --train-iters 6
--lr 1e-3 --attention-dropout 0 --hidden-dropout 0
--eval-iters 0 --eval-interval 1000 --split 100,0,0 --log-interval 1
--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --make-vocab-size-divisible-by 64
""".split()


LLAMA = "--group-query-attention --num-query-groups 2 --qk-layernorm"
GPT2 = (
    "no:--swiglu no:--disable-bias-linear no:--untie-embeddings-and-output-weights "
    "--normalization LayerNorm --position-embedding-type learned_absolute"
)
TP_SP = "--tensor-model-parallel-size {} --sequence-parallel --tsp-baseline-core"

ULP = 4.8e-7  # of an fp32 loss between 4 and 8

#: What CPU mode sets by itself, for a script that does not know it.
CPU_FLAGS = """
--transformer-impl local --distributed-backend gloo --use-cpu-initialization --no-rope-fusion
--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm --num-workers 0
""".split()


def _flags(argv):
    dropped = {flag.removeprefix("no:") for flag in argv if flag.startswith("no:")}
    return [flag for flag in (*TINY, *argv) if flag not in dropped and not flag.startswith("no:")]


def _train(argv, folder, before, exits, model):
    from megatron_tsp.training import record
    from megatron_tsp.training.main import run as train

    record.MEMORY_STEPS = ()  # measuring takes longer than the step

    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    sys.argv = [f"pretrain_{model}.py"]
    if before is not None:
        before()
    try:
        train([*_flags(argv), "--tsp-record", folder], model=model)
    except SystemExit:
        if not exits:
            raise
    return _recorded(folder)


def _recorded(folder):
    with open(f"{folder}/rank{os.environ['RANK']}.jsonl") as lines:
        return [json.loads(line) for line in lines]


def _train_megatrons(checkout, argv, folder):
    from megatron_tsp import wheel
    from megatron_tsp.training import record

    wheel.fill_gaps()
    record.install(folder)
    sys.path.insert(0, checkout)  # pretrain_gpt.py's neighbours
    sys.argv = ["pretrain_gpt.py", *CPU_FLAGS, *_flags(argv)]
    runpy.run_path(f"{checkout}/pretrain_gpt.py", run_name="__main__")
    return _recorded(folder)


def train_megatrons(checkout, folder, world: int, flags: str = "") -> list:
    """As `train`, by the pretrain_gpt.py of a Megatron-LM checkout."""
    return run(_train_megatrons, world, checkout, flags.split(), str(folder), timeout=180)


def train(folder, world, flags="", before=None, exits=False, model="gpt") -> list:
    """Run `TINY` with `flags`; the recorded steps, by rank.

    The last of a repeated flag counts; `no:--flag` takes a switch out of `TINY`. `before` is called
    on each rank first, to break something. `exits`: Megatron ends the process (--exit-interval).
    `model`: gpt or hybrid, the entry.
    """
    argv = flags.split()
    return run(_train, world, argv, str(folder), before, exits, model, timeout=180)


def losses(ranks) -> list[float]:
    """The losses by iteration, from whichever ranks know them; those must agree."""
    known = [[step["loss"] for step in rank] for rank in ranks if rank[0]["loss"] is not None]
    assert known and all(values == known[0] for values in known)
    return known[0]


def grad_norms(ranks) -> list[float]:
    """The gradient norms by iteration."""
    return [step["grad_norm"] for step in ranks[0]]


def assert_same(ranks, expected, loss=1.5 * ULP, grad_norm=1e-6):
    """Both runs have the same losses and gradient norms, within absolute and relative bounds."""
    got, want = losses(ranks), losses(expected)
    assert len(got) == len(want)
    assert max(abs(a - b) for a, b in zip(got, want, strict=True)) <= loss, (got, want)
    for a, b in zip(grad_norms(ranks), grad_norms(expected), strict=True):
        assert abs(a - b) <= grad_norm * b, (grad_norms(ranks), grad_norms(expected))
