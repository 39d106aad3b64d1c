"""What models do in attention: Megatron's `pretrain` with `--tsp-size`, against TP 1."""

import json

import pytest
from training import LLAMA, TP_SP, ULP, assert_same, train

from megatron_tsp import data
from megatron_tsp.layers.mask import Mask

#: The mock text counts up to its end of document: with 16 ids a document has 16 tokens.
SHORT = "--vocab-size 15 --make-vocab-size-divisible-by 4 --reset-attention-mask --eod-mask-loss"

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


def _text(folder):
    """Documents of 5 to 70 bytes in a Megatron data set; its flags."""
    lines = [json.dumps({"text": f"{n} " * (2 + n * 7 % 20)}) for n in range(200)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    given = data.flags(data.build(folder / "data", folder / "text.jsonl"))
    return "no:--mock-data " + " ".join(f"{flag} {value}" for flag, value in given.items())


def test_inter_document_masking_is_the_reset_mask(reference, tmp_path):
    text = f"{LLAMA} {_text(tmp_path)}"
    expected = train(tmp_path / "tp1", 1, f"{text} --reset-attention-mask --reset-position-ids")
    packed = f"{text} --dataloader-inter-document-masking --tsp-size 2"
    assert_same(train(tmp_path / "tsp", 2, packed), expected, loss=2.5 * ULP)


def _conversations(folder):
    """Packed conversations and a tokenizer of words for them, as Megatron's SFT data wants both."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs megatron-tsp[sft]")
    transformers = pytest.importorskip("transformers", reason="needs megatron-tsp[sft]")
    pytest.importorskip("datasets", reason="needs megatron-tsp[sft]")
    words = ["<unk>", "<eos>", *(f"w{n}" for n in range(62))]
    model = tokenizers.models.WordLevel({word: n for n, word in enumerate(words)}, "<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>"
    ).save_pretrained(folder / "tokenizer")
    lines = []
    for sample in range(40):
        messages = []
        for turn in range(2 + sample % 3):
            said = [" ".join(f" w{(sample * n + turn) % 62}" for n in range(5 + 3 * turn))] * 3
            roles = ("system", "user", "assistant")
            messages += [
                {"role": role, "content": f"{text} "}
                for role, text in zip(roles, said, strict=True)
            ]
        lines.append(json.dumps({"messages": messages}))
    (folder / "sft.jsonl").write_text("\n".join(lines))
    return (
        f"no:--mock-data --data-path {folder}/sft.jsonl --tokenizer-type SFTTokenizer "
        f"--tokenizer-model {folder}/tokenizer --sft --sft-tokenizer-prompt-format identity "
        "--make-vocab-size-divisible-by 16"
    )


def test_packed_conversations_train_as_in_megatrons_own_layers(tmp_path):
    """Without Transformer Engine Megatron's layers take packed sequences with our core only."""
    flags = f"{LLAMA} {_conversations(tmp_path)}"
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
