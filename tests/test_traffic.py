"""Every collective's count equals its formula, to the byte, on real gloo ranks."""

import multiprocessing
import tempfile
import traceback
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist

from megatron_tsp import traffic

FLOAT = 4


def run(ranks: int, case) -> list:
    """Run ``case(rank, ranks)`` on forked gloo ranks; return what each rank returned."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(target=_rank, args=(r, ranks, case, f"{folder}/store", queue))
            for r in range(ranks)
        ]
        for worker in workers:
            worker.start()
        results = dict(queue.get(timeout=60) for _ in workers)
        for worker in workers:
            worker.join(timeout=60)
    for rank, (ok, value) in sorted(results.items()):
        assert ok, f"rank {rank}:\n{value}"
    return [results[r][1] for r in range(ranks)]


def _rank(rank, ranks, case, store, queue):
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        queue.put((rank, (True, case(rank, ranks))))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        queue.put((rank, (False, traceback.format_exc())))


def counted(call) -> dict:
    """The exact bytes that `call` sends, by collective."""
    counter = traffic.install()
    counter.reset()
    call()
    result: dict = {}
    for (collective, _, _), size in counter.snapshot(exact=True).items():
        result[collective] = result.get(collective, 0) + size
    return result


def f(ranks):
    return Fraction(ranks - 1, ranks)


N = 10  # elements of a rank's own part


def collectives(rank, ranks):
    """(name, what is called, {collective: bytes expected}) for every torch function."""
    part = torch.ones(N)
    parts = [torch.ones(N) for _ in range(ranks)]
    whole = torch.ones(N * ranks)
    other, before = (rank + 1) % ranks, (rank - 1) % ranks
    all_bytes = FLOAT * N * ranks

    def p2p():
        requests = [dist.isend(part, other), dist.irecv(torch.empty(N), before)]
        for request in requests:
            request.wait()

    def batched():
        ops = [
            dist.P2POp(dist.isend, part, other),
            dist.P2POp(dist.irecv, torch.empty(N), before),
        ]
        for request in dist.batch_isend_irecv(ops):
            request.wait()

    def ordered():
        if rank == 0:
            dist.send(part, 1)
        elif rank == 1:
            dist.recv(torch.empty(N), 0)

    def coalesced_reduce():
        with dist._coalescing_manager(async_ops=True) as manager:
            dist.all_reduce(torch.ones(N))
            dist.all_reduce(torch.ones(2 * N))
        manager.wait()

    # Rank r sends r + j + 1 rows of 2 elements to rank j.
    to = [rank + j + 1 for j in range(ranks)]

    def uneven():
        dist.all_to_all_single(torch.empty(sum(to), 2), torch.ones(sum(to), 2), to, to)

    def even():
        dist.all_to_all_single(torch.empty(N * ranks), whole)

    def tensor_list():
        dist.all_to_all([torch.empty(N) for _ in parts], parts)

    root = 1
    is_root = rank == root
    yield (
        "all_reduce",
        lambda: dist.all_reduce(torch.ones(N)),
        {"all_reduce": 2 * FLOAT * N * f(ranks)},
    )
    yield (
        "all_reduce async",
        lambda: dist.all_reduce(torch.ones(N), async_op=True).wait(),
        {"all_reduce": 2 * FLOAT * N * f(ranks)},
    )
    yield "all_gather", lambda: dist.all_gather(parts, part), {"all_gather": all_bytes * f(ranks)}
    yield (
        "all_gather_into_tensor",
        lambda: dist.all_gather_into_tensor(whole, part),
        {"all_gather": all_bytes * f(ranks)},
    )
    yield (
        "reduce_scatter",
        lambda: dist.reduce_scatter(part, parts),
        {"reduce_scatter": all_bytes * f(ranks)},
    )
    yield (
        "reduce_scatter_tensor",
        lambda: dist.reduce_scatter_tensor(part, whole),
        {"reduce_scatter": all_bytes * f(ranks)},
    )
    yield "broadcast", lambda: dist.broadcast(part, root), {"broadcast": FLOAT * N * f(ranks)}
    yield "reduce", lambda: dist.reduce(torch.ones(N), root), {"reduce": FLOAT * N * f(ranks)}
    yield "isend, irecv", p2p, {"send": FLOAT * N}
    yield "batch_isend_irecv", batched, {"send": FLOAT * N}
    yield "send, recv", ordered, {"send": FLOAT * N} if rank == 0 else {}
    yield "coalescing manager", coalesced_reduce, {"all_reduce": 2 * FLOAT * 3 * N * f(ranks)}
    yield "all_to_all_single", even, {"all_to_all": all_bytes * f(ranks)}
    yield "all_to_all_single, uneven", uneven, {"all_to_all": 2 * FLOAT * (sum(to) - to[rank])}
    yield "all_to_all", tensor_list, {"all_to_all": all_bytes * f(ranks)}  # gloo: equal parts
    yield (
        "gather",
        lambda: dist.gather(part, parts if is_root else None, root),
        ({} if is_root else {"gather": FLOAT * N}),
    )
    yield (
        "scatter",
        lambda: dist.scatter(part, parts if is_root else None, root),
        ({"scatter": FLOAT * N * (ranks - 1)} if is_root else {}),
    )
    yield "barrier", dist.barrier, {}


def check_collectives(rank, ranks):
    wrong = []
    names = []
    for name, call, expected in collectives(rank, ranks):
        names.append(name)
        seen = counted(call)
        if seen != expected:
            wrong.append(f"{name}: counted {seen}, formula {expected}")
    return wrong, names


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_collective_counts_its_formula(ranks):
    for wrong, names in run(ranks, check_collectives):
        assert not wrong, "\n".join(wrong)
        assert len(names) == 18


def count_object_and_early_bound(rank, ranks):
    from megatron.core.tensor_parallel import mappings  # binds torch's functions when imported

    part, whole = torch.ones(N), torch.ones(N * ranks)
    gather = counted(lambda: mappings.dist_all_gather_func(whole, part))
    scatter = counted(lambda: mappings.dist_reduce_scatter_func(part, whole))
    objects = counted(lambda: dist.all_gather_object([None] * ranks, "x" * 100))
    return gather, scatter, objects


def test_early_bound_functions_and_object_collectives_pass_the_hook():
    import megatron.core.tensor_parallel.mappings  # noqa: F401  imported once, before the fork

    for gather, scatter, objects in run(2, count_object_and_early_bound):
        assert gather == {"all_gather": FLOAT * N}
        assert scatter == {"reduce_scatter": FLOAT * N}
        assert objects["all_gather"] > 100


def label_and_name(rank, ranks):
    counter = traffic.install()
    traffic.name_group(dist.group.WORLD, "tsp")

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            with traffic.block("attention"):
                dist.all_reduce(x.clone())
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            with traffic.block("mlp"):
                dist.all_reduce(grad.clone())
            return grad

    pair = dist.new_group([0, 1])
    counter.reset()
    with traffic.block("loss"):
        y = Sum.apply(torch.ones(N, requires_grad=True)).sum()
        y.backward()
        dist.all_reduce(torch.ones(N))
    dist.all_reduce(torch.ones(N), group=pair)
    snapshot, total = counter.snapshot(), counter.total()

    from megatron.core import parallel_state as mpu

    mpu._TENSOR_MODEL_PARALLEL_GROUP = pair  # known by its name from the next reset on
    counter.reset()
    dist.all_reduce(torch.ones(N), group=pair)
    return snapshot, total, list(counter.snapshot())


def test_labels_and_group_names():
    size = 2 * FLOAT * N // 2
    import megatron.core.parallel_state  # noqa: F401  once, before the fork

    for snapshot, total, later in run(2, label_and_name):
        assert snapshot == {
            ("all_reduce", "tsp", "attention"): size,
            ("all_reduce", "tsp", "mlp"): size,
            ("all_reduce", "tsp", "loss"): size,
            ("all_reduce", "group of 2", "other"): size,
        }
        assert total == 4 * size
        assert later == [("all_reduce", "tp", "other")]


def thirds(rank, ranks):
    counter = traffic.install()
    counter.reset()
    for _ in range(3):
        dist.broadcast(torch.ones(1, dtype=torch.uint8), 0)
    return counter.total(), counter.total(exact=True), list(counter.snapshot().values())


def test_fractions_of_a_byte_add_up_exactly():
    assert run(3, thirds) == [(2, 2, [2])] * 3


def test_every_data_moving_method_of_this_torch_is_hooked():
    """Fails when a new torch brings a ProcessGroup method that we neither count nor know."""
    assert traffic.unknown_methods() == []
    before = dict(vars(dist.ProcessGroup))
    traffic.install()
    try:
        replaced = {n for n, v in vars(dist.ProcessGroup).items() if before[n] is not v}
        assert replaced == {n for n in traffic.HOOKS if n in before}
        assert traffic.install() is traffic.install()
    finally:
        traffic.uninstall()
    assert all(vars(dist.ProcessGroup)[name] is value for name, value in before.items())


def test_an_unknown_method_is_reported(monkeypatch):
    monkeypatch.delitem(traffic.HOOKS, "reduce_scatter")
    assert traffic.unknown_methods() == ["reduce_scatter"]
    with pytest.warns(UserWarning, match="reduce_scatter"):
        traffic.install()
    traffic.uninstall()


def unhooked(rank, ranks):
    traffic.HOOKS.pop("allreduce")
    wrong, _ = check_collectives(rank, ranks)
    return wrong


@pytest.mark.filterwarnings("ignore:torch .* has ProcessGroup methods")
def test_a_missing_hook_would_be_seen():
    """The twin that must fail: without its hook, all_reduce counts nothing."""
    for wrong in run(2, unhooked):
        assert any(line.startswith("all_reduce: counted {}") for line in wrong)


class RankOneOfThree:
    """Rank 1 of a group of 3, for rules that gloo cannot reach."""

    def size(self):
        return 3

    def rank(self):
        return 1


def test_rules_of_the_other_call_forms():
    parts = [torch.ones(n) for n in (1, 5, 2)]

    def rule(method, *args, **kwargs):
        return traffic.HOOKS[method].rule(RankOneOfThree(), args, kwargs)

    assert rule("alltoall", parts, parts) == FLOAT * (1 + 2)
    assert rule("alltoall", output_tensors=parts, input_tensors=parts) == FLOAT * (1 + 2)
    assert rule("_allgather_base", output=torch.ones(6), input=torch.ones(2)) == FLOAT * 4
    assert rule("_reduce_scatter_base", torch.ones(2), inputTensor=torch.ones(6)) == FLOAT * 4
    assert rule("allgather_coalesced", [parts, parts], parts) == 2 * Fraction(FLOAT * 8 * 2, 3)
    assert rule("broadcast", torch.ones(3, dtype=torch.bfloat16), 0) == 4
    assert rule("gather", [], torch.ones(3), root=1) == 0
    assert rule("gather", [], torch.ones(3), 2) == FLOAT * 3
    assert rule("scatter", torch.ones(5), parts, root=1) == FLOAT * (1 + 2)
