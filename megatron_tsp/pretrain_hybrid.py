"""Pretrain a hybrid model: Megatron-LM's pretrain_hybrid.py, with TSP.

    torchrun --nproc-per-node 2 -m megatron_tsp.pretrain_hybrid --tsp-size 2 \\
        --hybrid-layer-pattern '*-*-' <Megatron's flags>

Without --tsp-size it is Megatron's own model and schedule. Nothing heavy is imported at the top:
a checkpoint save may start a process that imports this file again.
"""

import time

_PROGRAM_START = time.time()


def main(argv=None) -> None:
    """Run the entry; a user's error prints one message and exits with code 2."""
    from megatron_tsp.errors import TSPError
    from megatron_tsp.training.main import exit_with, run

    try:
        run(argv, program_start=_PROGRAM_START, model="hybrid")
    except TSPError as error:
        exit_with(error)


if __name__ == "__main__":
    main()
