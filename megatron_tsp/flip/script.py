"""A bash script, read far enough to see the words of each command and where they were written.

tree-sitter parses; nothing is run.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_tsp.errors import TSPError
from megatron_tsp.flip.expansion import Assignment, Expansion
from megatron_tsp.flip.words import BLANK, Piece, Span, Word, commands_of

_SHELLS = ("sh", "bash", "dash", "ksh", "zsh")
_PRINTING = ("echo", "printf", ":")
_BRANCHES = (
    "elif_clause", "else_clause", "case_item", "while_statement", "for_statement",
    "c_style_for_statement", "list",
)  # fmt: skip


@dataclass(frozen=True)
class Command:
    """A simple command.

    Attributes:
        words: what it is called with, its own name first.
        span: where it stands.
        shown: its words are only printed.
    """

    words: tuple[Word, ...]
    span: Span
    shown: bool = False

    @property
    def name(self) -> str:
        """What is run, without its folder; empty if that is not known."""
        first = self.words[0].text if self.words else None
        return (first or "").rsplit("/", 1)[-1]


class Script:
    """The commands of a bash script.

    Raises:
        TSPError: it is not bash, as far as the parser can tell; the line is named.
    """

    def __init__(self, source: str):
        """source: the bytes of the script as latin-1."""
        import tree_sitter
        import tree_sitter_bash

        self.source = source
        parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))
        root = parser.parse(source.encode("latin-1")).root_node
        if root.has_error:
            raise self.unreadable(_error_at(root))
        self._functions: dict[str, object] = {}
        self._assigned: dict[str, list[Assignment]] = {}
        self._commands: list = []
        self._branches: list[Span] = []
        self.comments: list[Span] = []
        self._collect(root, frozenset(), None)
        for one in self._assigned.get("IFS", []):
            raise TSPError(f"line {self.line(one.span[0])}: IFS is set, so words are not followed")
        functions = [(node.start_byte, node.end_byte) for node in self._functions.values()]
        self._expansion = Expansion(source, self._assigned, self._branches, functions)

    def line(self, offset: int) -> int:
        """The number of the line that an offset is in."""
        return self.source.count("\n", 0, offset) + 1

    def unreadable(self, offset: int) -> TSPError:
        """The error for what the parser does not read as bash would."""
        return TSPError(f"line {self.line(offset)}: this is not read as bash")

    def check_insertion(self, offset: int) -> None:
        """Refuse a place in an array whose elements are also picked by their number."""
        for name, records in self._assigned.items():
            inside = any(one.span[0] <= offset < one.span[1] for one in records)
            pick = re.search(rf"\$\{{{name}\[([@*]\]:|(?![@*]\]))", self.source)
            if inside and pick:
                line = self.line(pick.start())
                raise TSPError(f"line {line}: elements of {name} are picked by their number here")

    def commands(self) -> Iterator[Command]:
        """Every simple command, also those in functions (once for each call) and in `bash -c`."""
        for node, function in self._commands:
            calls: list[tuple[Word, ...]] = []
            if function is not None and not self._shifts(function):
                calls = list(self._calls(function))
            for positional in calls or [()]:
                command = self._command(node, positional)
                if command.words and command.name in self._functions:
                    continue  # its words are seen where the function uses them
                yield command
                yield from _nested(command)

    # -----------------------------------------------------------------------------------------

    def _text(self, node) -> str:
        return self.source[node.start_byte : node.end_byte]

    def _collect(self, node, conditions: frozenset[int], function: str | None) -> None:
        kind, span = node.type, (node.start_byte, node.end_byte)
        others = [c for c in node.children if c.type in ("elif_clause", "else_clause")]
        if kind == "comment":
            self.comments.append(span)
        elif kind == "function_definition":
            function = self._text(node.child_by_field_name("name"))
            self._functions[function] = node
        elif kind in _BRANCHES:
            conditions = conditions | {span[0]}
            self._branches.append(span)
        elif kind == "if_statement":
            self._branches.append((span[0], others[0].start_byte if others else span[1]))
        elif kind == "command":
            self._commands.append((node, function))
        elif kind == "variable_assignment" and node.parent.type != "command":
            self._assign(node, conditions, function is not None)
        for child in node.children:
            then = kind == "if_statement" and child not in others
            self._collect(child, conditions | {span[0]} if then else conditions, function)

    def _assign(self, node, conditions: frozenset[int], in_function: bool) -> None:
        name = node.child_by_field_name("name")
        if name.type != "variable_name":  # an element of an array
            return
        one = Assignment(
            value=node.child_by_field_name("value"),
            appends=self.source.startswith("+=", name.end_byte),
            span=(node.start_byte, node.end_byte),
            conditions=conditions,
            in_function=in_function,
        )
        self._assigned.setdefault(self._text(name), []).append(one)

    def _calls(self, function: str) -> Iterator[tuple[Word, ...]]:
        """The arguments of each call of a function, outside of functions."""
        for node, caller in self._commands:
            name = node.child_by_field_name("name")
            if name is not None and self._text(name) == function and caller is None:
                yield self._command(node, ()).words[1:]

    def _shifts(self, function: str) -> bool:
        """Whether a function changes its arguments, so that `$@` is not what it was called with."""
        return re.search(r"\b(shift|set)\b", self._text(self._functions[function])) is not None

    def _command(self, node, positional: Sequence[Word]) -> Command:
        name = node.child_by_field_name("name")
        parts = [name.children[0]] if name is not None else []
        parts += node.children_by_field_name("argument")
        words = self._expansion.words(parts, positional)
        span = node.start_byte, node.end_byte
        prints = name is not None and self._text(name) in _PRINTING
        prints = prints and not any(word.text == "-v" for word in words)  # into a variable
        shown = prints and self._to_the_user(node)
        return Command(tuple(words), span, shown)

    def _to_the_user(self, node) -> bool:
        """Whether the output of a command goes to no file, variable or other command but tee."""
        while (parent := node.parent) is not None:
            if parent.type in ("command_substitution", "process_substitution"):
                return False
            if parent.type == "redirected_statement":
                targets = [self._text(child) for child in parent.children[1:]]
                if not all(re.fullmatch(r"[12]?>(&[12]| */dev/null)", text) for text in targets):
                    return False
            if parent.type == "pipeline":
                behind = parent.named_children[parent.named_children.index(node) + 1 :]
                if not all(re.match(r"tee\b", self._text(child)) for child in behind):
                    return False
            node = parent
        return True


def _nested(command: Command) -> Iterator[Command]:
    """The commands in a word for another shell."""
    texts = [word.text or "" for word in command.words]
    inner: list[Piece] = []
    if command.name == "eval":
        for word in command.words[1:]:
            inner += [*word.pieces, BLANK]
    shells = [i for i, text in enumerate(texts) if text.rsplit("/", 1)[-1] in _SHELLS]
    index = shells[0] + 1 if shells else len(texts)
    while index + 1 < len(texts) and re.fullmatch(r"-[a-z]+", texts[index]):
        index += 1
        if "c" in texts[index - 1]:
            inner += command.words[index].pieces
            break
    for words in commands_of(inner):
        yield Command(tuple(words), (words[0].site[0], words[-1].site[1]))


def _error_at(node) -> int:
    for child in node.children:
        if child.has_error or child.is_error or child.is_missing:
            return _error_at(child)
    return node.start_byte
