"""Read and check the YAML of an A/B run.

The form is that of Megatron's functional tests: ``ENV_VARS`` and ``MODEL_ARGS``, with flags as
keys. ``--flag: true`` gives the flag alone, ``false`` leaves it out, a list gives several values,
and ``${NAME}`` stands for an environment variable. Values reach Megatron as they are written.
On top of that, all optional:

    NPROC_PER_NODE: 4           ranks of each arm (default 4)
    TSP_SIZE: 4                 D of the arms (default: --tensor-model-parallel-size of MODEL_ARGS
                                where above 1, else the ranks that pipeline stages and context
                                parallelism leave)
    DATA: {OUT: dir, INPUT: path, JSON_KEY: text}
                                text to make a data set of, if OUT does not hold it yet; its flags
                                join MODEL_ARGS. Without INPUT: Python's standard library
    INITIAL_WEIGHTS: seed       seed: every arm draws the same from --seed (CPU initialization);
                                checkpoint: the first arm's are saved, and every arm loads them
    ARMS:                       more arms, or other flags for a built-in one (tp_sp, tsp, tp1):
      name: {--flag: value}     flags on top of MODEL_ARGS; `NPROC_PER_NODE` among them. Names
                                such as tp4_cp2, cp8, tsp4_cp2 are built in
"""

import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from megatron_tsp.errors import TSPError

#: A flag's value: True (given alone), False (not given), one word, or several.
Value = bool | str | list[str]
Flags = dict[str, Value]

TOP_LEVEL = (
    "ENV_VARS",
    "MODEL_ARGS",
    "NPROC_PER_NODE",
    "TSP_SIZE",
    "DATA",
    "INITIAL_WEIGHTS",
    "ARMS",
)
#: Keys of Megatron's test harness that say nothing about the training.
IGNORED = ("TEST_TYPE", "TEST_EVALUATION", "METRICS", "MODE")
DATA_KEYS = ("OUT", "INPUT", "JSON_KEY")
INITIAL_WEIGHTS = ("seed", "checkpoint")


@dataclass
class Config:
    """A checked configuration. `degree` is D; `arms` holds the flags that differ, by name."""

    path: Path
    model_args: Flags
    env: dict[str, str] = field(default_factory=dict)
    ranks: int = 4
    degree: int = 4
    data: dict[str, str] | None = None
    initial_weights: str | None = None
    arms: dict[str, Flags] = field(default_factory=dict)


def read(path: str | os.PathLike) -> Config:
    """The configuration in a YAML file.

    Raises:
        TSPError: no such file, not YAML, an unknown key (with the nearest valid one), a value of
            the wrong type, an environment variable that is not set.
    """
    path = Path(path)
    top = _mapping(load(path, "configuration", _Loader), "the file")
    for key in top:
        if key not in IGNORED:
            _known(key, TOP_LEVEL, "")
    if not top.get("MODEL_ARGS"):
        raise TSPError(f"{path} has no MODEL_ARGS: nothing to train")
    config = Config(path, flags(top["MODEL_ARGS"], "MODEL_ARGS"))
    config.env = {
        key: _expand(_word(value, f"ENV_VARS: {key}"), f"ENV_VARS: {key}")
        for key, value in _mapping(top.get("ENV_VARS", {}), "ENV_VARS").items()
    }
    config.ranks = count(top.get("NPROC_PER_NODE", "4"), "NPROC_PER_NODE")
    config.degree = _degree(top, config)
    config.data = _data(top.get("DATA"))
    if "INITIAL_WEIGHTS" in top:
        config.initial_weights = _word(top["INITIAL_WEIGHTS"], "INITIAL_WEIGHTS")
        _known(config.initial_weights, INITIAL_WEIGHTS, "INITIAL_WEIGHTS: ")
    config.arms = {
        name: _arm(value, f"ARMS: {name}")
        for name, value in _mapping(top.get("ARMS", {}), "ARMS").items()
    }
    return config


def flags(value, where: str) -> Flags:
    """A mapping of flags, checked for form: keys start with ``--``, values are words or lists."""
    result: Flags = {}
    for key, item in _mapping(value, where).items():
        if not re.fullmatch(r"--?[A-Za-z][\w-]*", key):
            meant = "--" + key.lstrip("-").replace("_", "-")
            raise TSPError(f"{where}: {key!r} is not a flag; did you mean {meant!r}?")
        result[key] = _flag_value(item, f"{where}: {key}")
    return result


def count(value, where: str) -> int:
    """The whole number from 1 that a value is; TSPError where it is none."""
    word = _word(value, where)
    if not word.isdecimal() or int(word) < 1:
        raise TSPError(f"{where}: expected a whole number from 1, not {word!r}")
    return int(word)


def nearest(name: str, valid: Iterable[str]) -> str:
    """'; did you mean X?' for a name that is not valid, or the list where nothing is near."""
    valid = list(valid)
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; valid are {', '.join(valid)}" if len(valid) <= 12 else ""


# ---------------------------------------------------------------------------------------------


class OnlyOnce:
    """For a YAML loader: a key given twice is an error."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            word = str(key.value)
            if word in seen:
                line = key.start_mark.line + 1
                raise TSPError(f"{self.name}, line {line}: {word!r} is given twice")
            seen.add(word)
        return super().construct_mapping(node, deep)


class _Loader(OnlyOnce, yaml.BaseLoader):
    """All scalars stay the text they are written as."""


def load(path: Path, what: str, loader: type):
    """The content of a YAML file, by a loader class of PyYAML's. `what` it is, for the errors.

    Raises:
        TSPError: the file cannot be read, or is not YAML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TSPError(f"cannot read the {what} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TSPError(f"the {what} {path} is not UTF-8 text") from error
    made = loader(text)
    made.name = str(path)
    try:
        return made.get_single_data()
    except yaml.YAMLError as error:
        raise TSPError(f"the {what} is not YAML: {error}") from error
    finally:
        made.dispose()


def _known(key: str, valid: Iterable[str], where: str) -> None:
    if key not in valid:
        raise TSPError(f"{where}unknown key {key!r}{nearest(key, valid)}")


def _mapping(value, where: str) -> dict:
    if value is None or value == "":
        return {}
    if not isinstance(value, dict):
        raise TSPError(f"{where}: expected `key: value` lines, not {_kind(value)}")
    return value


def _word(value, where: str) -> str:
    if not isinstance(value, str):
        raise TSPError(f"{where}: expected one value, not {_kind(value)}")
    return value


def _kind(value) -> str:
    return {dict: "a mapping", list: "a list"}.get(type(value), f"{value!r}")


def _expand(word: str, where: str) -> str:
    def variable(match):
        name = match[1]
        if name not in os.environ:
            raise TSPError(f"{where}: the environment variable {name} is not set")
        return os.environ[name]

    return re.sub(r"\$\{(\w+)\}", variable, word)


def _flag_value(value, where: str) -> Value:
    if isinstance(value, list):
        return [_expand(_word(item, where), where) for item in value]
    word = _expand(_word(value, where), where)
    if word == "":
        raise TSPError(f"{where} has no value; for a flag without one write `true`")
    return {"true": True, "false": False}.get(word.lower(), word)


def _arm(value, where: str) -> Flags:
    items = dict(_mapping(value, where))
    ranks = items.pop("NPROC_PER_NODE", None)
    result = flags(items, where)
    if ranks is not None:
        result["NPROC_PER_NODE"] = str(count(ranks, f"{where}: NPROC_PER_NODE"))
    return result


def _degree(top: dict, config: Config) -> int:
    given = top.get("TSP_SIZE")
    if given is not None:
        degree, where = count(given, "TSP_SIZE"), "TSP_SIZE"
    else:
        where = "MODEL_ARGS: --tensor-model-parallel-size"
        degree = count(config.model_args.get("--tensor-model-parallel-size", "1"), where)
        if degree == 1:
            degree = config.ranks
            for flag in ("--pipeline-model-parallel-size", "--context-parallel-size"):
                where = f"MODEL_ARGS: {flag}"
                size = count(config.model_args.get(flag, "1"), where)
                if degree % size:
                    raise TSPError(f"{where} {size} does not divide NPROC_PER_NODE {config.ranks}")
                degree //= size
    if config.ranks % degree:
        raise TSPError(f"{where} {degree} does not divide NPROC_PER_NODE {config.ranks}")
    return degree


def _data(value) -> dict[str, str] | None:
    if value is None:
        return None
    data = {}
    for key, item in _mapping(value, "DATA").items():
        _known(key, DATA_KEYS, "DATA: ")
        data[key] = _expand(_word(item, f"DATA: {key}"), f"DATA: {key}")
    if not data.get("OUT"):
        raise TSPError("DATA: OUT is missing: the folder for the data set")
    return data
