"""Changes to a text, each with its line and reason; everything else stays byte for byte."""

import re
from collections.abc import Sequence

from megatron_tsp.errors import TSPError
from megatron_tsp.flip.words import Word

TP = "--tensor-model-parallel-size"
SP = "--sequence-parallel"
TSP = "--tsp-size"
RUN = "megatron_tsp.run"


class Edits:
    """Changes to `source` (latin-1: offsets are bytes).

    Attributes:
        changes: what changes, a line of text each.
        notes: what the user should know.
        renamed: offsets of the flags that were renamed.
    """

    def __init__(self, source: str):
        self.source = source
        self.notes: list[str] = []
        self.renamed: set[int] = set()
        self._edits: dict[tuple[int, int], tuple[str, str]] = {}  # span: new text, reason

    @property
    def changes(self) -> list[str]:
        described = []
        for (start, end), (new, why) in sorted(self._edits.items()):
            old = self.source[start:end]
            if old and new:
                what = f"{old} -> {new}"
            else:
                what = f"added {new.strip()}" if new else f"removed {old.strip()}"
            described.append(f"line {self.line(start)}: {what}: {why}")
        return described

    def apply(self) -> str:
        """The changed text."""
        text, position = [], 0
        for (start, end), (new, _) in sorted(self._edits.items()):
            text += [self.source[position:start], new]
            position = end
        return "".join(text) + self.source[position:]

    def line(self, offset: int) -> int:
        """The number of the line that an offset is in."""
        return self.source.count("\n", 0, offset) + 1

    def note(self, text: str) -> None:
        """Tell the user, once."""
        if text not in self.notes:
            self.notes.append(text)

    def replace(self, start: int, end: int, new: str, why: str) -> None:
        """Put `new` where `start` to `end` is now."""
        self._edits[start, end] = (new, why)

    def rename(self, word: Word, old: str, new: str, why: str) -> None:
        """Rename the flag that a word begins with."""
        at = word.pieces[0].at
        if self.source[at : at + len(old)] != old or at < 0:
            raise TSPError(
                f"line {self.line(word.site[0])}: {old} is written in pieces; write it in one"
            )
        self.renamed.add(at)
        self.replace(at, at + len(old), new, why)

    def set_value(self, flag: Word, following: Sequence[Word], size: int) -> None:
        """Give a flag, `--flag value` or `--flag=value`, another value."""
        word, start = (flag, flag.start.find("=") + 1) if "=" in flag.start else (None, 0)
        word = word or (following[0] if following else None)
        if word is not None and word.text is not None and word.text[start:] == str(size):
            return
        piece = word.pieces[0] if word is not None and len(word.pieces) == 1 else None
        if piece is None or piece.text is None or not word.site[0] <= piece.at < word.site[1]:
            written = self.source[slice(*word.site)] if word is not None else "nothing"
            raise TSPError(
                f"line {self.line(flag.site[0])}: the tensor-parallel size is {written}; set it to "
                f"{size} where it comes from, and leave {TSP} out"
            )
        self.replace(piece.at + start, piece.at + len(piece.text), str(size), "the size asked for")

    def put_before(self, word: Word, text: str, why: str) -> None:
        """Put words in front of a word."""
        self.replace(word.site[0], word.site[0], text, why)

    def put_after(self, word: Word, text: str, why: str) -> None:
        """Put words behind a word."""
        self.replace(word.site[1], word.site[1], text, why)

    def remove(self, first: Word, behind: Word, why: str) -> None:
        """Take out `-m megatron_tsp.run`, from `first` up to `behind`."""
        start, end = first.site[0], behind.site[0]
        blank = r"(?:[ \t\n]|\\\n)+"
        if not re.fullmatch(rf"-m{blank}{re.escape(RUN)}{blank}", self.source[start:end]):
            raise TSPError(
                f"line {self.line(start)}: -m {RUN} is not written next to the script; pass "
                "--keep-entry and take it out yourself"
            )
        self.replace(start, end, "", why)
