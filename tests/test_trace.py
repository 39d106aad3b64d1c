"""The tracer against real ranks with real tensors: the same peak, the same bytes."""

from pathlib import Path

import pytest
import torch
from training import TINY, train

from megatron_tsp.ab.config import Config
from megatron_tsp.trace import trace

SHAPE = "--hidden-size 128 --ffn-hidden-size 384 --seq-length 512 --max-position-embeddings 512"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
TP_SP = "--tensor-model-parallel-size 2 --sequence-parallel --tsp-baseline-core"


def _config(flags: str) -> Config:
    """TINY with `flags`, as an A/B configuration with one arm."""
    words = [*TINY, *SHAPE.split(), *flags.split()]
    given: dict = {}
    for at, word in enumerate(words):
        if word.startswith("--"):
            end = at + 1
            while end < len(words) and not words[end].startswith("--"):
                end += 1
            values = words[at + 1 : end]
            given[word] = values[0] if len(values) == 1 else values or True
    return Config(Path("test"), {}, arms={"arm": given})


def _even_tokens():
    """Token ids that are spread evenly over the vocabulary, on each rank: what the tracer takes."""
    from megatron.training import get_args

    from megatron_tsp.training import gpt

    get_batch = gpt.get_batch

    def even(*args, **kwargs):
        batch = get_batch(*args, **kwargs)
        if batch["tokens"] is not None:
            size = get_args().tensor_model_parallel_size
            shard = get_args().padded_vocab_size // size
            tokens = batch["tokens"]
            tokens.copy_(torch.arange(tokens.size(1)) % size * shard)
        return batch

    gpt.get_batch = even


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (2, TP_SP),
        (2, f"{TP_SP} {FULL}"),
        (2, f"{TP_SP} {SELECTIVE} mlp layernorm"),
        (2, "--context-parallel-size 2 --tsp-baseline-core"),
        (2, "--tsp-size 2"),
        (2, f"--tsp-size 2 {FULL}"),
        (2, f"--tsp-size 2 {SELECTIVE} core_attn mlp --tsp-attention-exchange alltoall"),
        (4, "--tsp-size 2 --use-distributed-optimizer --overlap-grad-reduce "
            "--overlap-param-gather --bf16"),
        (4, "--tsp-size 2 --pipeline-model-parallel-size 2"),
    ],
)  # fmt: skip
def test_a_trace_is_what_real_ranks_measure(tmp_path, world, flags):
    ranks = train(tmp_path, world, f"{SHAPE} --train-iters 4 {flags}", before=_even_tokens)
    for rank in sorted({0, world - 1}):
        traced, real = trace(_config(flags), "arm", rank, world), ranks[rank][-1]
        assert traced.peak_bytes == pytest.approx(real["peak_memory_bytes"], rel=0.01)
        assert sum(traced.split.values()) == traced.peak_bytes
        assert traced.sent_by("collective") == real["bytes_sent"]
        assert traced.sent_by("group") == real["bytes_by_group"]
