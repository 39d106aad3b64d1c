"""Which layouts there are, which of them run, and which are fastest."""

import sys
from collections.abc import Iterator

from megatron_tsp import zigzag
from megatron_tsp.errors import TSPError
from megatron_tsp.plan.hardware import Hardware
from megatron_tsp.plan.layout import Layout
from megatron_tsp.plan.memory import largest
from megatron_tsp.plan.model import Model
from megatron_tsp.plan.prediction import Prediction, predict

#: The largest tensor-parallel, TSP or context-parallel size that is tried.
LARGEST = 64
MICRO_BATCHES = (1, 2, 4, 8)
#: Virtual pipeline stages of a rank: of dense models; with experts, whose spread adds layouts.
MOST_VIRTUAL, MOST_VIRTUAL_WITH_EXPERTS = 8, 2
#: (attention, MLP and vocabulary): the default, and one schedule for all.
SCHEDULES = (("broadcast", "ring"), *((name, name) for name in ("broadcast", "ring", "gather")))
PROGRESS_AFTER = 2.0


def check(model: Model, layout: Layout) -> str | None:
    """Why a layout does not run, or None: the rules of `megatron_tsp.arguments` and Megatron."""
    return _check_group(model, layout) or _check_grid(model, layout)


def _check_group(model: Model, layout: Layout) -> str | None:
    degree, heads, groups = layout.degree, model.heads, model.kv_heads
    sizes = {"heads": heads}
    mixture = model.mixture
    if mixture is None or not all(mixture.layers):
        sizes["ffn"] = model.ffn
    if mixture is not None and mixture.shared:
        sizes["width of the shared experts"] = mixture.shared
    for name, size in sizes.items():
        if size % degree:
            return f"{name} {size} is not divisible by {degree}"
    if groups % degree and degree % groups:
        return f"{groups} KV heads neither divide {degree} nor are a multiple of it"
    if (model.q_width + 2 * model.kv_width) % degree:
        return f"the rows of QKV are not divisible by {degree}"
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
    return None


def _check_grid(model: Model, layout: Layout) -> str | None:
    if model.layers % (layout.pipeline * layout.virtual):
        return f"{model.layers} layers are not divisible by {layout.pipeline} stages"
    if model.global_batch % (layout.data * layout.micro_batch):
        return (
            f"a global batch of {model.global_batch} is not divisible by {layout.data} replicas of "
            f"{layout.micro_batch}"
        )
    if layout.virtual > 1 and layout.micro_batches(model.global_batch) % layout.pipeline:
        return "interleaving needs micro-batches in multiples of the stages"
    if layout.expert > 1:
        if model.mixture.count % layout.expert:
            return f"{model.mixture.count} experts are not divisible by {layout.expert}"
        ranks = layout.degree * layout.context * layout.data
        if ranks % layout.expert:
            return f"the {ranks} ranks of a stage are not divisible by {layout.expert} for experts"
    return None


def layouts(model: Model, ranks: int, base: Layout, folds: bool, beside: bool) -> Iterator[Layout]:
    """Every layout of so many ranks that is tried.

    Args:
        base: the user's: its optimizer and overlaps are kept.
        folds: TSP carries the model.
        beside: TSP runs beside context parallelism.
    """
    base = base.but(
        virtual=1, modules=(), recompute_layers=1, recompute="none", expert=1, save_kv=False,
        mlp_schedule="ring", vocab_schedule="ring", exchange="allgather", save_activations=False,
    )  # fmt: skip
    for degree in _divisors(ranks, LARGEST):
        for context in _divisors(ranks // degree, LARGEST):
            group = base.but(degree=degree, context=context)
            ways = _tensor_parallel(group.but(fold=False), model)
            if folds and degree > 1 and (beside or context == 1):
                ways += _folded(group.but(fold=True), model)
            grids = list(_around(model, ranks // degree // context))
            for micro_batch in MICRO_BATCHES:
                for way in ways:
                    sized = way.but(micro_batch=micro_batch)
                    if _check_group(model, sized.group_only) is not None:
                        continue
                    for stages, virtual, data in grids:
                        layout = sized.but(pipeline=stages, virtual=virtual, data=data)
                        if _check_grid(model, layout) is None:
                            yield from _spread(model, layout)


def _around(model: Model, ranks: int) -> Iterator[tuple[int, int, int]]:
    """(pipeline stages, virtual stages a rank, replicas) of so many groups."""
    for stages in _divisors(ranks, model.layers):
        if model.layers % stages:
            continue
        most = MOST_VIRTUAL_WITH_EXPERTS if model.mixture else MOST_VIRTUAL
        for virtual in _divisors(model.layers // stages, most) if stages > 1 else (1,):
            yield stages, virtual, ranks // stages


def _spread(model: Model, layout: Layout) -> Iterator[Layout]:
    """The layout with its experts over as many ranks as they can be."""
    if model.mixture is None:
        yield layout
        return
    stage = layout.degree * layout.context * layout.data
    for expert in _divisors(model.mixture.count, LARGEST):
        if stage % expert == 0:
            yield layout.but(expert=expert)


def _tensor_parallel(layout: Layout, model: Model) -> list[Layout]:
    exchanges = ("allgather", "alltoall", "ring") if layout.context > 1 else ("allgather",)
    lean = [("mlp", "layernorm")]
    if model.mixture:
        mixed = ("mlp",) if not all(model.mixture.layers) else ()
        lean = [(*mixed, "layernorm"), ("moe", *mixed, "layernorm")]
    modes = [("none", ()), *(("selective", modules) for modules in lean), ("full", ())]
    return [
        layout.but(exchange=exchange, recompute=recompute, modules=modules)
        for exchange in exchanges
        for recompute, modules in modes
    ]


def _folded(layout: Layout, model: Model) -> list[Layout]:
    modes, mixture = [{}, {"recompute": "full"}], model.mixture
    streams = mixture is None or mixture.shared or not all(mixture.layers)
    if streams:
        modes.append({"save_activations": True})
    if mixture:
        modes.append({"recompute": "selective", "modules": ("moe",)})
    kept = {"save_activations": bool(streams), "save_kv": True}
    return [
        layout.but(
            exchange=exchange, attention_schedule=attention,
            mlp_schedule=mlp if streams else layout.mlp_schedule, vocab_schedule=mlp, **mode,
        )
        for exchange in ("allgather", "alltoall")
        for attention, mlp in SCHEDULES
        for mode in (modes if exchange == "alltoall" else [*modes, kept])
    ]  # fmt: skip


def _divisors(number: int, largest: int) -> list[int]:
    return [size for size in range(1, min(number, largest) + 1) if number % size == 0]


def search(
    model: Model, ranks: int, base: Layout, hardware: Hardware, folds: bool, beside: bool
) -> tuple[list[Prediction], list[Prediction]]:
    """(what fits; what would run but does not fit), fastest first.

    Raises:
        TSPError: no layout of so many ranks runs, or none fits.
    """
    candidates = list(layouts(model, ranks, base, folds, beside))
    if not candidates:
        raise TSPError(_no_layout(model, ranks))
    fitting, too_large = [], []
    for layout in _progress(candidates):
        memory = largest(model, layout)
        fits = memory.peak <= hardware.usable_memory
        (fitting if fits else too_large).append(predict(model, layout, hardware, memory))
    if not fitting:
        leanest = min(too_large, key=lambda p: p.memory.peak)
        needs, layout = leanest.memory.peak, leanest.layout
        raise TSPError(
            f"no layout of {ranks} ranks fits: the leanest, {layout.grid} ({layout.options}), "
            f"needs {needs / 2**30:.1f} GiB of {hardware.usable_memory / 2**30:.1f}; take more "
            "ranks, a shorter sequence, or --use-distributed-optimizer"
        )
    fitting.sort(key=lambda p: p.step)
    too_large.sort(key=lambda p: p.step)
    return fitting, too_large


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
