"""An arm of an A/B run, and its command line."""

import argparse
import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

from megatron_tsp.ab.config import Config, Flags, count, nearest
from megatron_tsp.errors import TSPError

BUILT_IN = ("tp_sp", "tsp", "tp1")
DEFAULT = ("tp_sp", "tsp")

#: An arm decides these itself, whatever MODEL_ARGS says of them.
_PARALLELISM = ("--tensor-model-parallel-size", "--sequence-parallel", "--tsp-size")
_CONTEXT = "--context-parallel-size"
#: Every arm would write to the same place.
_DROPPED = ("--save", "--save-interval", "--tsp-record")
_PADDING = "--make-vocab-size-divisible-by"
#: Arms whose names say their sizes.
_SIZES = re.compile(
    r"(?=.)(?:(?P<kind>tp|tsp)(?P<weights>[1-9]\d*)(?:_(?!$)|$))?(?:cp(?P<context>[1-9]\d*))?"
)


@dataclass
class Arm:
    """One training job: its ranks, its flags in order, its environment."""

    name: str
    ranks: int
    flags: Flags
    env: dict[str, str] = field(default_factory=dict)

    def words(self) -> list[str]:
        """The flags as command line words."""
        words = []
        for flag, value in self.flags.items():
            if value is False:
                continue
            words.append(flag)
            if value is not True:
                words += value if isinstance(value, list) else [value]
        return words

    def command(self, record: Path, logs: Path) -> list[str]:
        """The torchrun command; each rank's record goes to `record`, its output below `logs`."""
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nproc-per-node", str(self.ranks)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),  # a free port
            *("--log-dir", str(logs), "--redirects", "3"),
            *("-m", "megatron_tsp.pretrain_gpt"),
            *self.words(),
            *("--tsp-record", str(record)),
        ]

    def shown(self, launcher: str = "torchrun --nproc-per-node {ranks}") -> str:
        """The command that repeats this arm by hand, for the report."""
        env = [f"{key}={shlex.quote(value)}" for key, value in self.env.items()]
        run = [*launcher.format(ranks=self.ranks).split(), "-m", "megatron_tsp.pretrain_gpt"]
        return " ".join(env + [shlex.join([*run, *self.words()])])


def make(name: str, config: Config) -> Arm:
    """The arm called `name`: MODEL_ARGS, then what makes it this arm, then what ARMS adds.

    tp_sp: tensor parallel D with sequence parallel, Megatron's own model. tsp: ``--tsp-size D``.
    tp1: one rank, nothing parallel. tp4_cp2, cp8, tsp4_cp2, tp2: these sizes of tensor parallelism
    (with sequence parallel) or TSP, and of context parallelism, on all ranks of the configuration.
    All have the same attention core and norm, and the same padded vocabulary.

    Raises:
        TSPError: no arm has this name, or its sizes do not divide the ranks.
    """
    sizes = {"tp_sp": ("tp", config.degree, 0), "tsp": ("tsp", config.degree, 0)}.get(name)
    sizes = sizes or _sizes(name)
    if sizes is None and name not in config.arms:
        valid = [*BUILT_IN, *(arm for arm in config.arms if arm not in BUILT_IN)]
        raise TSPError(
            f"no arm {name!r}{nearest(name, valid)}; sizes are named as in tp4_cp2, cp8, tsp4_cp2"
        )
    flags = {
        flag: value
        for flag, value in config.model_args.items()
        if flag not in _PARALLELISM and flag not in _DROPPED
    }
    own = dict(config.arms.get(name, {}))
    ranks = int(own.pop("NPROC_PER_NODE", 1 if name == "tp1" else config.ranks))
    if name == "tp1":
        flags = {flag: value for flag, value in flags.items() if "pipeline" not in flag}
    if sizes is not None:
        flags = _parallel(name, *sizes, ranks, flags, config.degree)
    flags |= own
    if flags.get("--tsp-size"):
        flags.pop("--cp-comm-type", None)  # how TP arms exchange K and V
    return Arm(name, ranks, flags, {"OMP_NUM_THREADS": "1", **config.env})


def _parallel(
    name: str, kind: str, weights: int, context: int, ranks: int, flags: Flags, degree: int
) -> Flags:
    """`flags` with parallelism of these sizes; context 0 leaves what they say of it."""
    if ranks % (weights * max(1, context)):
        raise TSPError(
            f"arm {name} needs a multiple of {weights * max(1, context)} ranks, not {ranks}"
        )
    flags = {**flags, **_padding(weights, flags, degree)}
    if context:
        flags.pop(_CONTEXT, None)
    if context > 1:
        flags[_CONTEXT] = str(context)
    if kind == "tsp":
        return {**flags, "--tsp-size": str(weights)}
    if weights > 1:
        flags |= {"--tensor-model-parallel-size": str(weights), "--sequence-parallel": True}
    return {**flags, "--tsp-baseline-core": True}


def _sizes(name: str) -> tuple[str, int, int] | None:
    """("tp" or "tsp", its size, the context-parallel size) that a name says; None if none."""
    found = _SIZES.fullmatch(name)
    if found is None:
        return None
    return found["kind"] or "tp", int(found["weights"] or 1), int(found["context"] or 1)


def _padding(size: int, flags: Flags, degree: int) -> Flags:
    """The vocabulary padded as at tensor parallel `degree`: Megatron pads it to a multiple of the
    flag times the size."""
    if size == degree:
        return {}
    unit = count(flags.get(_PADDING, "128"), f"MODEL_ARGS: {_PADDING}") * degree
    return {_PADDING: str(unit // size)} if unit % size == 0 else {}


def check_flags(arm: Arm) -> argparse.Namespace:
    """Parse an arm's flags with Megatron's own parser, before any process starts.

    Raises:
        TSPError: a flag that Megatron does not have (with the nearest one that it has), or a value
            of the wrong type.
    """
    from megatron.training.arguments import add_megatron_arguments

    from megatron_tsp.arguments import add_arguments

    parser = add_arguments(add_megatron_arguments(_Parser(allow_abbrev=False, add_help=False)))
    known = list(parser._option_string_actions)
    for flag in arm.flags:
        if flag not in known:
            raise TSPError(f"{arm.name}: Megatron has no flag {flag!r}{nearest(flag, known)}")
    try:
        return parser.parse_args(arm.words())
    except TSPError as error:
        raise TSPError(f"{arm.name}: {error}") from None


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise TSPError(message)


def check_data(arm: Arm) -> None:
    """Raise TSPError if a data set that ``--data-path`` names is not there."""
    value = arm.flags.get("--data-path", [])
    for word in [value] if isinstance(value, str) else value or []:
        whole = Path(word + ".idx").is_file()  # a path with spaces
        for part in [word] if whole else word.split():
            if _is_weight(part):
                continue
            for suffix in (".idx", ".bin"):
                if not Path(part + suffix).is_file():
                    raise TSPError(f"{arm.name}: --data-path {part}: no file {part}{suffix}")


def _is_weight(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
