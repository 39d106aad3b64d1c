"""Which layouts there are, which of them run, and which are fastest."""

import sys
from collections.abc import Iterator
from dataclasses import replace

from megatron_tsp import zigzag
from megatron_tsp.errors import TSPError
from megatron_tsp.plan import memory
from megatron_tsp.plan.hardware import Hardware
from megatron_tsp.plan.layout import Layout
from megatron_tsp.plan.model import Model
from megatron_tsp.plan.prediction import Prediction, predict

#: The largest tensor-parallel, TSP or context-parallel size that is tried.
LARGEST = 64
MICRO_BATCHES = (1, 2, 4, 8)
#: (attention, MLP and vocabulary): the default, and one schedule for all.
SCHEDULES = (("broadcast", "ring"), *((name, name) for name in ("broadcast", "ring", "gather")))
PROGRESS_AFTER = 2.0


def check(model: Model, layout: Layout) -> str | None:
    """Why a layout does not run, or None: the rules of `megatron_tsp.arguments` and Megatron."""
    degree, heads, groups = layout.degree, model.heads, model.kv_heads
    sizes = {"heads": heads, "ffn": model.ffn}
    for name, size in sizes.items():
        if size % degree:
            return f"{name} {size} is not divisible by {degree}"
    if groups % degree and degree % groups:
        return f"{groups} KV heads neither divide {degree} nor are a multiple of it"
    if (model.q_width + 2 * model.kv_width) % degree:
        return f"the rows of QKV are not divisible by {degree}"
    if model.layers % (layout.pipeline * layout.virtual):
        return f"{model.layers} layers are not divisible by {layout.pipeline} stages"
    if model.global_batch % (layout.data * layout.micro_batch):
        return (
            f"a global batch of {model.global_batch} is not divisible by {layout.data} replicas of "
            f"{layout.micro_batch}"
        )
    try:
        zigzag.chunk_length(model.sequence, layout.token_ranks)
    except TSPError as error:
        return str(error)
    if model.sequence % (degree * layout.context):
        return f"sequence {model.sequence} is not divisible by {degree * layout.context}"
    if layout.exchange == "alltoall" and layout.token_ranks > 1:
        ranks = layout.degree * layout.context
        if heads % ranks:
            return f"heads are not divisible by {ranks} ranks"
    if layout.virtual > 1 and layout.micro_batches(model.global_batch) % layout.pipeline:
        return "interleaving needs micro-batches in multiples of the stages"
    return None


def layouts(model: Model, ranks: int, base: Layout, folds: bool, beside: bool) -> Iterator[Layout]:
    """Every layout of so many ranks that is tried.

    Args:
        base: the user's: its optimizer and overlaps are kept.
        folds: TSP carries the model.
        beside: TSP runs beside context parallelism.
    """
    base = replace(base, virtual=1, modules=(), recompute_layers=1, recompute="none")
    for degree in _divisors(ranks, LARGEST):
        for context in _divisors(ranks // degree, LARGEST):
            for pipeline in _divisors(ranks // degree // context, model.layers):
                data = ranks // degree // context // pipeline
                grid = replace(
                    base, degree=degree, context=context, pipeline=pipeline, data=data,
                    vocab_schedule="ring", exchange="allgather", save_activations=False,
                )  # fmt: skip
                for micro_batch in MICRO_BATCHES:
                    sized = replace(grid, micro_batch=micro_batch)
                    candidates = _tensor_parallel(replace(sized, fold=False))
                    if folds and degree > 1 and (beside or context == 1):
                        candidates = [*candidates, *_folded(replace(sized, fold=True))]
                    for layout in candidates:
                        if check(model, layout) is None:
                            yield layout


def _tensor_parallel(layout: Layout) -> list[Layout]:
    exchanges = ("allgather", "alltoall", "ring") if layout.context > 1 else ("allgather",)
    return [
        replace(layout, exchange=exchange, recompute=recompute, modules=modules)
        for exchange in exchanges
        for recompute, modules in (
            ("none", ()), ("selective", ("mlp", "layernorm")), ("full", ()),
        )
    ]  # fmt: skip


def _folded(layout: Layout) -> list[Layout]:
    return [
        replace(
            layout, exchange=exchange, attention_schedule=attention, mlp_schedule=mlp,
            vocab_schedule=mlp, recompute=recompute, save_activations=saves,
        )
        for exchange in ("allgather", "alltoall")
        for attention, mlp in SCHEDULES
        for recompute, saves in (("none", False), ("none", True), ("full", False))
    ]  # fmt: skip


def _divisors(number: int, largest: int) -> list[int]:
    return [size for size in range(1, min(number, largest) + 1) if number % size == 0]


def search(
    model: Model, ranks: int, base: Layout, hardware: Hardware, folds: bool, beside: bool
) -> tuple[list[Prediction], int]:
    """(what fits, fastest first; how many layouts do not fit).

    Raises:
        TSPError: no layout of so many ranks runs, or none fits.
    """
    candidates = list(layouts(model, ranks, base, folds, beside))
    if not candidates:
        raise TSPError(_no_layout(model, ranks))
    fitting, tightest = [], None
    for layout in _progress(candidates):
        needs = memory.largest(model, layout).peak
        if needs <= hardware.usable_memory:
            fitting.append(predict(model, layout, hardware))
        elif tightest is None or needs < tightest[0]:
            tightest = needs, layout
    if not fitting:
        needs, layout = tightest
        raise TSPError(
            f"no layout of {ranks} ranks fits: the leanest, {layout.grid} ({layout.options}), "
            f"needs {needs / 2**30:.1f} GiB of {hardware.usable_memory / 2**30:.1f}; take more "
            "ranks, a shorter sequence, or --use-distributed-optimizer"
        )
    fitting.sort(key=lambda p: p.step)
    return fitting, len(candidates) - len(fitting)


def _no_layout(model: Model, ranks: int) -> str:
    largest = max(
        (d * c * p)
        for d in _divisors(ranks, LARGEST)
        for c in _divisors(ranks // d, LARGEST)
        for p in _divisors(ranks // d // c, model.layers)
        if model.layers % p == 0 and model.heads % d == 0
    )
    fewest = ranks // largest
    if model.global_batch % fewest:
        return (
            f"no layout of {ranks} ranks: a global batch of {model.global_batch} sequences does "
            f"not feed them, the fewest replicas are {fewest}; give --global-batch-tokens"
        )
    return (
        f"no layout of {ranks} ranks: the layers, heads, sequence and global batch have no common "
        "divisors with it; try a power of two"
    )


def _progress(items: list) -> Iterator:
    """The items, with a bar once it has taken long."""
    from tqdm import tqdm

    hidden = not sys.stderr.isatty()
    bar = tqdm(
        items, desc="layouts", unit="", delay=PROGRESS_AFTER, disable=hidden, leave=False
    )  # fmt: skip
    yield from bar
