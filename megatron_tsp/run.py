"""Run a training script of Megatron-LM's, or of a fork, with TSP; the script stays as it is.

    torchrun --nproc-per-node 2 -m megatron_tsp.run /path/to/Megatron-LM/pretrain_gpt.py \\
        --tsp-size 2 <the script's flags>

Without --tsp-size it is the script, with --tsp-record and the like as additional flags.
"""

import os
import runpy
import sys


def main(argv=None) -> None:
    """Run the script; a user's error prints one message and exits with code 2.

    argv: the script and its flags; None takes them from `sys.argv`.
    """
    from megatron_tsp.errors import TSPError
    from megatron_tsp.training.main import exit_with

    try:
        run(*(sys.argv[1:] if argv is None else argv))
    except TSPError as error:
        exit_with(error)


def run(script: str = "", *flags: str) -> None:
    """Run `script` as `python script flags` would, hooked.

    Raises:
        TSPError: there is no such script, its Megatron is not known, it does not train in the way
            that is hooked, or TSP does not carry a setting.
    """
    from megatron_tsp.errors import TSPError
    from megatron_tsp.training import script as scripts

    if not os.path.isfile(script):
        raise TSPError(
            f"no script {script!r}; megatron_tsp.run is followed by the path of a training script, "
            "such as /path/to/Megatron-LM/pretrain_gpt.py"
        )
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))  # as python does
    hooks = scripts.prepare(script)
    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")
    if not hooks.started and any(flag.startswith("--tsp-") for flag in flags):
        raise TSPError(f"{script} ended without a call of Megatron's pretrain: TSP was not used")


if __name__ == "__main__":
    main()
