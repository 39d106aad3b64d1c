"""The flip of a YAML file with MODEL_ARGS, the form of Megatron's functional tests."""

import re

import yaml

from megatron_tsp.errors import TSPError
from megatron_tsp.flip import settings
from megatron_tsp.flip.edits import SP, TP, TSP, Edits
from megatron_tsp.flip.words import Piece, Word

_SAME_GROUP = "the TSP group is the tensor-parallel group"


def flip(source: str, size: int | None) -> Edits:
    """From TP + SP to TSP; `source` is latin-1. Errors as `bash.flip`."""
    edits = Edits(source)
    entries = _model_args(edits)
    _refuse_outside(edits, entries)
    if TSP in entries:
        raise TSPError(f"line {_line(entries[TSP][0])}: {TSP} is there already")
    if TP not in entries:
        raise TSPError(f"MODEL_ARGS has no {TP}")
    key, value = entries[TP]
    _rename(edits, key, TSP)
    if size is not None and value.value != str(size):
        edits.replace(*_span(value), str(size), "the size asked for")
        value = yaml.ScalarNode(value.tag, str(size))
    if SP in entries and entries[SP][1].value.lower() == "true":
        edits.note(f"{SP} stays: {TSP} implies it")
    else:
        edits.note(f"there is no {SP}: this was TP alone. {TSP} implies it, and --reverse adds it")
    words = _words({(TSP if flag == TP else flag): node for flag, (_, node) in entries.items()})
    for note in settings.check(words):
        edits.note(note)
    return edits


def flip_back(source: str) -> Edits:
    """From TSP to TP + SP; `source` is latin-1. Errors as `bash.flip_back`."""
    edits = Edits(source)
    entries = _model_args(edits)
    _refuse_outside(edits, entries)
    if TSP not in entries:
        raise TSPError(f"MODEL_ARGS has no {TSP}")
    if TP in entries:
        line = _line(entries[TP][0])
        raise TSPError(f"line {line}: {TP} is there beside {TSP}; drop one of them first")
    settings.check_tp(_words({flag: node for flag, (_, node) in entries.items()}))
    key, value = entries[TSP]
    _rename(edits, key, TP)
    why = "TSP has the sequence parallelism in it"
    if SP not in entries:
        start = key.start_mark.index
        indent = edits.source[edits.source.rfind("\n", 0, start) + 1 : start]
        between = f"\n{indent}" if not indent.strip() else ", "
        end = value.end_mark.index
        edits.replace(end, end, f"{between}{SP}: true", why)
    elif entries[SP][1].value.lower() != "true":
        edits.replace(*_span(entries[SP][1]), "true", why)
    return edits


def _model_args(edits: Edits) -> dict[str, tuple[yaml.Node, yaml.Node]]:
    """The keys and values of MODEL_ARGS, by flag."""
    try:
        for event in yaml.parse(edits.source, Loader=yaml.BaseLoader):
            if isinstance(event, yaml.AliasEvent):
                line = event.start_mark.line + 1
                raise TSPError(f"line {line}: YAML aliases (*{event.anchor}) are not followed")
        root = yaml.compose(edits.source, Loader=yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise TSPError(f"this is not YAML: {error}") from None
    top = root.value if isinstance(root, yaml.MappingNode) else []
    found = [value for key, value in top if key.value == "MODEL_ARGS"]
    if len(found) != 1 or not isinstance(found[0], yaml.MappingNode):
        raise TSPError("there is no mapping MODEL_ARGS")
    entries = {}
    for key, value in found[0].value:
        if key.value in entries:
            raise TSPError(f"line {_line(key)}: {key.value} is given twice")
        entries[key.value] = key, value
    return entries


def _refuse_outside(edits: Edits, entries) -> None:
    """Refuse a flag of ours that is neither a key of MODEL_ARGS nor in a comment."""
    keys = [_span(key) for key, _ in entries.values()]
    flags = re.compile(rf"(?<![\w-])({TP}|{TSP})(?![\w-])")
    for token in yaml.scan(edits.source, Loader=yaml.BaseLoader):
        start, end = token.start_mark.index, token.end_mark.index
        if isinstance(token, yaml.ScalarToken) and (start, end) not in keys:
            if match := flags.search(edits.source, start, end):
                line = edits.line(match.start())
                raise TSPError(f"line {line}: {match[1]} outside MODEL_ARGS: flip that by itself")


def _rename(edits: Edits, key: yaml.Node, new: str) -> None:
    start, end = _span(key)
    start = edits.source.index(key.value, start, end)
    edits.replace(start, start + len(key.value), new, _SAME_GROUP)


def _words(entries: dict[str, yaml.Node]) -> list[Word]:
    """The command line that MODEL_ARGS stands for."""
    words = []
    for flag, node in entries.items():
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        if not all(isinstance(item, yaml.ScalarNode) for item in items):
            raise TSPError(f"MODEL_ARGS: {flag}: expected one value or a list")
        values = [item.value for item in items]
        if isinstance(node, yaml.ScalarNode) and values[0].lower() in ("true", "false"):
            if values[0].lower() == "false":
                continue
            values = []
        words += [_word(text) for text in (flag, *values)]
    return words


def _word(text: str) -> Word:
    known = None if re.search(r"\$\{\w+\}", text) else text  # of the environment
    return Word((Piece(known, 0, (0, 0), text, quoted=True),), (0, 0))


def _span(node: yaml.Node) -> tuple[int, int]:
    return node.start_mark.index, node.end_mark.index


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1
