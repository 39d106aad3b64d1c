"""Training data with documents in its samples, and the flags that name it."""

import json

import pytest

from megatron_tsp import data

#: The mock text counts up to its end of document: with 16 ids a document has 16 tokens.
SHORT = "--vocab-size 15 --make-vocab-size-divisible-by 4 --reset-attention-mask --eod-mask-loss"


def documents(folder):
    """Documents of 5 to 70 bytes in a Megatron data set; its flags."""
    lines = [json.dumps({"text": f"{n} " * (2 + n * 7 % 20)}) for n in range(200)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    given = data.flags(data.build(folder / "data", folder / "text.jsonl"))
    return "no:--mock-data " + " ".join(f"{flag} {value}" for flag, value in given.items())


def conversations(folder):
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
