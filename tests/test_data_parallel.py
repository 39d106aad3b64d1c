"""TSP x data parallel: Megatron's optimizers, buckets, precisions and loss masks, against TP 1."""

import json
from pathlib import Path

import pytest
from training import LLAMA, TP_SP, ULP, assert_same, grad_norms, losses, train

BATCHES = f"{LLAMA} --micro-batch-size 1 --global-batch-size 8 --train-iters 4"
DISTRIBUTED = "--use-distributed-optimizer"
OVERLAPS = f"{DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather"
BUCKETS = "--ddp-bucket-size 5000"  # several for each layer


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        # world / D ranks are data-parallel, with 8 / (world / D) micro-batches a step each
        (4, f"--overlap-grad-reduce {BUCKETS} --no-gradient-reduce-div-fusion --log-params-norm"),
        (4, f"{DISTRIBUTED} --ddp-num-buckets 3 --ddp-pad-buckets-for-high-nccl-busbw "
            "--log-num-zeros-in-grad"),
        (8, f"{OVERLAPS} {BUCKETS} --num-distributed-optimizer-instances 2"),
    ],
)  # fmt: skip
def test_every_kind_of_data_parallel(reference, tmp_path, world, flags):
    # clipped in every step
    common = f"{BATCHES} --clip-grad 0.3 --decoupled-lr 5e-4 --decoupled-min-lr 1e-4"
    ranks = train(tmp_path, world, f"{common} {flags} --tsp-size 2")
    # the logged loss is the mean over 8 micro-batches, summed in another order
    assert_same(ranks, reference(common), loss=2.5 * ULP)
    assert min(grad_norms(ranks)) > 0.3


def test_sgd_on_four_ranks(reference, tmp_path):
    common = f"{BATCHES} --optimizer sgd --lr 0.1 --clip-grad 0"
    ranks = train(tmp_path, 4, f"{common} --tsp-size 4 --tsp-attention-exchange alltoall")
    assert_same(ranks, reference(common))


@pytest.mark.parametrize("optimizer", ["", f"{OVERLAPS} {BUCKETS}"])
def test_fp16_trains_as_at_tp_1(reference, tmp_path, optimizer):
    common = f"{BATCHES} --fp16 --loss-scale 1024"
    ranks = train(tmp_path, 4, f"{common} {optimizer} --tsp-size 2")
    assert_same(ranks, reference(common), loss=2e-3, grad_norm=2e-3)


def test_fp16_lowers_the_loss_scale_until_it_fits(tmp_path):
    """Where it fits depends on the parallelism: Megatron sums dW in fp16, TSP in fp32."""
    scale = "--fp16 --initial-loss-scale 268435456 --hysteresis 1"  # 2 to the 28th
    ranks = train(tmp_path, 2, f"{LLAMA} --train-iters 16 {scale} --tsp-size 2")
    skipped = [norm is None for norm in grad_norms(ranks)]
    assert skipped[0] and not skipped[-1] and skipped == sorted(skipped, reverse=True)
    assert grad_norms(ranks[:1]) == grad_norms(ranks[1:]), "ranks skip alike"
    assert losses(ranks)[-1] < losses(ranks)[0]


@pytest.mark.parametrize(
    "precision",
    [
        "--accumulate-allreduce-grads-in-fp32",
        "--grad-reduce-in-bf16 --ddp-param-name-patterns-for-fp32-local-accumulation *linear_fc1*",
    ],
)
def test_bf16_sums_gradients_as_asked(reference, tmp_path, precision):
    common = f"{BATCHES} --bf16 {precision}"
    ranks = train(tmp_path, 4, f"{common} {OVERLAPS} {BUCKETS} --tsp-size 2")
    assert_same(ranks, reference(common), loss=3e-3, grad_norm=5e-3)


def _masked(mask, tokens):
    """Rank 1 of 2 has nothing to learn, nor the last of 4; sample by sample the rest is uneven."""
    length = mask.size(1)
    mask[:, length // 4 : length * 3 // 4] = 0
    for row, first in zip(mask, tokens[:, 0].tolist(), strict=True):
        row[: first % (length // 4)] = 0
        if first % 4 == 0:
            row[:] = 0  # and in some micro-batches nobody has


def _mask_batches(masked):
    from megatron_tsp.training import gpt

    get_batch = gpt.get_batch

    def get(*args):
        batch = get_batch(*args)
        if batch["loss_mask"] is not None:
            masked(
                batch["loss_mask"],
                batch["tokens"] if batch["tokens"] is not None else batch["labels"],
            )
        return batch

    gpt.get_batch = get


def uneven():
    _mask_batches(_masked)


def nothing():
    _mask_batches(lambda mask, tokens: mask.zero_())


@pytest.mark.parametrize(
    ("world", "flags"), [(4, f"--tsp-size 2 {OVERLAPS} {BUCKETS}"), (4, "--tsp-size 4")]
)
@pytest.mark.parametrize("per_token", ["", "--calculate-per-token-loss"])
def test_uneven_loss_masks(reference, tmp_path, world, flags, per_token):
    common = f"{BATCHES} {per_token}"
    ranks = train(tmp_path, world, f"{common} {flags}", before=uneven)
    assert_same(ranks, reference(common, uneven))
    assert losses(ranks) != losses(reference(BATCHES))


@pytest.mark.parametrize("per_token", ["", "--calculate-per-token-loss"])
def test_with_every_token_masked_nothing_is_learnt_and_nothing_breaks(tmp_path, per_token):
    flags = f"{BATCHES} --train-iters 2 {per_token} --tsp-size 2"
    ranks = train(tmp_path, 2, flags, before=nothing)
    assert grad_norms(ranks) == [0, 0]


def _keep_evaluations():
    from megatron.training import get_args, training

    evaluate = training.evaluate

    def kept(*args, **kwargs):
        result = evaluate(*args, **kwargs)
        if result[0]:
            found = {name: float(loss) for name, loss in result[0].items()}
            Path(get_args().tsp_record, "evaluation.json").write_text(json.dumps(found))
        return result

    training.evaluate = kept


DOCUMENTS = "--reset-attention-mask --reset-position-ids --pipeline-model-parallel-size 2"


@pytest.mark.parametrize(
    ("common", "layout"),
    [
        ("--eval-micro-batch-size 4", TP_SP.format(2)),
        (f"--micro-batch-size 1 --eval-micro-batch-size 2 {DOCUMENTS}", ""),
    ],
)
def test_evaluation_in_micro_batches_of_another_size(tmp_path, common, layout):
    flags = (
        f"{LLAMA} --train-iters 2 --eval-iters 2 --eval-interval 2 {common} "
        "--eval-global-batch-size 8 --split 50,50,0"
    )
    found = []
    for name, (ranks, more) in {"tp": (2, layout), "tsp": (4, "--tsp-size 2")}.items():
        train(tmp_path / name, ranks, f"{flags} {more}", before=_keep_evaluations)
        found.append(json.loads((tmp_path / name / "evaluation.json").read_text()))
    assert found[0].keys() == found[1].keys() == {"lm loss"}
    assert abs(found[0]["lm loss"] - found[1]["lm loss"]) <= 1.5 * ULP


def _one_rank_reduces_less():
    from megatron.core.distributed import param_and_grad_buffer as buffers

    start = buffers._ParamAndGradBucketGroup.start_grad_sync

    def broken(self, *args, **kwargs):
        self.buckets[0].grad_data.mul_(1.001)
        return start(self, *args, **kwargs)

    buffers._ParamAndGradBucketGroup.start_grad_sync = broken


def test_twin_whose_first_bucket_is_scaled_differs(reference, tmp_path):
    broken = train(tmp_path, 4, f"{BATCHES} {BUCKETS} --tsp-size 2", before=_one_rank_reduces_less)
    with pytest.raises(AssertionError):
        assert_same(broken, reference(BATCHES))
