"""What the words of a bash script expand to, as far as the script itself says.

A variable is followed through its assignments in the script. What depends on the environment, on
another file or on a command is a hole.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_tsp.flip.words import BLANK, Piece, Span, Word, split

_DEFAULTS = (":-", "-", ":=", "=")


@dataclass(frozen=True)
class Assignment:
    """One assignment to a variable.

    Attributes:
        value: the syntax node, or None for an empty one.
        appends: `+=`.
        span: where it stands.
        conditions: the branches that it is in, by their offsets.
        in_function: whether it is in a function, which may run after what comes later.
    """

    value: object
    appends: bool
    span: Span
    conditions: frozenset[int]
    in_function: bool


class Expansion:
    """Expands syntax nodes.

    Args:
        source: the script as latin-1.
        assigned: the assignments, by variable, in order.
        branches: the regions that run under a condition, or several times.
        functions: the regions of functions.
    """

    def __init__(
        self,
        source: str,
        assigned: Mapping[str, Sequence[Assignment]],
        branches: Sequence[Span],
        functions: Sequence[Span],
    ):
        self._source, self._assigned = source, assigned
        self._branches, self._functions = branches, functions
        self._reading: set[int] = set()  # assignments, against those that mention themselves

    def _text(self, node) -> str:
        return self._source[node.start_byte : node.end_byte]

    def words(self, parts, positional) -> list[Word]:
        """The words of a list of syntax nodes: a command's, or an array's."""
        words: list[Word] = []
        end = None
        for node in parts:
            found = self._words_of(node, positional)
            gap = None if end is None else self._source[end : node.start_byte].replace("\\\n", "")
            if gap is not None and not _separates(gap):
                found = [replace(word, broken=end) for word in found]
            words += found
            end = node.end_byte
        return words

    def _words_of(self, node, positional) -> list[Word]:
        """The words that one node, as written in a list, stands for."""
        span = node.start_byte, node.end_byte
        inner = node
        if node.type == "string" and len(node.children) == 3:
            inner = node.children[1]
        quoted = inner is not node
        reference = _reference(self._text(inner))
        if inner.type in ("simple_expansion", "expansion") and reference:
            name, index = reference
            if name in "@*":
                if positional and not (quoted and name == "*"):
                    return list(positional)
                return [Word((Piece(None, span[0], span, self._text(inner)),), span)]
            if index:
                elements = self._array(name, node.start_byte)
                if elements is None:
                    return [Word((Piece(None, span[0], span, self._text(inner)),), span)]
                if quoted and index == "*":
                    return [Word(tuple(_joined(elements)), span)]
                if quoted:
                    return elements
                return [word for element in elements for word in _unquoted(element)]
        return split(self._pieces(node, False), span)

    def _pieces(self, node, quoted) -> list[Piece]:
        """What a node expands to, before it is split into words."""
        kind, text, start = node.type, self._text(node), node.start_byte
        span = start, node.end_byte
        if kind in ("word", "number", "variable_name", "special_variable_name"):
            if "{" in text and re.search(r"\{[^{}]*(,|\.\.)[^{}]*\}", text):
                return [Piece(None, start, span, text)]  # brace expansion: several words
            return _unescape(text, start, r"\\(?s:.)", True)
        if kind == "raw_string":
            return [Piece(text[1:-1], start + 1, (start + 1, span[1] - 1), quoted=True)]
        if kind == "string":
            return self._string(node)
        if kind == "concatenation":
            pieces, end = [], start
            for child in node.children:
                if child.start_byte != end:
                    return [Piece(None, start, span, text)]
                pieces += self._pieces(child, quoted)
                end = child.end_byte
            return pieces
        if kind in ("simple_expansion", "expansion"):
            return self._expansion(node, quoted)
        one_word = quoted or kind in ("arithmetic_expansion", "ansi_c_string")
        return [Piece(None, start, span, text.lstrip(), one_word)]

    def _string(self, node) -> list[Piece]:
        pieces, end = [], node.start_byte + 1
        for child in [*node.children[1:-1], None]:
            # the parser leaves blanks before an expansion out, or makes them part of it
            begin = child.start_byte if child else node.end_byte - 1
            if child and child.type != "string_content":
                begin += len(self._text(child)) - len(self._text(child).lstrip())
            if child is None or child.type != "string_content":
                raw = self._source[end:begin]
                pieces += _unescape(raw, end, r'\\[$`"\\\n]', True)
                end = child.end_byte if child else begin
                if child:
                    pieces += self._pieces(child, True)
        return pieces or [Piece("", node.start_byte + 1, (node.start_byte + 1,) * 2, quoted=True)]

    def _expansion(self, node, quoted) -> list[Piece]:
        span, text = (node.start_byte, node.end_byte), self._text(node)
        span = span[0] + len(text) - len(text.lstrip()), span[1]
        text = text.lstrip()
        hole = [Piece(None, span[0], span, text, quoted and "@" not in text)]
        reference = _reference(text)
        if reference and reference[1] and quoted and (reference[1] == "*" or self._reading):
            elements = self._array(reference[0], node.start_byte)
            return hole if elements is None else _joined(elements)
        name, default = _plain(text), None
        if name is None:
            children = [child for child in node.children if child.type not in ("${", "}")]
            if len(children) < 2 or children[0].type != "variable_name":
                return hole
            if children[1].type not in _DEFAULTS or len(children) > 3:
                return hole
            name = self._text(children[0])
            default = children[2] if len(children) == 3 else None
        pieces = self._scalar(name, node.start_byte)
        if pieces is None and default is not None:
            pieces = self._pieces(default, quoted)
        if pieces is None:
            return hole
        pieces = [replace(piece, quoted=quoted) for piece in pieces]
        if not any(p.text is None or re.search(r"\s", p.text) for p in pieces):
            pieces = [replace(piece, site=span) for piece in pieces]
        return pieces

    # -----------------------------------------------------------------------------------------

    def _seen(self, name: str, offset: int) -> list[Assignment]:
        """The assignments to a variable that come before `offset`, from the last unconditional."""
        in_function = any(start <= offset < end for start, end in self._functions)
        here = self._conditions_at(offset)
        seen: list[Assignment] = []
        for one in self._assigned.get(name, []):
            if one.span[0] <= offset < one.span[1] or one.span[0] in self._reading:
                continue
            if one.span[1] > offset and not (in_function or one.in_function):
                continue
            if not one.appends and one.conditions <= here:
                seen = []
            seen.append(replace(one, conditions=one.conditions - here))
        return seen

    def _conditions_at(self, offset: int) -> frozenset[int]:
        return frozenset(start for start, end in self._branches if start <= offset < end)

    def _scalar(self, name: str, offset: int) -> list[Piece] | None:
        """The value of a variable; None if the script does not say."""
        value: list[Piece] | None = None
        for one in self._seen(name, offset):
            if one.value is not None and one.value.type == "array":
                elements = self._array(name, offset)
                return list(elements[0].pieces) if elements else None
            new = self._read(one)
            if one.appends:
                value = None if value is None else value + new
            elif one.conditions and value is not None and not self._mentions(one, name):
                if not any(re.search(r"(^|\s)--[a-z]", p.text or "") for p in value + new):
                    return None  # one value or the other
                value = [*value, BLANK, *new]  # flags: both are looked at
            else:
                value = new
        return value

    def _read(self, one: Assignment) -> list[Piece]:
        if one.value is None:
            return []
        self._reading.add(one.span[0])
        try:
            pieces = self._pieces(one.value, True)
        finally:
            self._reading.discard(one.span[0])
        return [_under(piece, one) for piece in pieces]

    def _array(self, name: str, offset: int) -> list[Word] | None:
        """The elements of an array; None if the script does not say."""
        elements: list[Word] | None = None
        for one in self._seen(name, offset):
            if one.value is None or one.value.type != "array":
                if one.appends or elements is not None:
                    return None
                elements = [Word(tuple(self._read(one)), one.span)]
                continue
            parts = [part for part in one.value.named_children if part.type != "comment"]
            self._reading.add(one.span[0])
            try:
                new = self.words(parts, ())
            finally:
                self._reading.discard(one.span[0])
            new = [replace(w, pieces=tuple(_under(p, one) for p in w.pieces)) for w in new]
            keeps = one.appends or (one.conditions and not self._mentions(one, name))
            elements = (elements or []) + new if keeps else new
        return elements

    def _mentions(self, one: Assignment, name: str) -> bool:
        return re.search(rf"\$\{{?{name}\b", self._text(one.value)) is not None


def _under(piece: Piece, one: Assignment) -> Piece:
    """A piece with the conditions of the assignment, if it is written there."""
    if one.conditions and one.span[0] <= piece.at < one.span[1]:
        return replace(piece, conditions=piece.conditions | one.conditions)
    return piece


def _joined(elements: Sequence[Word]) -> list[Piece]:
    """The elements of an array as `"${ARRAY[*]}"` gives them: in one word."""
    pieces: list[Piece] = []
    for element in elements:
        pieces += [*element.pieces, replace(BLANK, quoted=True)]
    return pieces[:-1]


def _unquoted(element: Word) -> list[Word]:
    """An array's element as `${ARRAY[@]}` without quotes gives it: split."""
    words = split([replace(piece, quoted=False) for piece in element.pieces], element.site)
    return [replace(word, broken=element.broken) for word in words]


def _unescape(text: str, start: int, pattern: str, quoted: bool) -> list[Piece]:
    """Literal text; escapes part it, and an escaped newline is nothing."""
    pieces, position = [], 0
    for match in [*re.finditer(pattern, text), None]:
        end = match.start() if match else len(text)
        if end > position:
            at = start + position
            pieces.append(Piece(text[position:end], at, (at, start + end), quoted=quoted))
        if match:
            if match[0] != "\\\n":
                at = start + match.start() + 1
                pieces.append(Piece(match[0][1:], at, (at - 1, at + 1), quoted=True))
            position = match.end()
    return pieces


def _reference(text: str) -> tuple[str, str] | None:
    """`${A[@]}` as (A, @); `$@` as (@, '')."""
    if match := re.fullmatch(r"\$(?:\{([@*])\}|([@*]))", text):
        return match[1] or match[2], ""
    match = re.fullmatch(r"\$\{(\w+)\[([@*])\]\}", text)
    return (match[1], match[2]) if match else None


def _plain(text: str) -> str | None:
    match = re.fullmatch(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))", text)
    return (match[1] or match[2]) if match else None


def _separates(gap: str) -> bool:
    """Whether what stands between two words is blanks, comments or a redirection."""
    left = re.sub(r"(?m:(?<!\S)#.*$)", "", gap)
    return gap != "" and (left.strip() == "" or re.search(r"[<>]", left) is not None)
