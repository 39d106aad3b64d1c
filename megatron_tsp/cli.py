"""The ``megatron-tsp`` command. Heavy imports wait until a subcommand runs."""

import argparse
import shlex
import sys

from megatron_tsp import __version__
from megatron_tsp.errors import TSPError


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; return the exit code (2: the user's input; 130: Ctrl-C)."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args) or 0
    except TSPError as error:
        print(f"megatron-tsp: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("megatron-tsp: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-tsp",
        description="Folded tensor and sequence parallelism for Megatron-LM.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_data(commands)
    _add_ab(commands)
    _add_plan(commands)
    _add_trace(commands)
    _add_pretrain(commands)
    _add_flip(commands)
    return parser


def _add_config(parser, help: str, **how) -> None:
    """The configuration, which ab, plan and trace read alike."""
    parser.add_argument("config", metavar="CONFIG.yaml", help=help, **how)


def _add_arms(parser, help: str) -> None:
    """Names of arms, as a list."""
    parser.add_argument(
        "--arms", metavar="A,B", type=lambda words: words.split(",") if words else None, help=help
    )


# ---------------------------------------------------------------------------------------------
# megatron-tsp data
# ---------------------------------------------------------------------------------------------


def _add_data(commands) -> None:
    parser = commands.add_parser(
        "data",
        help="make a Megatron data set of real text",
        description="Write a Megatron indexed data set (.bin and .idx), tokenized by bytes.",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="where to write it")
    parser.add_argument(
        "--input",
        metavar="PATH",
        help="a .jsonl file, a text file or a folder; default: the sources of Python's standard "
        "library",
    )
    parser.add_argument(
        "--json-key", default="text", metavar="KEY", help="where a .jsonl line has its text"
    )
    parser.set_defaults(run=_run_data)


def _run_data(args) -> None:
    from megatron_tsp import data

    prefix = data.build(args.out, args.input, args.json_key)
    print(f"wrote {prefix}.bin and {prefix}.idx; train on it with these flags:")
    print(shlex.join(str(word) for pair in data.flags(prefix).items() for word in pair))


# ---------------------------------------------------------------------------------------------
# megatron-tsp ab
# ---------------------------------------------------------------------------------------------


def _add_ab(commands) -> None:
    parser = commands.add_parser(
        "ab",
        help="train the same model as TP+SP and as TSP, and compare",
        description="Run each arm as its own torchrun job from the same initial weights, data "
        "order and seed; write report.json, report.md and plots.",
    )
    _add_config(parser, "ENV_VARS and MODEL_ARGS, as YAML")
    _add_arms(
        parser,
        "which arms to run: tp_sp, tsp, tp1, sizes such as tp4_cp2 and tsp4_cp2, or those named in "
        "CONFIG (default: tp_sp,tsp)",
    )
    parser.add_argument(
        "--out", metavar="DIR", help="where the report goes (default: below ab-out)"
    )
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument(
        "--prepare",
        action="store_const",
        const="prepare",
        dest="step",
        help="only check everything, make the data set and write DIR/jobs, with a line `RANKS JOB` "
        "for each job to start: for launchers such as Slurm",
    )
    steps.add_argument(
        "--rank-of", metavar="JOB", dest="job", help="be one rank of JOB, as RANK and its kin say"
    )
    steps.add_argument(
        "--report-only",
        action="store_const",
        const="report",
        dest="step",
        help="only write the report of the jobs that ran",
    )
    parser.set_defaults(run=_run_ab)


def _run_ab(args) -> int:
    from megatron_tsp import ab

    return ab.main(args.config, args.arms, args.out, "rank" if args.job else args.step, args.job)


# ---------------------------------------------------------------------------------------------
# megatron-tsp plan
# ---------------------------------------------------------------------------------------------


def _add_plan(commands) -> None:
    parser = commands.add_parser(
        "plan",
        help="which layout fits a machine, and which is fastest",
        description="Predict memory and tokens/s of every layout that runs, rank those that fit, "
        "and say why.",
    )
    _add_config(parser, "MODEL_ARGS, as for `megatron-tsp ab`", nargs="?")
    add = parser.add_argument
    add("--hardware", required=True, metavar="NAME|FILE.yaml", help="a machine's profile")
    add("--gpus", type=int, metavar="N", help="devices of the job (default: one node)")
    add("--seq-len", type=int, metavar="S", help="another sequence length, the same tokens a step")
    add("--global-batch-tokens", type=int, metavar="T", help="tokens of a step")
    add("--price", type=float, metavar="USD", help="of a device-hour, for tokens a dollar")
    add("--json", metavar="FILE", help="write all predictions there")
    add("--plot", metavar="FILE.png", help="write memory, tokens/s and the regions there")
    add(
        "--calibrate",
        metavar="FILE.yaml",
        help="measure this machine on --gpus ranks and write its profile; what is not measured "
        "comes from --hardware",
    )
    parser.set_defaults(run=_run_plan)


def _run_plan(args) -> None:
    from megatron_tsp import plan

    if args.calibrate:
        plan.calibrate_to(args.calibrate, args.hardware, args.gpus)
        if not args.config:
            return
        args.hardware = args.calibrate
    if not args.config:
        raise TSPError("megatron-tsp plan needs CONFIG.yaml, or --calibrate FILE.yaml")
    plan.main(
        args.config, args.hardware, args.gpus, args.seq_len, args.global_batch_tokens, args.price,
        args.json, args.plot,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------
# megatron-tsp trace
# ---------------------------------------------------------------------------------------------


def _add_trace(commands) -> None:
    parser = commands.add_parser(
        "trace",
        help="what a rank needs in a training step, without the ranks and without a GPU",
        description="Run a training step of each arm on tensors without contents, as one rank of a "
        "job that is not there: peak memory, bytes sent, operations.",
    )
    _add_config(parser, "as for `megatron-tsp ab`")
    _add_arms(parser, "which arms: those of `ab`, built in or named in CONFIG (default: tp_sp,tsp)")
    parser.add_argument(
        "--rank",
        type=int,
        nargs="+",
        default=[0],
        metavar="N",
        help="which ranks of the job (default: 0)",
    )
    parser.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="ranks of the job; more than the arm's own are data-parallel (default: the arm's own)",
    )
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="flags over those of CONFIG, for all arms: seq-length=131072",
    )
    parser.add_argument("--json", metavar="FILE", help="write everything there is to know")
    parser.add_argument("--timeline", metavar="FILE.png", help="draw live bytes over the step")
    parser.add_argument(
        "--max-context",
        type=float,
        metavar="GIB",
        help="find the longest sequence that fits in a device of this size instead",
    )
    parser.add_argument(
        "--reserve",
        type=float,
        metavar="GIB",
        help="of the device, for what a trace does not see (default: 4)",
    )
    parser.set_defaults(run=_run_trace)


def _run_trace(args) -> int:
    from megatron_tsp.trace import command, limits

    if args.max_context is None:
        if args.reserve is not None:
            raise TSPError("--reserve needs --max-context")
        return command.run(
            args.config, args.arms, args.rank, args.world_size, args.set, args.json, args.timeline
        )
    if len(args.rank) > 1 or args.timeline:
        raise TSPError("--max-context takes one --rank and no --timeline")
    reserve = limits.RESERVE if args.reserve is None else args.reserve
    return command.run_max_context(
        args.config, args.arms, args.rank[0], args.world_size, args.set, args.max_context, reserve,
        args.json,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------
# megatron-tsp pretrain
# ---------------------------------------------------------------------------------------------


def _add_pretrain(commands) -> None:
    parser = commands.add_parser(
        "pretrain",
        help="torchrun -m megatron_tsp.pretrain_gpt",
        description="Start Megatron's GPT pretraining with this plugin on this machine. What "
        "follows -- goes to it unchanged.",
    )
    parser.add_argument("--nproc-per-node", type=int, default=1, metavar="N", help="ranks to start")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="Megatron's flags")
    parser.set_defaults(run=_run_pretrain)


def _run_pretrain(args) -> None:
    import os

    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", "--nproc-per-node", str(args.nproc_per_node)]
    command += ["-m", "megatron_tsp.pretrain_gpt", *args.flags]
    os.execv(sys.executable, command)


# ---------------------------------------------------------------------------------------------
# megatron-tsp flip
# ---------------------------------------------------------------------------------------------


def _add_flip(commands) -> None:
    parser = commands.add_parser(
        "flip",
        help="turn a TP+SP launch into a TSP launch, or back",
        description="Write the flipped launch to stdout, and what changed and why to stderr. Only "
        "the flags that have to change do; all else stays byte for byte.",
    )
    parser.add_argument(
        "input",
        metavar="INPUT",
        help="a bash script, YAML with MODEL_ARGS, a command line in quotes, or - for stdin",
    )
    parser.add_argument(
        "--tsp-size", type=int, metavar="D", help="default: the tensor-parallel size of INPUT"
    )
    parser.add_argument("--reverse", action="store_true", help="from TSP to TP+SP")
    parser.add_argument("--check", action="store_true", help="only report")
    parser.add_argument(
        "--keep-entry",
        action="store_true",
        help="leave the way the training script is started as it is, for a patched Megatron-LM",
    )
    parser.set_defaults(run=_run_flip)


def _run_flip(args) -> None:
    from megatron_tsp import flip

    flip.main(args.input, args.tsp_size, args.reverse, args.check, args.keep_entry)


if __name__ == "__main__":
    sys.exit(main())
