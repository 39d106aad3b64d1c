"""What is launched before what is waited for: streams cannot be watched, their order can."""

import time

import pytest
import torch
import torch.distributed as dist
from layers_common import config, random, start
from megatron.core.process_groups_config import ProcessGroupCollection
from ranks import RankFailed, run

from megatron_tsp import streaming
from megatron_tsp.gradients import Gradients
from megatron_tsp.models.gpt import TSPGPTModelBuilder, TSPGPTModelConfig
from megatron_tsp.options import TSPOptions
from megatron_tsp.streaming import SCHEDULES, Ring, Slots, Stream, stream
from megatron_tsp.trace.memory import LiveBytes


class _Work:
    """An operation that notes when it is waited for."""

    def __init__(self, work, name, events):
        self.work, self.name, self.events = work, name, events

    def wait(self):
        self.events.append(("wait", self.name))
        self.work.wait()


def _watch(walk, events):
    """Note launches and waits of a stream's transfers, by kind and number."""
    counts = {"weights": 0, "dW": 0}

    def noted(original, kind):
        def call(*args):
            name = f"{kind} {counts[kind]}"
            counts[kind] += 1
            events.append(("launch", name))
            result = original(*args)
            works = result.works if hasattr(result, "works") else [result]
            works = [_Work(work, name, events) for work in works]
            return result._replace(works=works) if hasattr(result, "works") else works[0]

        return call

    if isinstance(walk, Ring):
        walk._hop = noted(walk._hop, "weights")
        hop_of_weights = walk._exchange

        def exchange(send, receive):
            if ("launch", f"weights {counts['weights'] - 1}") == events[-1]:  # inside _hop
                return hop_of_weights(send, receive)
            return noted(hop_of_weights, "dW")(send, receive)

        walk._exchange = exchange
    else:
        walk._send = noted(walk._send, "weights")
        walk._reduce = noted(walk._reduce, "dW")


def _events(schedule, direction, breaking):
    if breaking is not None:
        breaking()
    walk = SCHEDULES[schedule](dist.group.WORLD)
    shards = [random(3, 4, seed=dist.get_rank())]
    events = []
    _watch(walk, events)
    if direction == "forward":
        for step, _ in enumerate(walk.forward(shards)):
            events.append(("use", step))
    else:
        grads = Gradients(shards)
        for step, _ in enumerate(walk.backward(shards, grads)):
            events.append(("use", step))
            grads.add_product(0, random(2, 3), random(2, 4))
    return events


def _overlaps(events, transfer, use):
    """Whether the transfer is launched before the use, and waited for after it began."""
    launched = events.index(("launch", transfer))
    waited = events.index(("wait", transfer))
    used = events.index(("use", use))
    return launched < used < waited


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_ring_forward_sends_on_what_it_uses(degree):
    for events in run(_events, degree, "ring", "forward", None):
        assert all(_overlaps(events, f"weights {i}", i) for i in range(degree - 1)), events


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_ring_backward_keeps_weights_and_gradients_in_flight(degree):
    for events in run(_events, degree, "ring", "backward", None):
        assert all(_overlaps(events, f"weights {i}", i - 1) for i in range(1, degree - 1)), events
        # dW of a step travels until the next step has something to add to it
        assert all(_overlaps(events, f"dW {i}", i + 1) for i in range(degree - 1)), events


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("degree", [2, 3, 4])
def test_broadcast_keeps_the_next_shard_in_flight(degree, direction):
    for events in run(_events, degree, "broadcast", direction, None):
        assert all(_overlaps(events, f"weights {i + 1}", i) for i in range(degree - 1)), events
        if direction == "backward":
            for i in range(degree - 1):
                assert events.index(("launch", f"dW {i}")) < events.index(("use", i + 1))
                assert events.index(("wait", f"dW {i}")) > events.index(("use", i + 1))


def _synchronous():
    """A schedule that sends when it has nothing left to compute with."""

    def one_after_the_other(self, shards, then=streaming._nothing):
        held, slots = shards, Slots()
        for step in range(self.size):
            yield (self.rank - step) % self.size, held
            if step < self.size - 1:
                held = self._hop(held, slots).wait()

    Ring.forward = one_after_the_other


def test_twin_a_synchronous_schedule_is_seen():
    events = run(_events, 3, "ring", "forward", _synchronous)[0]
    assert not any(_overlaps(events, f"weights {i}", i) for i in range(2))


#: Bytes of the one shard of each rank below, a whole number of aligned pieces.
SHARD = 512


def _buffers(schedule, breaking):
    """In shards: most bytes alive in a walk forward and backward, and what is left of each."""
    if breaking is not None:
        breaking()
    walk = SCHEDULES[schedule](dist.group.WORLD)
    shard, dw, grads = torch.ones(8, 8).double(), torch.ones(8, 8).double(), None
    seen = []
    with LiveBytes() as live:
        before = live.current
        for _, held in walk.forward([shard]):  # noqa: B007
            pass
        del held
        time.sleep(0.1)  # gloo's threads let go a little later
        seen += [live.peak - before, live.current - before]
        live.reset_peak()
        grads = Gradients([shard])
        for _, held in walk.backward([shard], grads):  # noqa: B007
            grads.add(0, dw)
        del held
        time.sleep(0.1)
        seen += [live.peak - before, live.current - before]
    return [size / SHARD for size in seen]


#: Weights forward, nothing; weights and dW backward, the result.
BUFFERS = {"ring": [2, 0, 4, 1], "broadcast": [2, 0, 5, 1], "gather": [4, 0, 9, 1]}


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_a_walk_holds_two_slots_and_takes_them_along(schedule):
    """Two for weights and two for dW; broadcast has a place for the own dW too, and so has gather,
    which holds all of both. The result of a ring is what lies in the last slot."""
    assert run(_buffers, 4, schedule, None) == [BUFFERS[schedule]] * 4


def _a_slot_for_each():
    take = Slots.take

    def anew(self, *args):
        self._memory = [*self._memory, None, None][-2:]
        self.__dict__.setdefault("earlier", []).append(self._memory)
        return take(self, *args)

    Slots.take = anew


def test_twin_a_slot_for_each_shard_is_seen():
    assert run(_buffers, 4, "ring", _a_slot_for_each) != [BUFFERS["ring"]] * 4


def _model(recompute, schedule=None):
    degree = dist.get_world_size()
    start(degree)
    kinds = ("attention_schedule", "mlp_schedule", "vocab_schedule")
    options = TSPOptions(**dict.fromkeys(kinds, schedule)) if schedule else TSPOptions()
    settings = config(degree, kv_channels=2, num_layers=4, transformer_impl="local", **recompute)
    gpt = TSPGPTModelConfig(
        transformer=settings, vocab_size=48, seq_length=24, position_embedding_type="rope",
        tsp=options,
    )  # fmt: skip
    return TSPGPTModelBuilder(gpt).build_model(ProcessGroupCollection.use_mpu_process_groups())


def _prefetches(recompute, schedule):
    """(walks begun in time, walks begun late, transfers that nobody wanted) of two steps."""
    model = _model(recompute, schedule)
    counts = {"in time": 0, "late": 0, "unwanted": 0}
    begin = Stream._begin

    def counted(self, shards, backward):
        if self._begun is None:
            counts["late"] += 1
        elif self._begun[0] == self._key(shards, backward):
            counts["in time"] += 1
        else:
            counts["unwanted"] += 1
        return begin(self, shards, backward)

    Stream._begin = counted
    ids = torch.arange(24).expand(2, 24)
    for _ in range(2):
        model(ids, ids, None, labels=ids).sum().backward()
    with torch.no_grad():  # evaluation has no backward to fetch for
        model(ids, ids, None, labels=ids)
    assert all(walk._begun is None for walk in streaming._streams.values())
    return counts


FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}
MODES = {
    "none": {},
    "full": {**FULL, "recompute_num_layers": 1},
    "full, two layers at a time": {**FULL, "recompute_num_layers": 2},
    "full, three at a time": {**FULL, "recompute_num_layers": 3},
    "block": {**FULL, "recompute_method": "block", "recompute_num_layers": 3},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "core attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
}


@pytest.mark.parametrize("mode", MODES)
def test_every_block_is_fetched_by_the_one_before(mode):
    """But for a micro-batch's first: what comes before that is not known."""
    for counts in run(_prefetches, 2, MODES[mode], None):
        assert counts["late"] == 3 and counts["unwanted"] == 0, counts
        assert counts["in time"] >= 2 * 25 + 12


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_every_schedule_can_be_fetched_early(schedule):
    for counts in run(_prefetches, 3, {}, schedule):
        assert counts["late"] == 3 and counts["unwanted"] == 0, counts


def _wrong_prefetch():
    walk = stream("ring", dist.group.WORLD)
    expected, other = [random(3, 4, seed=dist.get_rank())], [random(3, 4, seed=9)]
    walk.prefetch(other, backward=False)
    for owner, (held,) in walk.forward(expected):
        torch.testing.assert_close(held, random(3, 4, seed=owner), rtol=0, atol=0)


def test_a_wrong_guess_costs_bytes_and_nothing_else():
    run(_wrong_prefetch, 3)


def test_twin_a_wrong_guess_that_is_believed_is_seen():
    with pytest.raises(RankFailed, match="not equal|not close"):
        run(_believed_guess, 3)


def _believed_guess():
    Stream._key = staticmethod(lambda shards, backward: backward)
    _wrong_prefetch()


def _update_after_a_prefetch(breaking):
    if breaking is not None:
        breaking()
    model = _model({**FULL, "recompute_num_layers": 4})
    model.embedding.requires_grad_(False)  # so Megatron computes no layer again
    ids = torch.arange(24).expand(2, 24)
    model(ids, ids, None, labels=ids).sum().backward()
    begun = [walk._begun for walk in streaming._streams.values() if walk._begun is not None]
    assert len(begun) == 1 and begun[0][0][0] is False  # the first layer's weights, not used
    begun[0][1].wait()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(1.5)
    first, again = (model(ids, ids, None, labels=ids) for _ in range(2))
    torch.testing.assert_close(first, again, rtol=0, atol=0)


def test_what_was_fetched_before_an_update_is_not_used_after_it():
    run(_update_after_a_prefetch, 2, None)


def _trusted_for_good():
    streaming.drop_prefetches = lambda: None


def test_twin_stale_weights_are_seen():
    with pytest.raises(RankFailed, match="not equal|not close"):
        run(_update_after_a_prefetch, 2, _trusted_for_good)
