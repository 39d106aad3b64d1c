"""Every attention kernel that this GPU has, against fp64: python -m benchmarks.gpu.kernels

One line a kernel and case, with its largest error; exit code 1 if one is larger than the bar. The
check is the one that tests/test_kernels.py makes on the CPU.
"""

import sys
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from kernels_common import SHAPES, errors  # noqa: E402

from megatron_tsp.errors import TSPError  # noqa: E402
from megatron_tsp.layers import kernels  # noqa: E402

ASKED = (("auto", None), ("fused", None), ("flash", 2), ("flash", 3))
BAR = {torch.float16: 1e-2, torch.bfloat16: 5e-2}


def main() -> int:
    """Check them all; the number of failures."""
    failures = 0
    for backend, version in ASKED:
        try:
            kernel = kernels.choose(backend, version, gpu=True)
        except TSPError as error:
            print(f"{backend} {version or ''}: left out: {error}")
            continue
        both = (False, True)
        for dtype, causal, logits, whole in product(BAR, both, (1.0, 100.0), both):
            for shape in SHAPES[: 2 if causal else 3]:
                found = errors(kernel, shape, causal, dtype, "cuda", logits, whole)
                good = max(found.values()) < BAR[dtype]
                failures += not good
                worst = max(found, key=found.get)
                case = f"{dtype} {'causal' if causal else 'full'} {shape} x{logits:g} whole={whole}"
                verdict = "ok" if good else "FAILED"
                print(f"{kernel.__name__} {case}: {worst} {found[worst]:.1e} {verdict}")
    return failures


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
