"""Checkpoints: a run goes on at another TSP or TP size, optimizer and all, to the last digit."""

import pytest
from ranks import RankFailed
from training import GPT2, LLAMA, TP_SP, assert_same, grad_norms, losses, train

MODEL = f"{LLAMA} --vocab-size 126 --make-vocab-size-divisible-by 32"  # 127 words, padded
DISTRIBUTED = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
BUCKETS = "--use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 5000"  # padded
SAVE = "--save {}/ckpt --save-interval 3"
LOAD = "--load {}/ckpt --ckpt-step 3"
PIPELINE = "--tsp-size 2 --pipeline-model-parallel-size 2"


def _begin(folder, world, flags):
    """Six steps, saved after three."""
    return train(folder / "whole", world, f"{flags} {SAVE.format(folder)}")


def _go_on(folder, name, world, flags):
    """The last three of six steps, from the checkpoint."""
    return train(folder / name.replace("/", "-"), world, f"{flags} {LOAD.format(folder)}")


def _last_stage(ranks):
    return [next(rank for rank in ranks if rank[0]["loss"] is not None)]


@pytest.mark.parametrize(
    ("model", "begin", "continuations"),
    [
        # (ranks, flags), of the run that saves and of those that go on
        (MODEL, (1, ""), [(4, "--tsp-size 4"), (2, "--tsp-size 2 --use-checkpoint-args")]),
        (MODEL, (2, TP_SP.format(2)), [
            (2, "--tsp-size 2 --use-checkpoint-args --use-mp-args-from-checkpoint-args")]),
        (MODEL, (2, "--tsp-size 2 --async-save --use-persistent-ckpt-worker"), [
            (2, TP_SP.format(2)), (4, "--tsp-size 4"), (4, PIPELINE), (1, "")]),
        (MODEL, (4, "--tsp-size 4"), [(2, "--tsp-size 2 --ckpt-assume-constant-structure")]),
        (MODEL, (1, DISTRIBUTED), [(4, f"--tsp-size 2 {DISTRIBUTED}")]),
        (MODEL, (4, f"{TP_SP.format(2)} {DISTRIBUTED}"), [
            (4, f"--tsp-size 4 {DISTRIBUTED} --ckpt-fully-parallel-load")]),
        (MODEL, (4, "--tsp-size 2 --use-distributed-optimizer "
                    "--distrib-optim-fully-reshardable-mem-efficient"), [
            (4, f"{TP_SP.format(4)} {DISTRIBUTED}"), (4, f"--tsp-size 4 {DISTRIBUTED}"),
            (1, DISTRIBUTED)]),
        (GPT2, (2, f"--tsp-size 2 {DISTRIBUTED} --no-ckpt-fully-parallel-save"), [
            (4, f"--tsp-size 4 {DISTRIBUTED}"), (2, f"{TP_SP.format(2)} {DISTRIBUTED}")]),
    ],
)  # fmt: skip
def test_a_run_flips_in_the_middle(reference, tmp_path, model, begin, continuations):
    expected = reference(model)
    assert_same(_begin(tmp_path, begin[0], f"{model} {begin[1]}"), expected)
    for world, flags in continuations:
        rest = _go_on(tmp_path, flags, world, f"{model} {flags}")
        assert_same(_last_stage(rest), [expected[0][3:]])


@pytest.mark.parametrize("optimizer", ["", "--use-distributed-optimizer", BUCKETS])
def test_resumed_it_is_the_uninterrupted_run_to_the_bit(tmp_path, optimizer):
    flags = f"{MODEL} {optimizer} --tsp-size 2"
    whole = _begin(tmp_path, 4, flags)
    rest = _go_on(tmp_path, "rest", 4, flags)
    assert losses(rest) == losses(whole)[3:]
    assert grad_norms(rest) == grad_norms(whole)[3:]


@pytest.mark.parametrize("how", ["--load {}/ckpt --finetune", "--pretrained-checkpoint {}/ckpt"])
def test_a_checkpoint_is_a_start_for_another_run(tmp_path, how):
    train(tmp_path / "first", 1, f"{LLAMA} --train-iters 2 {SAVE.format(tmp_path)}")
    new = f"{LLAMA} --lr 5e-4 --train-iters 3 {how.format(tmp_path)}"
    assert_same(train(tmp_path / "tsp", 2, f"{new} --tsp-size 2"), train(tmp_path / "tp", 1, new))


def test_an_optimizer_layout_that_would_scramble_is_refused(tmp_path):
    begin = f"{LLAMA} {TP_SP.format(2)} --use-distributed-optimizer"
    train(tmp_path / "first", 2, f"{begin} --train-iters 3 {SAVE.format(tmp_path)}")
    with pytest.raises(RankFailed, match="--dist-ckpt-optim-fully-reshardable"):
        _go_on(tmp_path, "rest", 2, f"{LLAMA} --tsp-size 2 --use-distributed-optimizer")


def test_an_optimizer_of_another_kind_is_refused(tmp_path):
    train(tmp_path / "whole", 1, f"{LLAMA} --train-iters 3 {SAVE.format(tmp_path)}")
    with pytest.raises(RankFailed, match="saved without --use-distributed-optimizer"):
        _go_on(tmp_path, "rest", 2, f"{LLAMA} --tsp-size 2 {DISTRIBUTED}")
    again = tmp_path / "again"
    train(again / "whole", 1, f"{LLAMA} --train-iters 3 {DISTRIBUTED} {SAVE.format(again)}")
    with pytest.raises(RankFailed, match="saved with --use-distributed-optimizer"):
        _go_on(again, "rest", 2, f"{LLAMA} --tsp-size 2")


def _transposed_fc2():
    import torch
    from megatron.core.transformer.mlp import MLP

    load = MLP._load_from_state_dict

    def loaded(self, *args):
        load(self, *args)
        with torch.no_grad():
            self.linear_fc2.weight.copy_(self.linear_fc2.weight.flip(1))

    MLP._load_from_state_dict = loaded


def test_twin_that_loads_features_in_another_order_differs(reference, tmp_path):
    _begin(tmp_path, 1, LLAMA)
    flags = f"{LLAMA} --tsp-size 2 {LOAD.format(tmp_path)}"
    broken = train(tmp_path / "broken", 2, flags, before=_transposed_fc2)
    with pytest.raises(AssertionError):
        assert_same(broken, [reference(LLAMA)[0][3:]])


DROPOUT = f"{LLAMA} --hidden-dropout 0.1"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def _keep_masks():
    """Each rank writes the masks of its first step to a file of its own, as digests."""
    import os
    from hashlib import sha256
    from pathlib import Path

    import torch
    from megatron.training import get_args

    dropout = torch.nn.functional.dropout

    def kept(x, *args, **kwargs):
        y = dropout(x, *args, **kwargs)
        digest = sha256((y == 0).numpy().tobytes()).hexdigest()
        with Path(get_args().tsp_record, f"masks{os.environ['RANK']}").open("a") as file:
            file.write(f"{digest}\n")
        return y

    torch.nn.functional.dropout = kept


def _masks(folder, world):
    return [(folder / f"masks{rank}").read_text().split() for rank in range(world)]


def test_hidden_dropout_resumes_and_is_recomputed_to_the_bit(tmp_path):
    flags = f"{DROPOUT} --tsp-size 2"
    whole = train(tmp_path / "whole", 2, f"{flags} {SAVE.format(tmp_path)}", before=_keep_masks)
    zero, one = _masks(tmp_path / "whole", 2)
    assert len(zero) == len(one) > 0 and not {*zero} & {*one}, "each rank's tokens have their own"
    assert len({*zero}) == len(zero), "and each layer, micro-batch and step"

    rest = _go_on(tmp_path, "rest", 2, flags)
    assert losses(rest) == losses(whole)[3:]
    recomputed = train(tmp_path / "again", 2, f"{flags} {FULL}", before=_keep_masks)
    assert losses(recomputed) == losses(whole) and grad_norms(recomputed) == grad_norms(whole)
    again = _masks(tmp_path / "again", 2)[0]
    assert {*again} == {*zero} and len(again) > len(zero)


def _keep_words():
    from pathlib import Path

    from megatron.training import checkpointing, get_args

    say = checkpointing.print_rank_0

    def kept(message, *args):
        with Path(get_args().tsp_record, "said").open("a") as file:
            file.write(f"{message}\n")
        say(message, *args)

    checkpointing.print_rank_0 = kept


def test_a_flip_to_another_size_says_that_dropout_is_seeded_anew(tmp_path):
    _begin(tmp_path, 2, f"{DROPOUT} --tsp-size 2")
    rest = f"{DROPOUT} --tsp-size 4 {LOAD.format(tmp_path)}"
    train(tmp_path / "rest", 4, rest, before=_keep_words)
    assert "RNG state will be ignored" in (tmp_path / "rest" / "said").read_text()
