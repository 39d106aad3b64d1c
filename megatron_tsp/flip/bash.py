"""The flip of a bash script, or of a command line, which is a script of one command."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_tsp.errors import TSPError
from megatron_tsp.flip import settings
from megatron_tsp.flip.edits import RUN, SP, TP, TSP, Edits
from megatron_tsp.flip.script import Command, Script
from megatron_tsp.flip.words import Word

_LAUNCHERS = re.compile(r"python[0-9.]*|torchrun|torch\.distributed\.(run|launch)")
_SAME_GROUP = "the TSP group is the tensor-parallel group"


@dataclass
class _Training:
    """A command that trains.

    Attributes:
        words: all of it.
        entry: the word that names the training script; None where only flags are given.
        module: `-m` and `megatron_tsp.<entry>`, where it is started so.
        flags: the words behind the entry.
    """

    words: Sequence[Word]
    entry: Word | None
    module: tuple[Word, Word] | None
    flags: Sequence[Word]


def flip(source: str, size: int | None, keep_entry: bool) -> Edits:
    """From TP + SP to TSP.

    source: latin-1, as all offsets are bytes.
    size: the degree, where it shall not be the tensor-parallel size.
    keep_entry: leave the way the training script is started as it is.
    Raises:
        TSPError: for what is not understood, with its line, and for what TSP does not carry.
    """
    script, edits = Script(source), Edits(source)
    _refuse_present(script, TSP, f"{TSP} is there already")
    expected = []
    for training in _trainings(script, TP):
        words = []
        for index, word in enumerate(training.words):
            if word is training.entry and not keep_entry and training.module is None:
                _check_launcher(script, training)
                script.check_insertion(word.site[0])
                edits.put_before(word, f"-m {RUN} ", "TSP is switched in there")
                words += ["-m", RUN]
            words.append(word.shown)
            if word.is_flag(TP):
                edits.rename(word, TP, TSP, _SAME_GROUP)
                words[-1] = TSP + word.shown.removeprefix(TP)
                if size is not None:
                    edits.set_value(word, training.words[index + 1 :], size)
        expected.append(words)
        _tell(edits, training)
    _audit(script, edits, TP)
    flipped = _verified(edits, TSP, None if size is not None else expected)
    for training in flipped:
        for note in settings.check(training.flags):
            edits.note(note)
    return edits


def flip_back(source: str, keep_entry: bool) -> Edits:
    """From TSP to TP + SP; arguments and errors as `flip`."""
    script, edits = Script(source), Edits(source)
    _refuse_present(script, TP, f"{TP} is there beside {TSP}; drop one of them first")
    expected = []
    for training in _trainings(script, TSP):
        settings.check_tp(training.flags)
        has_sp = any(word.text == SP for word in training.flags)
        words, add_behind = [], None
        for index, word in enumerate(training.words):
            words.append(word.shown)
            if word.is_flag(TSP):
                edits.rename(word, TSP, TP, _SAME_GROUP)
                words[-1] = TP + word.shown.removeprefix(TSP)
                if not has_sp:
                    following = training.words[index + 1 : index + 2]
                    add_behind = word if "=" in word.start or not following else following[0]
            if word is add_behind:
                script.check_insertion(word.site[0])
                edits.put_after(word, f" {SP}", "TSP has the sequence parallelism in it")
                words.append(SP)
        if not keep_entry and _can_go(training):
            edits.remove(training.module[0], training.entry, "Megatron's own script will do")
            at = training.words.index(training.module[0])
            del words[at : at + 2]
        expected.append(words)
    _audit(script, edits, TSP)
    _verified(edits, TP, expected)
    edits.note(
        "TSP implies --no-create-attention-mask-in-dataloader and "
        "--dist-ckpt-optim-fully-reshardable; TP + SP has them if they are given"
    )
    return edits


# ---------------------------------------------------------------------------------------------


def _trainings(script: Script, flag: str) -> list[_Training]:
    """The commands that have `flag`."""
    trainings, unseen = [], {}
    for command in script.commands():
        if command.shown:
            continue
        if any(word.is_flag(flag) for word in command.words):
            trainings.append(_training(script, command))
        else:
            unseen |= {word.shown: None for word in command.words if word.many}
    if not trainings:
        where = f" (not in the script: {', '.join(unseen)})" if unseen else ""
        raise TSPError(f"no command here has {flag}{where}")
    return trainings


def _training(script: Script, command: Command) -> _Training:
    words = command.words
    for word in words:
        if word.broken is not None:
            raise script.unreadable(word.broken)
    if words[0].start.startswith("--") and len(list(script.commands())) == 1:
        return _Training(words, None, None, words)
    for index, (before, word) in enumerate(zip(words, words[1:], strict=False), 1):
        if before.text == "-m" and word.start.startswith("megatron_tsp."):
            entry = index + 1 if word.text == RUN else index
            return _Training(words, words[entry], (before, word), words[entry + 1 :])
        if word.shown.endswith(".py"):
            return _Training(words, word, None, words[index + 1 :])
    raise TSPError(
        f"line {script.line(command.span[0])}: no word of this command ends in .py, so the "
        "training script is not known; write it out"
    )


def _check_launcher(script: Script, training: _Training) -> None:
    names = [word.shown.rsplit("/", 1)[-1] for word in training.words]
    if not any(map(_LAUNCHERS.fullmatch, names[: training.words.index(training.entry)])):
        raise TSPError(
            f"line {script.line(training.entry.site[0])}: {training.entry.shown} is not started by "
            f"python or torchrun, as far as the script says, so there is no place for -m {RUN}; "
            "write the launcher out, or pass --keep-entry and place it yourself"
        )


def _module(training: _Training) -> str | None:
    return training.module[1].text if training.module is not None else None


def _can_go(training: _Training) -> bool:
    """Whether `-m megatron_tsp.run` is there and nothing needs it any more."""
    names = [word.start.split("=")[0] for word in training.flags]
    needed = any(name in settings.STANDALONE for name in names)
    return _module(training) == RUN and not needed


def _tell(edits: Edits, training: _Training) -> None:
    texts = {word.text for word in training.flags}
    if SP in texts:
        edits.note(f"{SP} stays: {TSP} implies it")
    else:
        edits.note(f"there is no {SP}: this was TP alone. {TSP} implies it, and --reverse adds it")
    if training.entry is None:
        edits.note(f"start it with -m {RUN} in front of the training script")
    elif "train" not in training.entry.shown.rsplit("/", 1)[-1]:
        edits.note(f"{training.entry.shown} is taken for a training script")
    if {"--load", "--use-distributed-optimizer"} <= texts and (
        "--dist-ckpt-optim-fully-reshardable" not in texts
    ):
        edits.note(
            "to resume a TP + SP run with its optimizer's state, that run has to save it with "
            "--dist-ckpt-optim-fully-reshardable"
        )


def _occurrences(script: Script, flag: str):
    """Offsets of a flag, but for comments and what is only shown."""
    unused = script.comments + [c.span for c in script.commands() if c.shown]
    for match in re.finditer(rf"(?<![\w-]){flag}(?![\w-])", script.source):
        if not any(start <= match.start() < end for start, end in unused):
            yield match.start()


def _refuse_present(script: Script, flag: str, message: str) -> None:
    for offset in _occurrences(script, flag):
        raise TSPError(f"line {script.line(offset)}: {message}")


def _audit(script: Script, edits: Edits, flag: str) -> None:
    """Refuse what would be missed: each occurrence is changed, a comment, or only shown."""
    for offset in _occurrences(script, flag):
        if offset not in edits.renamed:
            raise TSPError(
                f"line {script.line(offset)}: {flag} is not seen to reach a training command (it "
                "is in a here-document, an inner quotation, a test or unused); flip that part by "
                "itself"
            )


def _verified(edits: Edits, flag: str, expected) -> list[_Training]:
    """The training commands of the result, read again: their words are the expected ones."""
    result = _trainings(Script(edits.apply()), flag)
    if expected is not None and [[w.shown for w in t.words] for t in result] != expected:
        raise TSPError("the script uses its variables in a way that is not followed; nothing done")
    return result
