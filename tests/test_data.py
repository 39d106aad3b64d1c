"""The data command: what it writes is what Megatron reads, and it fails without leaving a trace."""

import json
import sys

import pytest

from megatron_tsp import cli, data
from megatron_tsp.errors import TSPError


def read(prefix):
    """The documents of an indexed dataset, as Megatron reads them."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    assert len(dataset) == len(dataset.document_indices) - 1
    return [dataset[i].tolist() for i in range(len(dataset))]


def ids(text):
    return [*text.encode(), 0]


def test_jsonl(tmp_path):
    source = tmp_path / "a.jsonl"
    lines = [{"text": "ab"}, {"text": "é\u2028x"}, {"text": ""}, {"text": "c\0d"}]
    source.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n")
    assert read(data.build(tmp_path / "out", source)) == [ids("ab"), ids("é\u2028x"), ids("cd")]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "text_document.bin",
        "text_document.idx",
    ]


def test_json_key(tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text('{"body": "ab", "n": 1}\n')
    assert read(data.build(tmp_path / "out", source, json_key="body")) == [ids("ab")]


def test_plain_text_is_one_document(tmp_path):
    source = tmp_path / "a.txt"
    source.write_text("one\ntwo\n")
    assert read(data.build(tmp_path / "out", source)) == [ids("one\ntwo\n")]


def test_folder_in_order_without_binaries(tmp_path):
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.txt").write_text("b")
    (folder / "a.txt").write_text("a")
    (folder / "sub" / "c.jsonl").write_text('{"text": "c"}\n')
    (folder / "image").write_bytes(b"\xff\xd8")
    (folder / "zeros").write_bytes(b"x\0y")
    assert read(data.build(tmp_path / "out", folder)) == [ids("a"), ids("b"), ids("c")]


def test_same_input_same_bytes(tmp_path):
    source = tmp_path / "a.txt"
    source.write_text("text")
    first, second = (data.build(tmp_path / name, source) for name in ("x", "y"))
    for suffix in (".bin", ".idx"):
        assert first.with_suffix(suffix).read_bytes() == second.with_suffix(suffix).read_bytes()


def test_standard_library_is_the_default():
    files = data._documents(None, "text")
    assert sum(f.size for f in files) > 10_000_000
    assert not any("site-packages" in f.path.parts for f in files)
    assert any(f.path.name == "argparse.py" for f in files)


BAD = {
    "missing.txt": (None, "no such file or folder"),
    "empty.txt": (b"", "is empty"),
    "latin.txt": (b"caf\xe9", "not UTF-8 text: byte 3 is 0xe9"),
    "blank.jsonl": (b"\n\n", "no text in"),
    "broken.jsonl": (b'{"text": "a"}\n{"text": \n', "broken.jsonl, line 2: not JSON"),
    "key.jsonl": (
        b'{"text": "a"}\n\n{"body": "b"}\n',
        "line 3: no key 'text' (keys there: 'body')",
    ),
    "type.jsonl": (b'{"text": 3}\n', "line 1: the value of 'text' is not a string"),
    "list.jsonl": (b"[1]\n", "line 1: expected an object"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_line_and_leaves_nothing(name, tmp_path, capsys):
    content, message = BAD[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    out = tmp_path / "out"
    assert cli.main(["data", "--input", str(tmp_path / name), "--out", str(out)]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("megatron-tsp: error: ") and message in error
    assert not out.exists() or not list(out.iterdir())


def test_a_failed_build_keeps_the_old_data_set(tmp_path):
    good, bad = tmp_path / "good.txt", tmp_path / "bad.jsonl"
    good.write_text("good")
    bad.write_text('{"text": "a"}\n{')
    prefix = data.build(tmp_path / "out", good)
    with pytest.raises(TSPError, match="line 2"):
        data.build(tmp_path / "out", bad)
    assert read(prefix) == [ids("good")]
    assert data.exists(tmp_path / "out")


def test_out_is_a_file(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(TSPError, match="cannot make the folder"):
        data.build(tmp_path / "a.txt", tmp_path / "a.txt")


def test_printed_flags_are_megatrons(tmp_path, capsys, monkeypatch):
    source = tmp_path / "a.txt"
    source.write_text("a")
    assert cli.main(["data", "--input", str(source), "--out", str(tmp_path / "o")]) == 0
    printed = capsys.readouterr().out
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training.arguments import parse_args

    words = next(line for line in printed.splitlines() if "--data-path" in line).split()
    monkeypatch.setattr(sys, "argv", ["pretrain", *words])
    args = parse_args()
    assert args.data_path == [str(tmp_path / "o" / "text_document")]
    args.rank, args.tensor_model_parallel_size = 0, 4
    tokenizer = build_tokenizer(args)
    assert (tokenizer.vocab_size, tokenizer.eod, args.padded_vocab_size) == (512, 0, 512)
