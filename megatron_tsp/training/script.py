"""TSP in a training script of Megatron's that knows nothing of it: the script's own calls, hooked.

Such a script parses flags with `parse_and_validate_args`, makes the model's config of them and
calls `pretrain`. Each does what it did, and with --tsp-size what `training.main` does beside it.
"""

import re
import sys
from argparse import Namespace
from functools import wraps
from importlib import util
from pathlib import Path

from megatron_tsp import arguments, cpu
from megatron_tsp.errors import TSPError

#: Versions of Megatron whose `pretrain` is known here, as (major, minor).
KNOWN = ((0, 19),)

_installed = None  # the hooks of this process


def check_version(script: str) -> None:
    """Refuse a Megatron of a version that is not known; does not import it.

    The Megatron is what `script` would import: its folder is first on `sys.path`.

    Raises:
        TSPError: there is none, or its version is not in `KNOWN`.
    """
    spec = util.find_spec("megatron.core") if util.find_spec("megatron") else None
    if spec is None or not spec.origin:
        raise TSPError(f"{script}: no megatron.core beside it, on PYTHONPATH or installed")
    info = Path(spec.origin).with_name("package_info.py")
    text = info.read_text() if info.is_file() else ""
    parts = [re.search(rf"^{name} = (\d+)", text, re.MULTILINE) for name in ("MAJOR", "MINOR")]
    version = tuple(int(part[1]) for part in parts if part)
    if version not in KNOWN:
        known = ", ".join(".".join(map(str, one)) for one in KNOWN)
        shown = ".".join(map(str, version)) or "unknown"
        raise TSPError(
            f"{script} uses the Megatron in {info.parent}, version {shown}, and megatron-tsp hooks "
            f"into {known}; check out core_v{known}.0, or use the megatron-tsp of that version"
        )


def install(script: str) -> "Hooks":
    """Hook the calls of `script`, before it imports them; a user's error ends the process.

    This is what a patched Megatron-LM calls at the top of its training scripts.
    """
    from megatron_tsp.training.main import exit_with

    try:
        hooks = prepare(script)
    except TSPError as error:
        exit_with(error)
    hooks.exits = True
    return hooks


def prepare(script: str) -> "Hooks":
    """As `install`; a user's error raises `TSPError`, here and later."""
    global _installed
    if _installed is None:  # megatron_tsp.run and a patched script both ask for it
        from megatron_tsp import wheel

        check_version(script)
        hooks = Hooks(on_cpu=cpu.engage())
        wheel.fill_gaps()
        hooks.install()
        _installed = hooks
    return _installed


class Hooks:
    """TSP in the calls of a training script.

    Attributes:
        on_cpu: whether CPU mode is on; its flags are then the defaults.
        started: whether the script has called `pretrain`.
        exits: whether a user's error ends the process, with one message, or is raised.
    """

    def __init__(self, on_cpu: bool):
        self.on_cpu, self.started, self.exits = on_cpu, False, False
        self._flags: dict[str, str] = {}  # Megatron's, each with its dest

    def install(self) -> None:
        """Hook `megatron.training`; a script that is run afterwards calls the hooks."""
        import megatron.training
        from megatron.training import argument_utils, training
        from megatron.training import arguments as megatron_arguments

        from megatron_tsp.models import gpt, hybrid
        from megatron_tsp.training import script_batches

        gpt_config = _configure(gpt.model_config_from_args)
        hybrid_config = _configure(hybrid.model_config_from_args)
        self._hook(megatron_arguments, "parse_args", self._parse)
        self._hook(megatron_arguments, "validate_args", self._validate)
        self._hook(argument_utils, "gpt_config_from_args", gpt_config)
        self._hook(argument_utils, "hybrid_config_from_args", hybrid_config)
        self._hook(training, "pretrain", self._pretrain)
        script_batches.install(self._hook)
        megatron.training.pretrain = training.pretrain

    def _hook(self, owner, name: str, hook) -> None:
        """Call `hook(original, ...)` where `owner.name(...)` was called."""
        original = getattr(owner, name, None)
        if original is None:
            raise TSPError(f"this Megatron has no {owner.__name__}.{name}, which is hooked")

        @wraps(original)
        def hooked(*args, **keywords):
            try:
                return hook(original, *args, **keywords)
            except TSPError as error:
                if not self.exits:
                    raise
                from megatron_tsp.training.main import exit_with

                exit_with(error)

        setattr(owner, name, hooked)

    def _parse(self, parse_args, extra_args_provider=None, *rest, **keywords) -> Namespace:
        def add_flags(parser):
            self._flags.update((f, a.dest) for a in parser._actions for f in a.option_strings)
            parser = arguments.add_arguments(parser)
            if self.on_cpu:
                parser.set_defaults(**cpu.default_flags())
            return extra_args_provider(parser) if extra_args_provider else parser

        args = parse_args(add_flags, *rest, **keywords)
        if not hasattr(args, "tsp_size"):
            raise TSPError("--yaml-cfg is not carried; give the same settings as flags.")
        return args

    def _validate(self, validate_args, args: Namespace, *rest, **keywords):
        from megatron_tsp.training.gpt import NOT_CARRIED

        arguments.translate(args, sys.argv[1:], self._flags)
        ours = args.tsp_size is not None or args.tsp_baseline_core
        for dest, flag in NOT_CARRIED.items():
            if ours and getattr(args, dest, None):
                raise TSPError(f"{flag} is not carried with --tsp-size or --tsp-baseline-core")
        if self.on_cpu:
            cpu.check_flags(args)
        validated = validate_args(args, *rest, **keywords)
        arguments.check(args)
        return validated

    def _pretrain(self, pretrain, config, *rest, **keywords):
        from megatron.training import get_args

        from megatron_tsp.training import hooks, script_batches

        self.started = True
        args = get_args()
        builder = getattr(getattr(config, "model", None), "builder", None)
        if args.tsp_size is not None and not str(builder).startswith("megatron_tsp."):
            raise TSPError(
                f"{sys.argv[0]} makes its model with {builder or 'a model provider'}, not with "
                "gpt_config_from_args or hybrid_config_from_args, so --tsp-size would do nothing"
            )
        if script_batches.packs(args):
            script_batches.check_documents(self._hook)
        hooks.switch_on(args)
        return pretrain(config, *rest, **keywords)


def _configure(ours):
    """The hook of a function that makes the model's config: `ours(args)` where flags ask for it."""

    def configure(theirs, args: Namespace, *rest, **keywords):
        if args.tsp_size is None and not args.tsp_baseline_core:
            return theirs(args, *rest, **keywords)
        if rest or keywords:
            given = ", ".join([*(str(value) for value in rest), *keywords])
            raise TSPError(
                f"{sys.argv[0]} asks for a model config of its own ({given}), and TSP brings one"
            )
        return ours(args)

    return configure
