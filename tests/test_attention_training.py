"""What models do in attention: Megatron's `pretrain` with `--tsp-size`, against TP 1."""

import pytest
from texts import SHORT, conversations, documents
from training import LLAMA, TP_SP, ULP, assert_same, train

from megatron_tsp.layers.mask import Mask

MODELS = {
    "window-sinks-scaled-rope": f"{LLAMA} --window-size 9,0 --softmax-type learnable "
    "--use-rope-scaling --rotary-interleaved --rotary-percent 0.5",
    "window-in-one-layer-yarn-gate": f"{LLAMA} --window-size 20,0 --window-attn-skip-freq 2 "
    "--softmax-type off-by-one --attention-output-gate --no-rope-freq 2 "
    "--position-embedding-type yarn --rotary-scaling-factor 4 "
    "--yarn-original-max-position-embeddings 16",
    "documents": f"{LLAMA} {SHORT} --softmax-type learnable",
    "documents-by-token": f"{LLAMA} {SHORT} --softmax-type learnable --calculate-per-token-loss",
    "documents-learned-positions": f"{LLAMA} {SHORT} --reset-position-ids "
    "--position-embedding-type learned_absolute",
}
ALLTOALL = "--tsp-attention-exchange alltoall"


@pytest.mark.parametrize(
    ("name", "world", "flags"),
    [
        ("window-sinks-scaled-rope", 2, "--tsp-size 2"),
        ("window-sinks-scaled-rope", 4, f"--tsp-size 4 {ALLTOALL}"),
        ("window-in-one-layer-yarn-gate", 2, "--tsp-size 2"),
        ("documents", 4, "--tsp-size 4"),
        ("documents", 2, f"--tsp-size 2 {ALLTOALL} --recompute-granularity selective"),
        ("documents", 2, "--tsp-size 2 --tsp-blocks mlp"),
        ("documents", 2, TP_SP.format(2)),
        ("documents-by-token", 4, "--tsp-size 2 --context-parallel-size 2"),
        ("documents-learned-positions", 2, "--tsp-size 2"),
    ],
)
def test_trains_as_at_tp_1(reference, tmp_path, name, world, flags):
    ranks = train(tmp_path, world, f"{MODELS[name]} {flags}")
    assert_same(ranks, reference(MODELS[name]), loss=2.5 * ULP)


def test_every_pipeline_stage_knows_the_documents(reference, tmp_path):
    """Stages draw other weights: start them from a checkpoint."""
    flags = MODELS["documents"]
    saving = f"{flags} --save {tmp_path}/ckpt --save-interval 3 --exit-interval 3"
    train(tmp_path / "first", 1, saving, exits=True)
    rest = train(
        tmp_path / "rest", 4,
        f"{flags} --tsp-size 2 --pipeline-model-parallel-size 2 --load {tmp_path}/ckpt "
        "--no-load-rng",
    )  # fmt: skip
    last = next(rank for rank in rest if rank[0]["loss"] is not None)
    assert_same([last], [reference(flags)[0][3:]])


def test_inter_document_masking_is_the_reset_mask(reference, tmp_path):
    text = f"{LLAMA} {documents(tmp_path)}"
    expected = train(tmp_path / "tp1", 1, f"{text} --reset-attention-mask --reset-position-ids")
    packed = f"{text} --dataloader-inter-document-masking --tsp-size 2"
    assert_same(train(tmp_path / "tsp", 2, packed), expected, loss=2.5 * ULP)


def test_packed_conversations_train_as_in_megatrons_own_layers(tmp_path):
    """Without Transformer Engine Megatron's layers take packed sequences with our core only."""
    flags = f"{LLAMA} {conversations(tmp_path)}"
    expected = train(tmp_path / "tp1", 1, f"{flags} --tsp-baseline-core")
    ranks = train(tmp_path / "tsp", 2, f"{flags} --tsp-size 2")
    assert_same(ranks, expected, loss=2.5 * ULP)


def test_qk_l2_norm(tmp_path):
    """Megatron's local layers ignore the flag; with our core's layer spec they honour it."""
    expected = train(tmp_path / "tp1", 1, "--qk-l2-norm --tsp-baseline-core")
    assert_same(train(tmp_path / "tsp", 2, "--qk-l2-norm --tsp-size 2"), expected, loss=2.5 * ULP)
    without = train(tmp_path / "without", 1, "--tsp-baseline-core --train-iters 1")
    assert abs(without[0][0]["loss"] - expected[0][0]["loss"]) > 1e-4


def _one_document():
    tiles = Mask.tiles
    Mask.tiles = lambda self, *spans: tiles(Mask(self.window), *spans)


def test_twin_that_forgets_the_documents_differs(reference, tmp_path):
    broken = train(tmp_path, 2, f"{MODELS['documents']} --tsp-size 2", before=_one_document)
    with pytest.raises(AssertionError):
        assert_same(broken, reference(MODELS["documents"]), loss=1e-3, grad_norm=1e-3)
