"""From a command line to Megatron's `pretrain`: what every entry runs."""

import importlib
import os
import sys
import time
import warnings

from megatron_tsp import cpu
from megatron_tsp.errors import TSPError


def run(argv=None, program_start=None, model="gpt") -> None:
    """Pretrain a model as the command line says; returns when training has ended.

    argv: flags without the program's name; None takes them from `sys.argv`.
    model: a module of `megatron_tsp.models`: gpt or hybrid.
    program_start: `time.time()` at the entry's first line, for Megatron's report of start-up times.
    Raises `TSPError` for a flag or combination that cannot run, before any process group exists.
    """
    main_entry = time.time()
    if argv is not None:
        sys.argv = [sys.argv[0], *argv]  # Megatron's parser reads it there
    if int(os.environ.get("RANK", "0")) != 0:  # once is enough
        warnings.filterwarnings("ignore", category=UserWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
    on_cpu = cpu.engage()
    args = parse(on_cpu, model)

    from megatron.core.enums import ModelType
    from megatron.core.package_info import __version__ as megatron_version
    from megatron.core.utils import get_te_version, get_torch_version
    from megatron.training import pretrain, print_rank_0, set_startup_timestamps
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from megatron_tsp.training import gpt, hooks
    from megatron_tsp.wheel import fill_gaps

    fill_gaps()
    print_rank_0(f"> PyTorch version ................ {get_torch_version()}")
    print_rank_0(f"> Megatron-Core version .......... {megatron_version}")
    print_rank_0(f"> Transformer Engine version ..... {get_te_version()}")
    set_startup_timestamps(program_start=program_start or main_entry, main_entry=main_entry)

    models = importlib.import_module(f"megatron_tsp.models.{model}")
    config = pretrain_cfg_container_from_args(args, models.model_config_from_args(args))
    hooks.switch_on(args)
    pretrain(
        config,
        gpt.datasets,
        ModelType.encoder_or_decoder,
        gpt.forward_step,
        get_embedding_ranks=gpt.embedding_ranks if model == "gpt" else None,
    )


def parse(on_cpu, model="gpt"):
    """Parse and validate `sys.argv`, set Megatron's global variables, and return the arguments.

    on_cpu: whether CPU mode is on; its flags are then the defaults.
    model: as for `run`.
    Megatron's own `parse_and_validate_args`, with TSP's translation between its two halves.
    Raises `TSPError` for what cannot run.
    """
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.global_vars import set_global_variables

    from megatron_tsp import arguments
    from megatron_tsp.training import gpt

    flags = {}

    def add_flags(parser):
        flags.update((flag, a.dest) for a in parser._actions for flag in a.option_strings)
        parser = arguments.add_arguments(parser)
        if on_cpu:
            parser.set_defaults(**cpu.default_flags())
        return parser

    args = parse_args(add_flags)
    if args.yaml_cfg is not None:
        raise TSPError("--yaml-cfg is not carried; give the same settings as flags.")
    if args.use_checkpoint_args:
        _load_checkpoint_args(args)
    arguments.translate(args, sys.argv[1:], flags)  # first: what TSP refuses is refused everywhere
    if on_cpu:
        cpu.check_flags(args)
    gpt.check_args(args, model)
    validate_args(args, {"tokenizer_type": "GPT2BPETokenizer"})
    arguments.check(args)
    set_global_variables(args)
    return args


def _load_checkpoint_args(args) -> None:
    from megatron.training.checkpointing import load_args_from_checkpoint

    if args.load is None and args.pretrained_checkpoint is None:
        raise TSPError("--use-checkpoint-args needs --load or --pretrained-checkpoint.")
    if args.non_persistent_ckpt_type == "local":
        raise TSPError("--use-checkpoint-args does not work with --non-persistent-ckpt-type local.")
    load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
    load_args_from_checkpoint(args)  # --load wins


def exit_with(error: TSPError):
    """Print a user's error once, without a traceback, and exit with code 2 on every rank."""
    torch = sys.modules.get("torch")
    if int(os.environ.get("RANK", "0")) == 0 or (torch and torch.distributed.is_initialized()):
        print(f"megatron-tsp: error: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(5)  # a launcher ends all ranks with the first: let rank 0 speak
    sys.exit(2)
