"""Words of a command line that remember where in the text they were written.

Text is held one character per byte (latin-1), so offsets are bytes and every file comes back as it
was. What a script cannot tell, such as `$1`, stays in a word as a hole.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

Span = tuple[int, int]


@dataclass(frozen=True)
class Piece:
    """A stretch of a word.

    Attributes:
        text: what it is; None for a hole.
        at: where `text` stands in the source, character for character.
        site: the region to which it belongs where words are listed: for `$TP` that of `$TP`, while
            `at` is where TP was assigned.
        shown: the source of a hole.
        quoted: the shell does not split it into words.
        conditions: the branches that it depends on, by their offsets.
    """

    text: str | None
    at: int
    site: Span
    shown: str = ""
    quoted: bool = False
    conditions: frozenset[int] = frozenset()

    def part(self, start: int, end: int) -> "Piece":
        """Characters `start` to `end` of the text, as a piece."""
        site = self.site
        if site == (self.at, self.at + len(self.text)):
            site = (self.at + start, self.at + end)
        return replace(self, text=self.text[start:end], at=self.at + start, site=site)


#: A blank that is not written anywhere.
BLANK = Piece(" ", -1, (-1, -1))


@dataclass(frozen=True)
class Word:
    """One word, or a hole that may be any number of words.

    Attributes:
        pieces: what it consists of.
        site: where it stands among other words; something may be put before or after it there.
        broken: the offset of something that could not be read, or None.
    """

    pieces: tuple[Piece, ...]
    site: Span
    broken: int | None = None

    @property
    def text(self) -> str | None:
        """The word, or None if it has a hole."""
        if any(piece.text is None for piece in self.pieces):
            return None
        return "".join(piece.text for piece in self.pieces)

    @property
    def shown(self) -> str:
        """The word, holes as they are written."""
        return "".join(p.shown if p.text is None else p.text for p in self.pieces)

    @property
    def start(self) -> str:
        """The text before the first hole."""
        known = []
        for piece in self.pieces:
            if piece.text is None:
                break
            known.append(piece.text)
        return "".join(known)

    @property
    def many(self) -> bool:
        """Whether it may be no word, or several."""
        return any(piece.text is None and not piece.quoted for piece in self.pieces)

    @property
    def conditions(self) -> frozenset[int]:
        """The branches that the word depends on."""
        return frozenset().union(*(piece.conditions for piece in self.pieces))

    def is_flag(self, flag: str) -> bool:
        """Whether it is `flag`, or `flag=` and a value."""
        return self.start.startswith(flag + "=") or self.text == flag


def split(pieces: Iterable[Piece], whole: Span | None = None) -> list[Word]:
    """The words into which a shell splits unquoted text.

    whole: the region that all of it was written in; a single word then stands there.
    """
    words: list[list[Piece]] = []
    glued = False  # whether the next piece continues the last word
    for piece in pieces:
        if piece.text is None or piece.quoted:
            if not glued:
                words.append([])
            words[-1].append(piece)
            glued = True
            continue
        for match in re.finditer(r"\s+|\S+", piece.text):
            if match[0].isspace():
                glued = False
                continue
            if not glued:
                words.append([])
            words[-1].append(piece.part(*match.span()))
            glued = True
    if len(words) == 1 and whole is not None:
        return [Word(tuple(words[0]), whole)]
    return [Word(tuple(word), (word[0].site[0], word[-1].site[1])) for word in words]


_TOKEN = re.compile(
    r"(?P<end>[\n;|&()<>]+)|(?P<blank>\s)|(?P<odd>['\"\\$`])|(?P<text>[^\s;|&()<>'\"\\$`]+)"
)


def commands_of(pieces: Iterable[Piece]) -> list[list[Word]]:
    """The commands of a text that is given to another shell, as in `bash -c "..."`.

    Quotes and expansions there are holes: what they hide is not looked into.
    """
    commands: list[list[list[Piece]]] = [[]]
    glued, quote, escaped = False, "", False

    def put(piece: Piece) -> None:
        nonlocal glued
        if not glued:
            commands[-1].append([])
        commands[-1][-1].append(piece)
        glued = True

    for piece in pieces:
        if piece.text is None:
            put(replace(piece, quoted=bool(quote)))
            continue
        position = 0
        while position < len(piece.text):
            inside = quote or escaped
            match = None if inside else _TOKEN.match(piece.text, position)
            part = piece.part(position, match.end() if match else position + 1)
            position += len(part.text)
            if match and match.lastgroup == "text":
                put(part)
            elif match and match.lastgroup != "odd":
                glued = False
                if match.lastgroup == "end":
                    commands.append([])
            else:
                put(replace(part, text=None, shown=part.text, quoted=True))
                if escaped:
                    escaped = False
                elif part.text == "\\" and quote != "'":
                    escaped = True
                elif inside:
                    quote = "" if part.text == quote else quote
                elif part.text != "$":
                    quote = part.text
    return [
        [Word(tuple(word), (word[0].site[0], word[-1].site[1])) for word in command]
        for command in commands
        if command
    ]
