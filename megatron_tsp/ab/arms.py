"""An arm of an A/B run, and its command line."""

import argparse
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
#: Every arm would write to the same place.
_DROPPED = ("--save", "--save-interval", "--tsp-record")
_PADDING = "--make-vocab-size-divisible-by"


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

    def shown(self) -> str:
        """The command that repeats this arm by hand, for the report."""
        env = [f"{key}={shlex.quote(value)}" for key, value in self.env.items()]
        run = ["torchrun", "--nproc-per-node", str(self.ranks), "-m", "megatron_tsp.pretrain_gpt"]
        return " ".join(env + [shlex.join([*run, *self.words()])])


def make(name: str, config: Config) -> Arm:
    """The arm called `name`: MODEL_ARGS, then what makes it this arm, then what ARMS adds.

    tp_sp: tensor parallel D with sequence parallel, Megatron's own model. tsp: ``--tsp-size D``.
    tp1: one rank, nothing parallel. All have the same attention core and norm, and the same padded
    vocabulary.

    Raises:
        TSPError: no arm has this name.
    """
    if name not in BUILT_IN and name not in config.arms:
        valid = [*BUILT_IN, *(arm for arm in config.arms if arm not in BUILT_IN)]
        raise TSPError(f"no arm {name!r}{nearest(name, valid)}")
    flags = {
        flag: value
        for flag, value in config.model_args.items()
        if flag not in _PARALLELISM and flag not in _DROPPED
    }
    ranks, degree = config.ranks, str(config.degree)
    if name == "tsp":
        flags["--tsp-size"] = degree
    elif name == "tp1":
        ranks = 1
        # Megatron pads the vocabulary to a multiple of this times the tensor parallel size.
        flags[_PADDING] = str(
            count(flags.get(_PADDING, "128"), f"MODEL_ARGS: {_PADDING}") * config.degree
        )
        for flag in [flag for flag in flags if "pipeline" in flag or flag.startswith("--context-")]:
            del flags[flag]
        flags["--tsp-baseline-core"] = True
    elif name == "tp_sp":
        flags["--tensor-model-parallel-size"] = degree
        flags["--sequence-parallel"] = True
        flags["--tsp-baseline-core"] = True
    own = dict(config.arms.get(name, {}))
    ranks = int(own.pop("NPROC_PER_NODE", ranks))
    return Arm(name, ranks, flags | own, {"OMP_NUM_THREADS": "1", **config.env})


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
        for part in word.split():
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
