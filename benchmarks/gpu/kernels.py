"""Every attention kernel that this GPU has: against fp64, and how fast it is.

    python -m benchmarks.gpu.kernels [--json FILE]

Needs one GPU, NVIDIA's or AMD's, and some 16 GiB of host memory for the references. The checks are
those that tests/test_kernels.py makes on the CPU, of longer sequences as well: whole calls, parts
that are merged, windows, documents (in one call, where the kernel has one) and sinks; and whether
dropout's masks are the same forward and backward. A line each; exit code 1 if an error is larger
than its bar, 2 without a GPU. A kernel that is not installed, or not for this GPU, is left out and
named.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from kernels_common import MASKS, SHAPES, dropout_error, errors, masked_errors  # noqa: E402

from megatron_tsp.errors import TSPError  # noqa: E402
from megatron_tsp.layers import flash, kernels, varlen  # noqa: E402
from megatron_tsp.layers.mask import Mask, Span  # noqa: E402

DEVICE = "cuda"
ASKED = (("auto", None), ("fused", None), ("flash", 2), ("flash", 3))
BARS = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
#: Queries, keys, query heads to a KV head: more than a block of any kernel, and no multiple of one.
LONGER = [(1000, 1000, 4), (1024, 1024, 1), (520, 1300, 3)]
#: Factors on the lengths of masks and sequences, 64 tokens: the second makes thousands.
TIMES = (1, 31)
#: Tokens, query heads, KV heads, channels of the timings; tokens of a document.
TIMED, DOCUMENT = (32768, 16, 4, 128), 1024


def main() -> int:
    """Check and time all; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="all numbers, as JSON")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("kernels: torch sees no GPU", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    rows = [row for kernel in _kernels() for row in (*_checks(kernel), *_timings(kernel))]
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    failed = [row for row in rows if row.get("good") is False]
    print(f"{len(failed)} of {sum('good' in row for row in rows)} checks failed")
    return int(bool(failed))


def _kernels() -> list[type]:
    """Those that are here, each once."""
    found = [] if torch.version.hip else [kernels.Cudnn]
    for backend, version in ASKED:
        try:
            found.append(kernels.choose(backend, version, gpu=True))
        except TSPError as error:
            print(f"left out: {error}")
    return list(dict.fromkeys([*found, kernels.Tiled]))


def _checks(kernel: type) -> Iterator[dict]:
    """A row for each check of one kernel."""
    yes_no = (False, True)
    for dtype, causal, logits, whole in product(BARS, yes_no, (1.0, 100.0), yes_no):
        shapes = [shape for shape in (*SHAPES, *LONGER) if shape[0] == shape[1] or not causal]
        for shape in shapes:
            what = f"{'causal' if causal else 'full'} {shape} x{logits:g} whole={whole}"
            call = (kernel, shape, causal, dtype, DEVICE, logits, whole)
            yield _checked(kernel, dtype, what, lambda call=call: errors(*call))
    for dtype, (name, mask), sinks, times in product(BARS, MASKS.items(), yes_no, TIMES):
        longer = Mask(
            mask.window and mask.window * times,
            mask.documents and tuple(tuple(at * times for at in ends) for ends in mask.documents),
        )
        call = (kernel, longer, sinks, dtype, DEVICE, 64 * times)
        what = f"{name} x{times}{' sinks' if sinks else ''}"
        yield _checked(kernel, dtype, what, lambda call=call: masked_errors(*call))
    for dtype, (name, mask) in product(BARS, MASKS.items() if kernel.has_dropout else ()):
        call = (kernel, mask, dtype, DEVICE)
        what = f"{name} dropout"
        yield _checked(kernel, dtype, what, lambda call=call: {"dv": dropout_error(*call)})


def _checked(kernel: type, dtype: torch.dtype, what: str, check: Callable) -> dict:
    """The row of a check, printed. A kernel that raises has failed, and the next check goes on."""
    row = {"kernel": kernel.__name__, "dtype": str(dtype).split(".")[1], "what": what}
    try:
        found = check()
    except (RuntimeError, ValueError, TypeError) as error:
        row |= {"good": False, "error": str(error).splitlines()[0]}
        print(f"{row['kernel']} {row['dtype']} {what}: FAILED: {row['error']}", flush=True)
        return row
    worst = max(found, key=lambda name: math.inf if math.isnan(found[name]) else found[name])
    good = found[worst] < BARS[dtype]  # NaN is not
    verdict = f"{worst} {found[worst]:.1e} {'ok' if good else 'FAILED'}"
    print(f"{row['kernel']} {row['dtype']} {what}: {verdict}", flush=True)
    return {**row, "errors": found, "good": good}


def _timings(kernel: type) -> Iterator[dict]:
    """A row for causal attention, for documents, and for documents with a call each; in bf16."""
    tokens, heads, groups, channels = TIMED
    if kernel is kernels.Tiled:
        tokens = 4096
    whole = Span(0, tokens)
    documents = Mask(documents=(tuple(range(0, tokens + 1, DOCUMENT)),))
    few = varlen._FEW
    for what, mask, at_most in (
        ("causal", Mask(), few), ("documents", documents, few),
        ("documents, a call each", documents, tokens),
    ):  # fmt: skip
        varlen._FEW = at_most
        varlen._packed.cache_clear()
        tiles = mask.tiles(whole, [whole])
        made = kernel(channels**-0.5)
        memory = dict(device=DEVICE, dtype=torch.bfloat16)
        q = torch.randn(tokens, groups, heads // groups, channels, **memory).permute(1, 2, 0, 3)
        k, v = torch.randn(2, tokens, groups, 1, channels, **memory).permute(0, 2, 3, 1, 4)
        try:
            out, lse = flash.attend(q, k, v, tiles, made)
            grads = [torch.zeros_like(t) for t in (q, k, v)]
            arguments = (q, q, k, v, out, lse, tiles, made, *grads)
            forward = _seconds(lambda a=(q, k, v, tiles, made): flash.attend(*a))
            backward = _seconds(lambda a=arguments: flash.attend_backward(*a))
        except (RuntimeError, ValueError, TypeError) as error:
            print(f"{kernel.__name__} {what}: not timed: {str(error).splitlines()[0]}", flush=True)
            continue
        finally:
            varlen._FEW = few
        work = 4 * sum(tile.pairs() for tile in tiles) * heads * channels
        rates = work / forward / 1e12, 2.5 * work / backward / 1e12
        print(
            f"{kernel.__name__} bfloat16 {what}, {tokens} tokens, {heads} heads ({groups} of K and "
            f"V) of {channels}: forward {forward * 1e3:.2f} ms, {rates[0]:.0f} TFLOP/s; backward "
            f"{backward * 1e3:.2f} ms, {rates[1]:.0f} TFLOP/s",
            flush=True,
        )
        yield {
            "kernel": kernel.__name__, "what": what, "tokens": tokens, "forward_s": forward,
            "backward_s": backward, "forward_tflops": rates[0], "backward_tflops": rates[1],
        }  # fmt: skip


def _seconds(call: Callable[[], object], times: int = 10) -> float:
    """The mean of some calls, after two that warm up."""
    for _ in range(2):
        call()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / times / 1e3


if __name__ == "__main__":
    sys.exit(main())
