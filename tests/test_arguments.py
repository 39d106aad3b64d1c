"""The flags: what they imply, and what is refused, by name."""

import argparse
import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from megatron_tsp import arguments, options, refusals, settings, streaming
from megatron_tsp.errors import TSPError


@cache
def _megatrons_parser():
    """Megatron's own, of the installed version; a model of the size that the tests want."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(add_help=False))
    parser.set_defaults(
        seq_length=64, hidden_size=64, num_attention_heads=8, ffn_hidden_size=128, world_size=48,
        attention_dropout=0.0, rank=0,
    )  # fmt: skip
    return parser


@cache
def _our_parser():
    parents = [_megatrons_parser()]
    return arguments.add_arguments(argparse.ArgumentParser(parents=parents, allow_abbrev=False))


@cache
def _flags():
    return {flag: a.dest for a in _megatrons_parser()._actions for flag in a.option_strings}


def _parse(*argv, **changes):
    preset = argparse.Namespace(**changes)
    args = _our_parser().parse_args(argv, preset)
    arguments.translate(args, argv, _flags())
    arguments.check(args)
    return args


def test_tsp_size_implies_tensor_and_sequence_parallelism_without_a_mask():
    args = _parse("--tsp-size", "4")
    assert args.tensor_model_parallel_size == 4
    assert args.sequence_parallel is True
    assert args.create_attention_mask_in_dataloader is False
    assert "groups of 4 ranks" in arguments.describe(args)
    assert "16 of 64 tokens" in arguments.describe(args)


def test_the_log_says_whose_kernels_are_used(monkeypatch):
    args = _parse("--tsp-size", "4")
    assert args.transformer_impl == "transformer_engine", "Megatron's default"
    kernel = "Attention kernel: TorchFlash; norms that stand alone: "
    assert f"{kernel}TSP's; dW summed by PyTorch" in arguments.describe(args)
    monkeypatch.setattr("megatron.core.extensions.transformer_engine.HAVE_TE", True)
    args.gradient_accumulation_fusion = True
    said = arguments.describe(args)
    assert f"{kernel}Transformer Engine's; dW summed by Apex's kernel" in said
    args.transformer_impl = "local"
    assert f"{kernel}TSP's" in arguments.describe(args)


def test_without_it_nothing_changes():
    before = vars(_megatrons_parser().parse_args([]))
    args = vars(_parse())
    assert {key: args[key] for key in before} == before


def test_the_same_tensor_parallel_size_is_no_contradiction():
    assert _parse("--tsp-size", "2", "--tensor-model-parallel-size=2").tsp_size == 2


MROPE = ("--tsp-size=2", "--position-embedding-type=mrope", "--mrope-section", "1", "1", "2")


@pytest.mark.parametrize(
    ("argv", "changes", "message"),
    [
        (("--tsp-size=2", "--tensor-model-parallel-size=4"), {}, "contradicts --tsp-size 2"),
        (("--tsp-size=2", "--tensor-model-parallel-size", "1"), {}, "contradicts --tsp-size 2"),
        (("--tsp-size=0",), {}, "at least 1"),
        (("--tsp-size=2", "--tsp-loss-chunk=0"), {}, "--tsp-loss-chunk 0"),
        (("--tsp-mlp-schedule=ring",), {}, "--tsp-mlp-schedule needs --tsp-size"),
        (("--tsp-size=2", "--tsp-baseline-core"), {}, "drop it or --tsp-size"),
        (("--tsp-baseline-core",), {"attention_dropout": -0.1}, "--attention-dropout -0.1: it is"),
        (("--tsp-size=2", "--tsp-mlp-schedule=ring", "--num-experts=4"), {},
         "--tsp-mlp-schedule does nothing: no layer of this model has a dense MLP"),
        (("--tsp-size=2", "--tsp-blocks=mlp", "--num-experts=4", "--moe-layer-freq=[1,1]"), {},
         "--tsp-blocks mlp does nothing: no layer"),
        (("--tsp-size=2", "--tsp-save-kv", "--hybrid-layer-pattern=E-", "--num-experts=4"), {},
         "--tsp-save-kv does nothing: no layer of this model has attention"),
        (("--tsp-size=2", "--tsp-blocks=mlp", "--tsp-save-kv"), {}, "with --tsp-blocks mlp"),
        (("--tsp-size=4", "--tsp-save-kv", "--tsp-attention-exchange=auto",
          "--micro-batch-size=3"), {}, "(bytes a rank sends for a layer and micro-batch: allgather "
         "147,456, alltoall 74,880). Drop --tsp-save-kv, or pass --tsp-attention-exchange allgat"),
        ((*MROPE, "--hybrid-layer-pattern=*-"), {}, "mrope does not work with --hybrid-layer-patt"),
        ((*MROPE, "--mtp-num-layers=1"), {}, "mrope does not work with --mtp-num-layers 1"),
        ((*MROPE, "--context-parallel-size=2"), {}, "mrope does not work with --context-parallel"),
        ((*MROPE, "--rotary-interleaved"), {}, "mrope does not work with --rotary-interleaved"),
        (("--tsp-size=3",), {}, "--num-attention-heads 8 is not divisible by --tsp-size 3"),
        (("--tsp-size=8",), {"num_attention_heads": 12, "hidden_size": 96}, "nearest are 8 or 16"),
        (("--tsp-size=8",), {"ffn_hidden_size": 100}, "--ffn-hidden-size 100"),
        (("--tsp-size=8",), {"padded_vocab_size": 1001}, "the nearest are 1000 or 1008"),
        (("--tsp-size=4",), {"seq_length": 60}, "the nearest are 56 or 64"),
        (("--tsp-size=2", "--no-pad-vocab-size", "--vocab-size=127"), {},
         "--no-pad-vocab-size: --vocab-size 127 is not divisible by --tsp-size 2: the nearest are "
         "126 or 128"),
        (("--tsp-size=4",), {"num_query_groups": 3, "group_query_attention": True,
                             "num_attention_heads": 12, "hidden_size": 96},
         "--num-query-groups 3 neither divides --tsp-size 4 nor is a multiple of it, as Megatron's "
         "sharding of QKV needs: the nearest are 2 or 4"),
        (("--tsp-size=8",), {"num_query_groups": 1, "group_query_attention": True,
                             "kv_channels": 2}, "the nearest --kv-channels are 4"),
        (("--tsp-size=8", "--pipeline-model-parallel-size=2"), {"world_size": 24},
         "24 ranks are not a multiple of --tsp-size 8 x --pipeline-model-parallel-size 2: the "
         "nearest are 16 or 32"),
        (("--tsp-size=4",), {"world_size": 2}, "2 ranks are not a multiple of --tsp-size 4: the "
         "nearest are 4"),
        (("--tsp-size=2",), {"tensor_parallel_num_weight_shards": 4}, "num-weight-shards"),
        (("--tsp-size=2", "--attention-backend=unfused"), {}, "unfused builds scores of s x s"),
        (("--tsp-size=2", "--flash-attention-version=2"), {}, "--flash-attention-version 2"),
        (("--tsp-size=2", "--tsp-save-kv", "--tsp-attention-exchange=alltoall"), {},
         "--tsp-save-kv keeps gathered K and V"),
        (("--tsp-size=2", "--tsp-save-kv", "--tsp-blocks=mlp"), {},
         "--tsp-save-kv does nothing with --tsp-blocks mlp: drop the flag"),
        (("--tsp-size=2", "--tsp-attention-exchange=alltoall", "--tsp-blocks=mlp"), {},
         "--tsp-attention-exchange does nothing"),
        (("--tsp-size=2", "--tsp-loss-chunk=8", "--tsp-blocks=mlp"), {}, "--tsp-loss-chunk does"),
        (("--tsp-size=2", "--tsp-mlp-save-activations", "--tsp-blocks=attention"), {},
         "--tsp-mlp-save-activations does nothing with --tsp-blocks attention"),
        (("--tsp-size=2", "--recompute-granularity=selective", "--recompute-modules", "mlp"), {},
         "--recompute-modules mlp with biases"),
        (("--tsp-size=2", "--num-experts=4", "--moe-ffn-hidden-size=45",
          "--expert-tensor-parallel-size=2"), {}, "the nearest are 44 or 46"),
        (("--tsp-size=2", "--full-validation", "--eval-micro-batch-size=2"), {},
         "--full-validation in micro-batches of 2"),
        (("--tsp-size=2", "--window-size=8,4"), {}, "--window-size 8,4: attention is causal"),
        (("--tsp-size=2", "--window-size=-2,0"), {}, "a window is L,0"),
        (("--tsp-size=2", "--multi-latent-attention"), {}, "without --q-lora-rank"),
        (("--tsp-size=2", "--multi-latent-attention", "--q-lora-rank=9"), {},
         "--q-lora-rank 9 is not divisible by --tsp-size 2: the nearest are 8 or 10"),
        (("--tsp-size=2", "--multi-latent-attention", "--q-lora-rank=8",
          "--tsp-attention-exchange=allgather"), {},
         "--tsp-attention-exchange does nothing: multi-latent attention exchanges tokens for"),
        (("--tsp-size=2", "--multi-latent-attention", "--q-lora-rank=8",
          "--tsp-blocks=mlp"), {},
         "--tsp-blocks mlp does not work with --multi-latent-attention over tensor-parallel ranks"),
        (("--tsp-baseline-core", "--multi-latent-attention", "--tensor-model-parallel-size=2"), {},
         "--tsp-baseline-core does not work with --multi-latent-attention over tensor-parallel"),
        (("--tsp-size=2", "--multi-latent-attention", "--q-lora-rank=8",
          "--mtp-num-layers=1"), {},
         "--mtp-num-layers does not work with --multi-latent-attention"),
        (("--tsp-size=3", "--hybrid-layer-pattern=M*-G", "--linear-num-key-heads=4"), {},
         "--linear-num-key-heads 4 is not divisible by the 3 ranks of a sequence, --tsp-size 3 x "
         "--context-parallel-size 1: the nearest are 3 or 6"),
        (("--tsp-size=2", "--hybrid-layer-pattern=M*", "--mamba-num-heads=6",
          "--context-parallel-size=2"), {}, "--mamba-num-heads 6 is not divisible by the 4 ranks"),
        (("--tsp-size=2", "--hybrid-layer-pattern=M*", "--mamba-num-groups=3"), {},
         "--mamba-num-groups 3 is not divisible by --tsp-size 2: the nearest are 2 or 4"),
        (("--tsp-size=2", "--reset-attention-mask", "--dataloader-inter-document-masking"), {},
         "drop --reset-attention-mask"),
        (("--tsp-baseline-core", "--reset-attention-mask", "--context-parallel-size=2"), {},
         "documents in samples with --context-parallel-size 2"),
        (("--tsp-size=2", "--tsp-blocks=mlp", "--reset-attention-mask", "--micro-batch-size=2",
          "--pipeline-model-parallel-size=2"), {}, "samples with --micro-batch-size 2"),
        (("--tsp-size=2", "--tsp-blocks=mlp", "--reset-attention-mask", "--micro-batch-size=1",
          "--eval-micro-batch-size=2", "--pipeline-model-parallel-size=2"), {},
         "with --eval-micro-batch-size 2 and --pipeline-model-parallel-size 2"),
        (("--tsp-size=2", "--tsp-blocks=mlp", "--reset-attention-mask", "--micro-batch-size=2",
          "--num-experts=4", "--moe-layer-freq=[0,1]", "--moe-router-load-balancing-type",
          "aux_loss", "seq_aux_loss"), {},
         "samples with --micro-batch-size 2 and seq_aux_loss"),
        (("--tsp-baseline-core", "--reset-attention-mask", "--micro-batch-size=2",
          "--tensor-model-parallel-size=2", "--num-experts=4",
          "--moe-router-load-balancing-type=seq_aux_loss"), {}, "and seq_aux_loss"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(argv, changes, message):
    with pytest.raises(TSPError) as error:
        _parse(*argv, **changes)
    assert message in str(error.value)


OFFLOAD = ("--tsp-size=2", "--fine-grained-activation-offloading", "--offload-modules")


@pytest.mark.parametrize(
    ("argv", "installed", "message"),
    [
        (("core_attn",), None, "--fine-grained-activation-offloading needs Transformer Engine"),
        (("core_attn", "--recompute-granularity=full"), "yes", "only the inputs of layers"),
        (("mlp_norm", "--recompute-modules", "mlp"), "yes", "a streamed MLP keeps its input"),
        (("moe_act", "expert_fc1", "--num-experts=4"), "yes", "--offload-modules expert_fc1 moe_a"),
        (("core_attn", "mlp_norm"), "yes", None),
        (("mlp_norm", "--recompute-modules", "mlp", "--tsp-blocks=attention"), "yes", None),
    ],
)
def test_what_is_not_kept_cannot_be_offloaded(monkeypatch, argv, installed, message):
    from megatron.core.extensions import transformer_engine

    monkeypatch.setattr(transformer_engine, "cpu_offload", installed)
    with pytest.raises(TSPError, match=message) if message else nullcontext():
        _parse(*OFFLOAD, *argv)


@pytest.mark.parametrize(
    ("found", "symbol", "package"),
    [
        ("gated_delta_net.common.HAVE_FLA", "G", "flash-linear-attention"),
        ("mamba_mixer.HAVE_MAMBA_SSM", "M", "mamba-ssm"),
    ],
)
def test_layers_whose_kernels_are_missing_are_refused(monkeypatch, found, symbol, package):
    monkeypatch.setattr(f"megatron.core.ssm.{found}", False)
    with pytest.raises(TSPError, match=f"kernels of {symbol} are in {package}, which is not inst"):
        _parse("--tsp-size=2", f"--hybrid-layer-pattern=*-{symbol}")


#: Where the flag's type or choices do not say which value is not carried.
VALUES = {
    "recompute_modules": ["mlp", "moe_act"],
    "cuda_graph_impl": ["local"],
    "linear_attention_freq": ["2"],
    "ckpt_format": ["torch"],
}


def _setting(action, carried):
    """Command-line words that set a flag to something that is not carried."""
    if action.dest in VALUES:
        return VALUES[action.dest]
    if action.nargs == 0:
        return []
    for choice in action.choices or ():
        if choice not in carried:
            return [str(choice)]
    return ["4"]


@pytest.mark.parametrize("refusal", refusals.REFUSED, ids=lambda refusal: refusal.dest)
def test_a_setting_that_is_not_carried_is_refused_by_its_flag(refusal):
    action = _actions().get(refusal.dest)
    if action is not None:
        assert refusal.flag in action.option_strings
        words = [refusal.flag, *_setting(action, refusal.carried)]
        with pytest.raises(TSPError) as error:
            _parse("--tsp-size", "2", *words)
        for carried in refusal.carried:
            _parse("--tsp-size", "2", refusal.flag, str(carried))
    else:
        with pytest.raises(TSPError) as error:
            _parse("--tsp-size", "2", **{refusal.dest: 4})
    assert refusal.flag in str(error.value) and "--tsp-size" in str(error.value)


@cache
def _actions():
    return {action.dest: action for action in _megatrons_parser()._actions}


def test_what_the_entry_refuses_is_refused_with_tsp_and_without():
    from megatron_tsp.training import gpt

    elsewhere = {"yaml_cfg", "tensor_parallel_num_weight_shards"}  # by the parser, by `translate`
    dests = {*settings.REFUSED_BY_ENTRY.split()} - elsewhere
    assert dests <= gpt.NOT_CARRIED.keys()
    for dest in dests:
        with pytest.raises(TSPError, match=gpt.NOT_CARRIED[dest]):
            gpt.check_args(argparse.Namespace(**{dest: "x"}))


@cache
def _megatrons_settings():
    """Every flag's dest and every field of the configs that a model is made from."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    configs = (TransformerConfig, DistributedDataParallelConfig)  # the first has the parallel one's
    return set(_actions()) | {field.name for config in configs for field in fields(config)}


def test_every_setting_of_the_installed_megatron_is_classified():
    unknown = _megatrons_settings() - settings.known()
    assert not unknown, f"classify in megatron_tsp/settings.py or refusals.py: {sorted(unknown)}"


def test_every_classified_setting_is_one_of_megatrons():
    gone = settings.known() - _megatrons_settings()
    assert not gone, f"this Megatron has no {sorted(gone)}"


def test_no_setting_is_classified_twice():
    tables = (settings.CARRIED, settings.PART_OF, settings.WITHOUT_EFFECT)
    listed = [word for table in tables for words in table.values() for word in words.split()]
    listed += settings.REFUSED_BY_ENTRY.split() + [refusal.dest for refusal in refusals.REFUSED]
    assert not [word for word, times in Counter(listed).items() if times > 1]


def test_what_depends_on_a_refused_setting_is_classified_anew_when_that_one_works():
    refused = {refusal.dest for refusal in refusals.REFUSED} | {*settings.REFUSED_BY_ENTRY.split()}
    works = settings.PART_OF.keys() - refused
    assert not works, f"move what settings.PART_OF lists under {sorted(works)}"


def test_a_flag_that_a_newer_megatron_brings_is_refused():
    flags = {**_flags(), "--a-new-flag": "a_new_flag"}
    args = argparse.Namespace(**vars(_parse("--tsp-size", "2")), a_new_flag=True)
    with pytest.raises(TSPError, match="--a-new-flag is new in this Megatron"):
        arguments.translate(args, ["--tsp-size", "2", "--a-new-flag"], flags)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"attention_schedule": "rings"}, "TSP attention schedule 'rings': not one of ring, br"),
        ({"mlp_schedule": ""}, "TSP mlp schedule '': not one of ring, broadcast, gather"),
        ({"vocab_schedule": "all"}, "TSP vocab schedule 'all': not one of"),
        ({"blocks": "norm"}, "TSP blocks 'norm': not one of all, mlp, attention"),
        ({"loss_chunk": 0}, "TSP loss chunk 0: it takes at least 1 token"),
    ],
)
def test_options_that_do_not_exist_are_refused(chosen, message):
    with pytest.raises(TSPError, match=message):
        options.TSPOptions(**chosen)


def test_an_unknown_schedule_has_no_stream():
    with pytest.raises(TSPError, match="TSP schedule 'rings': not one of ring, broadcast, gather"):
        streaming.stream("rings", None)


def test_help_shows_our_flags_among_megatrons():
    from megatron.training.arguments import add_megatron_arguments

    parser = arguments.add_arguments(add_megatron_arguments(argparse.ArgumentParser()))
    shown = parser.format_help()
    assert "--tsp-size D" in shown and "headroom (e.g. 1.10 = 10%)" in " ".join(shown.split())


def test_the_page_of_flags_has_every_flag_with_its_default_and_values():
    page = (Path(__file__).parents[1] / "docs" / "flags.md").read_text()
    rows = dict(re.findall(r"^\| `(--tsp-[\w-]+)` \| (.*?) \|", page, re.MULTILINE))
    parser = arguments.add_arguments(argparse.ArgumentParser(add_help=False))
    assert set(rows) == {flag for action in parser._actions for flag in action.option_strings}
    for action in parser._actions:
        row = rows[action.option_strings[0]]
        if "the same" not in row:
            assert all(f"`{choice}`" in row for choice in action.choices or ())
        if action.default:
            assert re.search(rf"\(`?{action.default}`?\)", row), (action.dest, row)


GQA = ("--group-query-attention", "--num-query-groups=2")


@pytest.mark.parametrize(
    ("argv", "takes", "allgather", "alltoall"),
    [
        # Widths of 64 and, GQA, 16 that all tokens send: of K and V 6 times, or of everything 4
        # times by each rank's part, with the KV heads as often as ranks query them, and a number
        # for each of 8 heads.
        (("--tsp-size=4",), "alltoall", 6 * 64, (8 * 64 + 8) / 4),
        (("--tsp-size=4", "--bf16"), "alltoall", 6 * 64, (8 * 64 + 2 * 8) / 4),
        (("--tsp-size=4", *GQA), "allgather", 6 * 16, (4 * 64 + 4 * 32 + 8) / 4),
        (("--tsp-size=8", *GQA), "alltoall", 6 * 16, (4 * 64 + 4 * 64 + 8) / 8),
        (("--tsp-size=8", *GQA, "--recompute-granularity=full"), "alltoall", 8 * 16,
         (6 * 64 + 6 * 64 + 8) / 8),
        (("--tsp-size=2", "--context-parallel-size=3", "--seq-length=96"), "allgather", 6 * 64,
         None),  # 8 heads are not cut in 6
        (("--tsp-size=8", *GQA, "--tsp-save-kv"), "allgather", 4 * 16, (8 * 64 + 8) / 8),
        (("--tsp-size=1",), "allgather", 6 * 64, None),
    ],
)  # fmt: skip
def test_auto_takes_the_exchange_that_sends_fewer_bytes(argv, takes, allgather, alltoall):
    args = _parse("--tsp-attention-exchange=auto", "--micro-batch-size=3", *argv)
    ranks = args.tsp_size * args.context_parallel_size
    unit = args.seq_length * args.micro_batch_size * (2 if args.bf16 else 4) * (ranks - 1) / ranks
    expected = {"allgather": round(allgather * unit)}
    if alltoall is not None:
        expected["alltoall"] = round(alltoall * unit)
    assert arguments.attention_exchange(args) == (takes, expected)
    assert arguments.options_from_args(args).attention_exchange == takes
    said = f"for a layer and micro-batch: allgather {allgather * unit:,.0f}"
    assert said in arguments.describe(args)
