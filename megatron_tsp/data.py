"""Text to a Megatron indexed dataset, byte by byte: ``megatron-tsp data``.

Without `--input` the text is the source code of the running Python's standard library: real
text, tens of MB, on every machine, nothing to download. The tokenizer is Megatron's byte-level
one: a token is a byte, the vocabulary has 512 entries, and each document ends with end-of-document
(id 0). Megatron 0.19 has no ``--tokenizer-type`` for it, but training needs from a tokenizer only
the vocabulary size and the end of document, which `flags` passes to its NullTokenizer.
"""

import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from megatron_tsp.errors import TSPError

NAME = "text_document"


def build(
    out: str | os.PathLike, source: str | os.PathLike | None = None, json_key: str = "text"
) -> Path:
    """Write ``out/text_document.bin`` and ``.idx``; return the prefix for ``--data-path``.

    Args:
        out: folder, made if missing.
        source: a .jsonl file (one object a line, the text under `json_key`), a text file (one
            document), or a folder (every file below it that holds UTF-8 text, in order of its
            path). None: the standard library's ``*.py``.

    The same input gives the same bytes. The data set is written under temporary names and renamed
    at the end: it is there whole or not at all.

    Raises:
        TSPError: the input is missing, unreadable or empty; a line of a .jsonl is bad (the message
            names it); `out` cannot be written.
    """
    documents = _documents(source, json_key)
    out = Path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TSPError(f"cannot make the folder {out}: {error.strerror}") from error
    if not os.access(out, os.W_OK):
        raise TSPError(f"cannot write to the folder {out}: permission denied")
    prefix = out / NAME
    partial = {suffix: out / f".{NAME}.{os.getpid()}{suffix}" for suffix in (".bin", ".idx")}
    try:
        _write(documents, partial[".bin"], partial[".idx"], source)
        # The index goes first and comes last: a reader that finds it finds its data too.
        Path(f"{prefix}.idx").unlink(missing_ok=True)
        os.replace(partial[".bin"], f"{prefix}.bin")
        os.replace(partial[".idx"], f"{prefix}.idx")
    except OSError as error:
        raise TSPError(f"cannot write {prefix}: {error.strerror or error}") from error
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)
    return prefix


def exists(out: str | os.PathLike) -> bool:
    """Whether `out` holds a whole data set made by `build`."""
    return all(Path(out, NAME + suffix).is_file() for suffix in (".bin", ".idx"))


def flags(prefix: str | os.PathLike) -> dict[str, object]:
    """Megatron's flags to train on the data set at `prefix`."""
    tokenizer = _tokenizer()
    return {
        "--data-path": str(prefix),
        "--tokenizer-type": "NullTokenizer",
        "--vocab-size": tokenizer.vocab_size,
        "--null-tokenizer-eod-id": tokenizer.eod,
    }


def _tokenizer():
    from megatron.core.tokenizers.text.libraries.bytelevel_tokenizer import ByteLevelTokenizer

    return ByteLevelTokenizer()


def _write(documents: "list[_Source]", bin_path: Path, idx_path: Path, source) -> None:
    import numpy
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    from tqdm import tqdm

    tokenizer = _tokenizer()
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    builder = IndexedDatasetBuilder(str(bin_path), dtype=dtype)
    total = sum(document.size for document in documents)
    every = 0.1 if sys.stderr.isatty() else 5
    try:
        with tqdm(total=total, unit="B", unit_scale=True, desc="data", mininterval=every) as bar:
            for document in documents:
                for text, size in document.texts():
                    # A NUL would read as an end of document.
                    ids = tokenizer.text_to_ids(text.replace("\0", ""))
                    if ids:
                        ids.append(tokenizer.eod)
                        builder.add_document(numpy.array(ids, dtype=dtype), [len(ids)])
                    bar.update(size)
        if not builder.sequence_lengths:
            raise TSPError(f"no text in {source}: nothing to train on")
        builder.finalize(str(idx_path))
    finally:
        builder.data_file.close()


# ---------------------------------------------------------------------------------------------
# Where the text comes from
# ---------------------------------------------------------------------------------------------


class _Source:
    """One input file; `texts` yields its documents."""

    def __init__(self, path: Path, json_key: str | None = None, skip_binary: bool = False):
        self.path = path
        self.json_key = json_key  # None: the file is one plain text
        self.skip_binary = skip_binary
        try:
            self.size = path.stat().st_size
        except OSError as error:
            raise TSPError(f"cannot read {path}: {error.strerror}") from error

    def texts(self) -> Iterator[tuple[str, int]]:
        """The documents, each with the number of bytes read for it."""
        try:
            with open(self.path, "rb") as file:
                if self.json_key is None:
                    yield self._plain(file.read()), self.size
                else:
                    for number, line in enumerate(file, start=1):
                        text = self._from_json(line, number) if line.strip() else ""
                        yield text, len(line)
        except OSError as error:
            raise TSPError(f"cannot read {self.path}: {error.strerror}") from error

    def _plain(self, data: bytes) -> str:
        if self.skip_binary and b"\0" in data:
            return ""
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            if self.skip_binary:
                return ""
            raise TSPError(
                f"{self.path} is not UTF-8 text: byte {error.start} is {data[error.start]:#x}"
            ) from error

    def _from_json(self, line: bytes, number: int) -> str:
        where = f"{self.path}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise TSPError(f"{where}: not JSON: {error}") from error
        if not isinstance(record, dict):
            raise TSPError(f"{where}: expected an object with the key {self.json_key!r}")
        if self.json_key not in record:
            keys = ", ".join(map(repr, record)) or "none"
            raise TSPError(
                f"{where}: no key {self.json_key!r} (keys there: {keys}); choose with --json-key"
            )
        if not isinstance(record[self.json_key], str):
            raise TSPError(f"{where}: the value of {self.json_key!r} is not a string")
        return record[self.json_key]


def _documents(source: str | os.PathLike | None, json_key: str) -> list[_Source]:
    """The input files in a fixed order."""
    if source is None:
        return _standard_library()
    path = Path(source)
    if not path.exists():
        raise TSPError(f"no such file or folder: {path}")
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file())
        if not files:
            raise TSPError(f"no files in the folder {path}")
        return [
            _Source(p, json_key if p.suffix == ".jsonl" else None, skip_binary=True) for p in files
        ]
    if path.stat().st_size == 0:
        raise TSPError(f"the file {path} is empty")
    return [_Source(path, json_key if path.suffix == ".jsonl" else None)]


def _standard_library() -> list[_Source]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*.py") if "site-packages" not in p.parts and p.is_file())
    if not files:
        raise TSPError(f"no Python sources in {root}: give a text with --input")
    return [_Source(p, skip_binary=True) for p in files]  # some test files are not UTF-8
