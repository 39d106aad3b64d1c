"""The tracer against real ranks with real tensors: the same peak, the same bytes."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from experts import route_in_turn
from training import TINY, train

from megatron_tsp.ab.config import Config
from megatron_tsp.cli import main as cli
from megatron_tsp.errors import TSPError
from megatron_tsp.trace import limits, trace

SHAPE = "--hidden-size 128 --ffn-hidden-size 384 --seq-length 512 --max-position-embeddings 512"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
TP_SP = "--tensor-model-parallel-size 2 --sequence-parallel --tsp-baseline-core"
EXPERTS = (
    "--num-experts 8 --moe-ffn-hidden-size 192 --moe-router-topk 2 --moe-layer-freq ([0,1]) "
    "--moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001"
)


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

    from megatron_tsp.training import gpt, record

    record.MEMORY_STEPS = (4,)

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


def _even():
    """Also, tokens are spread evenly over the experts."""
    _even_tokens()
    route_in_turn()


def _crowded_routers():
    """All tokens go to the experts of the first rank."""
    _even_tokens()
    route_in_turn(4)


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (2, TP_SP),
        (2, f"{TP_SP} {FULL}"),
        (2, f"{TP_SP} {SELECTIVE} mlp layernorm"),
        (2, "--context-parallel-size 2 --tsp-baseline-core"),
        (2, f"--context-parallel-size 2 --tsp-baseline-core {FULL}"),
        (2, f"--context-parallel-size 2 --tsp-baseline-core {SELECTIVE} mlp layernorm"),
        (2, "--tsp-size 2"),
        (2, f"--tsp-size 2 {FULL}"),
        (2, f"--tsp-size 2 {SELECTIVE} core_attn mlp --tsp-attention-exchange alltoall"),
        (4, "--tsp-size 2 --use-distributed-optimizer --overlap-grad-reduce "
            "--overlap-param-gather --bf16"),
        (4, "--tsp-size 2 --pipeline-model-parallel-size 2"),
        (2, f"--tsp-size 2 --expert-model-parallel-size 2 {EXPERTS} {SELECTIVE} moe "
            "--moe-shared-expert-intermediate-size 128"),
        (2, f"{TP_SP} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 {EXPERTS}"),
        (2, f"{TP_SP} --expert-tensor-parallel-size 2 {EXPERTS}"),
        (4, f"--tsp-size 2 --expert-model-parallel-size 4 {EXPERTS} --use-distributed-optimizer "
            "--overlap-grad-reduce --overlap-param-gather --bf16"),
    ],
)  # fmt: skip
def test_a_trace_is_what_real_ranks_measure(tmp_path, world, flags):
    ranks = train(tmp_path, world, f"{SHAPE} --train-iters 4 {flags}", before=_even)
    for rank in sorted({0, world - 1}):
        traced, real = trace(_config(flags), "arm", rank, world), ranks[rank][-1]
        # The thread of gloo that exchanges tokens may let go of a buffer a moment late.
        late = 0.035 if EXPERTS in flags else 0.01
        assert 0.99 <= real["peak_memory_bytes"] / traced.peak_bytes <= 1 + late
        assert sum(traced.split.values()) == traced.peak_bytes
        assert traced.sent_by("collective") == real["bytes_sent"]
        assert traced.sent_by("group") == real["bytes_by_group"]
        if "--tsp-size" in flags and "--bf16" not in flags and EXPERTS not in flags:
            assert traced.sent_by("block") == real["bytes_by_block"]


def _keep_more():
    """Each layer's attention keeps one more of its queries and of its keys."""
    from megatron_tsp.layers import attention

    _even_tokens()
    rotate = attention.rotate
    attention.rotate = lambda t, *args: rotate(t * t.detach().clone(), *args)


def test_twin_a_layer_that_keeps_more_is_seen(tmp_path):
    ranks = train(tmp_path, 2, f"{SHAPE} --train-iters 4 --tsp-size 2", before=_keep_more)
    traced, real = trace(_config("--tsp-size 2"), "arm", 0, 2), ranks[0][-1]
    assert real["peak_memory_bytes"] > 1.01 * traced.peak_bytes
    assert traced.sent_by("block") == real["bytes_by_block"]


def test_tensor_parallel_traffic_is_labelled_by_block():
    sent = trace(_config(TP_SP), "arm", 0, 2).sent_by("block", "group")
    # 2 layers, 2 micro-batches; gathers and scatters of [512, 2, 128] fp32, half of it to another
    assert sent["attention", "tp"] == sent["mlp", "tp"] == 2 * 2 * 5 * 512 * 2 * 128 * 4 // 2


@pytest.mark.parametrize(
    ("flags", "layer", "attention", "mlp", "loss"),
    [
        (TP_SP, 6, 14, 0, 6),
        (f"{TP_SP} {FULL}", 8, 18, 0, 6),
        ("--context-parallel-size 2 --tsp-baseline-core", 6, 14, 0, 6),
        ("--tsp-size 2", 6, 14, 4 / 3, 8),  # gate and up again; logits again
        (f"--tsp-size 2 {FULL}", 8, 18, 4 / 3, 8),
    ],
)
def test_operations_are_those_of_the_closed_form(flags, layer, attention, mlp, loss):
    """6 for each weight and token; 7 products of queries and keys that see each other."""
    hidden, ffn, vocab, length, layers, samples = 128, 384, 256, 512, 2, 4
    of_mlp, of_attention = 3 * hidden * ffn, 4 * hidden**2
    pairs = length * (length + 1) // 2
    expected = length * (layers * (layer * (of_attention + of_mlp) + mlp * of_mlp))
    expected += length * loss * hidden * vocab + layers * attention * hidden * pairs
    assert trace(_config(flags), "arm", 0, 2).flops == samples * expected // 2


def test_a_trace_takes_the_router_to_be_balanced(tmp_path):
    flags = f"--tsp-size 2 --expert-model-parallel-size 2 {EXPERTS}"
    ranks = train(tmp_path, 2, f"{SHAPE} --train-iters 4 {flags}", before=_crowded_routers)
    traced = trace(_config(flags), "arm", 0, 2)
    assert ranks[0][-1]["peak_memory_bytes"] > 1.1 * traced.peak_bytes
    for rank in ranks:
        # of two ranks the crowded one sends its answers only, the other its tokens
        assert rank[-1]["bytes_by_group"] == traced.sent_by("group")


def test_any_rank_of_a_large_world():
    traced = trace(_config("--tsp-size 2 --global-batch-size 2048"), "arm", 2047, 2048)
    assert 0 < traced.peak_bytes < 2**30
    assert traced.sent_by("group")["dp-cp"] > 0
    assert traced.flops > 0


def _write(path, **changes) -> str:
    top = {
        "NPROC_PER_NODE": 2,
        "MODEL_ARGS": {flag: value for flag, value in _config("").arms["arm"].items()},
        **changes,
    }
    path.write_text(yaml.safe_dump(top))
    return str(path)


def test_the_command_writes_a_table_json_and_a_picture(tmp_path, capsys):
    config = _write(tmp_path / "ab.yaml")
    files = [str(tmp_path / name) for name in ("out.json", "out.png")]
    assert cli(["trace", config, "--json", files[0], "--timeline", files[1]]) == 0
    assert "| tp_sp | 0 of 2 |" in capsys.readouterr().out
    arms = json.loads(Path(files[0]).read_text())
    assert [arm["arm"] for arm in arms] == ["tp_sp", "tsp"]
    assert arms[1]["sent_by_block"]["mlp"] > 0
    assert Path(files[1]).read_bytes().startswith(b"\x89PNG")


def test_the_longest_sequence_from_the_command_line(tmp_path, capsys):
    config, out = _write(tmp_path / "ab.yaml"), tmp_path / "out.json"
    words = ["--max-context", "0.05", "--reserve", "0.01", "--arms", "tsp", "--json", str(out)]
    assert cli(["trace", config, *words]) == 0
    (found,) = json.loads(out.read_text())
    length, room = found["max_seq_length"], 0.04 * 2**30
    assert f"| tsp | {length:,} |" in capsys.readouterr().out
    assert found["trace"]["peak"]["bytes"] <= room
    longer = {"--seq-length": str(length + 1024), "--max-position-embeddings": str(length + 1024)}
    assert trace(config, "tsp", settings=longer).peak_bytes > room


def test_longest_is_the_last_that_fits():
    class Done:
        def __init__(self, tokens):
            self.peak_bytes = 1000 + 3 * tokens + tokens**2 // 4096

        def result(self):
            return self

    for room in (100, 10_000, 123_456, 9_999_999):
        found = limits.longest("arm", Done, 16, room, 2048)
        step = limits._step(found.tokens or 16, 16)
        assert found.tokens == 0 or Done(found.tokens).peak_bytes <= room
        assert Done(found.tokens + step).peak_bytes > room
        assert found.traces <= 16


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--arms", "tps"], "no arm 'tps'; did you mean"),
        (["--set", "seq-lenght=64"], "no flag '--seq-lenght'; did you mean '--seq-length'?"),
        (["--set", "seq-length"], "--set seq-length: expected name=value"),
        (["--rank", "2"], "--rank 2: the job has ranks 0 to 1"),
        (["--world-size", "0"], "--world-size 0: a job has at least 1 rank"),
        (["--max-context", "4", "--reserve", "-1"], "--reserve -1: it is 0 GiB or more"),
        (["--reserve", "1"], "--reserve needs --max-context"),
        (["--max-context", "4"], "--max-context 4: the reserve takes 4 GiB of it"),
        (["--json", "/nowhere/x.json"], "cannot write /nowhere/x.json"),
    ],
)
def test_bad_input_is_named_before_anything_is_traced(tmp_path, capsys, words, message):
    assert cli(["trace", _write(tmp_path / "ab.yaml"), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "world", "message"),
    [
        ("--tsp-size 2 --use-mup", 2, "--use-mup does not work"),
        (f"--tsp-size 2 {EXPERTS} --moe-token-dispatcher-type allgather", 2,
         "arm: a trace does not know --moe-token-dispatcher-type allgather"),
        (f"{TP_SP} {EXPERTS} --moe-expert-capacity-factor 1.5", 2,
         "arm: a trace does not know --moe-expert-capacity-factor"),
        ("--tensor-model-parallel-size 2", 3, "Megatron refuses these flags: world size (3)"),
    ],
)  # fmt: skip
def test_what_pretrain_refuses_is_refused(flags, world, message):
    with pytest.raises(TSPError, match=re.escape(message)):
        trace(_config(flags), "arm", 0, world)
