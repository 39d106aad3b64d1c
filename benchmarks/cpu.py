"""TSP against TP+SP on this machine's cores: ``python -m benchmarks.cpu``.

Four ranks share the cores and talk through memory, so bytes are nearly free here: this measures
the work that each arm gives the processor.
"""

import argparse
import sys
from pathlib import Path

from benchmarks import sidebyside


def run(args: argparse.Namespace) -> None:
    """Run all shapes; write report.json and print the table."""
    folder = Path(args.out or "ab-out/benchmark-cpu")
    prepared = {shape: sidebyside.prepare(args, shape) for shape in args.shape}
    results = {}
    for shape, arms in prepared.items():
        results[shape] = sidebyside.measure(arms, args.rounds, args.iterations, folder / shape)
    sidebyside.write(folder, args, {"links": "none: one machine"}, results)


if __name__ == "__main__":
    sys.exit(sidebyside.main(run, sidebyside.parser(__doc__, rounds=3).parse_args()))
