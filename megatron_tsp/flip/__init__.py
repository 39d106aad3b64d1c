"""`megatron-tsp flip`: a TP + SP launch, turned into a TSP launch, and back.

Only the flags that have to change do; comments and all the rest stay byte for byte. What cannot be
carried, or is not understood, is an error that names it.
"""

import os
import re
import sys
from pathlib import Path

from megatron_tsp.errors import TSPError
from megatron_tsp.flip import bash, model_args
from megatron_tsp.flip.edits import Edits


def flip(
    text: bytes, *, size: int | None = None, reverse: bool = False, keep_entry: bool = False
) -> Edits:
    """The changes that flip a launch.

    text: a command line, a bash script, or YAML with MODEL_ARGS.
    size: the TSP degree; None keeps the tensor-parallel size.
    reverse: from TSP to TP + SP.
    keep_entry: do not put `-m megatron_tsp.run` in front of the training script, or take it out:
        for a Megatron-LM that is patched, and for launchers that are not understood.
    Raises:
        TSPError: naming the line or the flag that cannot be flipped.
    """
    source = text.decode("latin-1")
    if size is not None and size < 1:
        raise TSPError(f"--tsp-size {size}: the degree is at least 1")
    if size is not None and reverse:
        raise TSPError("--tsp-size is for the flip to TSP; drop it, or --reverse")
    if re.search(r"^(['\"]?)MODEL_ARGS\1[ \t]*:", source, re.MULTILINE):
        return model_args.flip_back(source) if reverse else model_args.flip(source, size)
    if reverse:
        return bash.flip_back(source, keep_entry)
    return bash.flip(source, size, keep_entry)


def main(given: str, size=None, reverse=False, check=False, keep_entry=False) -> None:
    """The command: the flipped text to stdout, what changed and why to stderr.

    given: a file, `-` for stdin, or a command line. With `check` only the report, to stdout.
    """
    name, text = _read(given)
    try:
        edits = flip(text, size=size, reverse=reverse, keep_entry=keep_entry)
    except TSPError as error:
        raise TSPError(f"{name}: {error}") from None
    report = sys.stdout if check else sys.stderr
    for change in edits.changes:
        print(f"{name}: {_shown(change)}", file=report)
    for note in edits.notes:
        print(f"{name}: note: {_shown(note)}", file=report)
    if not check:
        sys.stdout.flush()
        sys.stdout.buffer.write(edits.apply().encode("latin-1"))
        sys.stdout.buffer.flush()


def _read(given: str) -> tuple[str, bytes]:
    if given == "-":
        return "stdin", sys.stdin.buffer.read()
    if not os.path.isfile(given) and re.search(r"\s--?\w|^--\w", given):  # of any length
        return "command line", (given + "\n").encode("utf-8", "surrogateescape")
    try:
        return given, Path(given).read_bytes()
    except OSError as error:
        raise TSPError(f"cannot read {given}: {error.strerror}") from None


def _shown(text: str) -> str:
    return text.encode("latin-1", "replace").decode("utf-8", "replace")
