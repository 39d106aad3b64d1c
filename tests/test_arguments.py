"""The flags: what they imply, and what is refused, by name."""

import argparse

import pytest

from megatron_tsp import arguments, options, refusals, streaming
from megatron_tsp.errors import TSPError

BASE = dict(
    tensor_model_parallel_size=1, sequence_parallel=False, seq_length=64, hidden_size=64,
    num_attention_heads=8, ffn_hidden_size=128, num_query_groups=None, group_query_attention=False,
    kv_channels=None, padded_vocab_size=None, create_attention_mask_in_dataloader=True,
    gradient_accumulation_fusion=True, attention_dropout=0.0, softmax_type="vanilla",
    context_parallel_size=1, transformer_impl="local", position_embedding_type="rope",
    optimizer="adam", ckpt_format="torch_dist", use_distributed_optimizer=False,
    cuda_graph_impl="none", tensor_parallel_num_weight_shards=None,
)  # fmt: skip


def _parse(*argv, **changes):
    parser = arguments.add_arguments(argparse.ArgumentParser())
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.set_defaults(**{**BASE, **changes})
    args = parser.parse_args(argv)
    arguments.translate(args, argv)
    arguments.check(args)
    return args


def test_tsp_size_implies_tensor_and_sequence_parallelism_without_a_mask():
    args = _parse("--tsp-size", "4")
    assert args.tensor_model_parallel_size == 4
    assert args.sequence_parallel is True
    assert args.create_attention_mask_in_dataloader is False
    assert "groups of 4 ranks" in arguments.describe(args)
    assert "16 of 64 tokens" in arguments.describe(args)


def test_without_it_nothing_changes():
    before = {**BASE}
    args = _parse()
    assert {key: getattr(args, key) for key in before} == before


def test_the_same_tensor_parallel_size_is_no_contradiction():
    assert _parse("--tsp-size", "2", "--tensor-model-parallel-size=2").tsp_size == 2


@pytest.mark.parametrize(
    ("argv", "changes", "message"),
    [
        (("--tsp-size=2", "--tensor-model-parallel-size=4"), {}, "contradicts --tsp-size 2"),
        (("--tsp-size=2", "--tensor-model-parallel-size", "1"), {}, "contradicts --tsp-size 2"),
        (("--tsp-size=0",), {}, "at least 1"),
        (("--tsp-size=2", "--tsp-loss-chunk=0"), {}, "--tsp-loss-chunk 0"),
        (("--tsp-mlp-schedule=ring",), {}, "--tsp-mlp-schedule needs --tsp-size"),
        (("--tsp-size=2", "--tsp-baseline-core"), {}, "drop it or --tsp-size"),
        (("--tsp-baseline-core",), {"attention_dropout": 0.1}, "--attention-dropout 0"),
        (("--tsp-size=3",), {}, "--hidden-size 64 is not divisible by --tsp-size 3"),
        (("--tsp-size=8",), {"num_attention_heads": 12, "hidden_size": 96}, "nearest are 8 or 16"),
        (("--tsp-size=8",), {"ffn_hidden_size": 100}, "--ffn-hidden-size 100"),
        (("--tsp-size=8",), {"padded_vocab_size": 1001}, "the nearest are 1000 or 1008"),
        (("--tsp-size=4",), {"seq_length": 60}, "the nearest are 56 or 64"),
        (("--tsp-size=4",), {"num_query_groups": 3, "group_query_attention": True},
         "--num-query-groups 3"),
        (("--tsp-size=8",), {"num_query_groups": 1, "group_query_attention": True,
                             "kv_channels": 2}, "the QKV weight has 20 rows"),
        (("--tsp-size=2",), {"tensor_parallel_num_weight_shards": 4}, "num-weight-shards"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(argv, changes, message):
    with pytest.raises(TSPError) as error:
        _parse(*argv, **changes)
    assert message in str(error.value)


@pytest.mark.parametrize("refusal", refusals.REFUSED, ids=lambda refusal: refusal.flag)
def test_a_setting_that_is_not_carried_is_refused_by_its_flag(refusal):
    value = {"attention_dropout": 0.1, "num_experts": 4}.get(refusal.dest, "other")
    with pytest.raises(TSPError) as error:
        _parse("--tsp-size", "2", **{refusal.dest: value})
    assert refusal.flag in str(error.value) and "--tsp-size" in str(error.value)
    for carried in refusal.carried:
        _parse("--tsp-size", "2", **{refusal.dest: carried})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_schedule": "rings"}, "TSP attention schedule 'rings': not one of ring, br"),
        ({"mlp_schedule": ""}, "TSP mlp schedule '': not one of ring, broadcast, gather"),
        ({"vocab_schedule": "all"}, "TSP vocab schedule 'all': not one of"),
        ({"blocks": "norm"}, "TSP blocks 'norm': not one of all, mlp, attention"),
        ({"loss_chunk": 0}, "TSP loss chunk 0: it takes at least 1 token"),
    ],
)
def test_options_that_do_not_exist_are_refused(settings, message):
    with pytest.raises(TSPError, match=message):
        options.TSPOptions(**settings)


def test_an_unknown_schedule_has_no_stream():
    with pytest.raises(TSPError, match="TSP schedule 'rings': not one of ring, broadcast, gather"):
        streaming.stream("rings", None)


def test_the_refused_flags_are_megatrons():
    """A flag that Megatron renames would otherwise pass unseen."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    flags = {action.dest: action.option_strings for action in parser._actions}
    for refusal in refusals.REFUSED:
        assert refusal.dest in flags, refusal.dest
        assert refusal.flag in flags[refusal.dest], (refusal.flag, flags[refusal.dest])
