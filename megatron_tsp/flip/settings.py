"""Whether the settings of a command line are carried, by Megatron's parser and our checks."""

import argparse
import functools
import warnings
from collections.abc import Sequence

from megatron_tsp import arguments
from megatron_tsp.errors import TSPError
from megatron_tsp.flip.words import Word

#: Flags of ours that a run without --tsp-size takes as well.
STANDALONE = ("--tsp-log-traffic", "--tsp-record")


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise TSPError(f"Megatron's parser: {message}")


@functools.cache
def _parser() -> tuple[argparse.ArgumentParser, dict[str, str]]:
    """Megatron's parser with our flags, and the dest of each flag of Megatron's."""
    with warnings.catch_warnings(action="ignore"):  # of what is not installed here
        from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(_Parser(prog="", allow_abbrev=False, add_help=False))
    flags = {flag: a.dest for a in parser._actions for flag in a.option_strings}
    return arguments.add_arguments(parser), flags


def check(words: Sequence[Word]) -> list[str]:
    """Check a TSP command line as its run would.

    words: Megatron's flags, with --tsp-size. With flags under conditions of the script, each
    branch is also checked without.
    Returns what could not be checked, in words.
    Raises:
        TSPError: for a setting that TSP does not carry.
    """
    notes = _check(words)
    branches = {branch for word in words for branch in word.conditions}
    for branch in sorted(branches):
        _check([word for word in words if branch not in word.conditions])
    return notes


def check_tp(words: Sequence[Word]) -> None:
    """Check that a command line says nothing that only TSP has, apart from --tsp-size.

    Raises:
        TSPError: for a flag of TSP's.
    """
    for word in words:
        flag = word.start.split("=")[0]
        if flag.startswith("--tsp-") and flag not in ("--tsp-size", *STANDALONE):
            raise TSPError(f"{flag} has no counterpart in TP + SP: drop it")


def _check(words: Sequence[Word]) -> list[str]:
    known, unknown, unseen, unread = [], [], [], []
    parser, flags = _parser()
    for flag, values in _grouped(words, unseen):
        name = flag.start.split("=")[0]
        if name not in parser._option_string_actions:
            unknown.append(name)
        elif any(word.text is None for word in (flag, *values)):
            unread.append(" ".join(word.shown for word in (flag, *values)))
        else:
            known += [_utf8(word.text) for word in (flag, *values)]
    args, _ = parser.parse_known_args(known)
    if args.yaml_cfg is not None:
        raise TSPError("--yaml-cfg is not carried; give the same settings as flags")
    if args.tsp_size is None:
        args.tsp_size = 1  # it is a variable: what does not depend on it is checked
    # The number of ranks is not in these flags: take one that fits.
    args.rank, args.world_size = 0, max(args.tsp_size, 1)
    for size in ("pipeline_model", "context", "expert_model", "expert_tensor"):
        args.world_size *= getattr(args, f"{size}_parallel_size") or 1
    arguments.translate(args, known, flags)
    notes = []
    for what, items in (
        ("not checked, the value is not in the script", unread),
        ("not seen, it is not in the script", unseen),
        ("not flags of Megatron's, left as they are", unknown),
    ):
        if items:
            notes.append(f"{what}: {', '.join(dict.fromkeys(items))}")
    return notes


def _grouped(words: Sequence[Word], unseen: list[str]):
    """Each flag with the words behind it; holes that may be flags themselves go to `unseen`."""
    group: list[Word] = []
    for word in words:
        if word.start.startswith("--"):
            if group:
                yield group[0], group[1:]
            group = [word]
        elif not group or (word.many and not _wants_value(group)):
            unseen.append(word.shown)
        else:
            group.append(word)
    if group:
        yield group[0], group[1:]


def _wants_value(group: Sequence[Word]) -> bool:
    action = _parser()[0]._option_string_actions.get(group[0].text)
    return action is not None and action.nargs != 0 and len(group) == 1


def _utf8(text: str) -> str:
    return text.encode("latin-1").decode("utf-8", "replace")
