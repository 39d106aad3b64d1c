"""LiveBytes against torch's own profiler, and against sums done by hand."""

import gc
import mmap

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron_tsp.trace.memory import LiveBytes


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x.square().mean()


def train_step(net, x):
    net(x).backward()


def profiled_peak(call) -> int:
    """Highest sum of allocations minus releases inside `call`, by torch's profiler, in bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        call()
    live = peak = 0
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def test_peak_agrees_with_the_profiler():
    net = Net()
    x = torch.randn(512, 256)
    train_step(net, x)
    net.zero_grad(set_to_none=True)
    gc.collect()

    with LiveBytes() as live:
        before = live.current
        train_step(net, x)
        ours = live.peak - before
    net.zero_grad(set_to_none=True)
    gc.collect()
    reference = profiled_peak(lambda: train_step(net, x))
    assert reference > 2_000_000
    assert abs(ours - reference) <= 0.01 * reference, (ours, reference)


def test_existing_tensors_are_counted_once_and_only_once():
    with LiveBytes() as live:
        base = live.current
    weight = torch.zeros(1000, requires_grad=True)
    weight.sum().backward()
    view, alias = weight.detach()[10:20], weight.detach().view(10, 100)
    with LiveBytes() as live:
        assert live.current - base == 2 * 4000  # the weight and its gradient
    del view, alias


def test_views_are_free_and_releases_are_seen():
    with LiveBytes() as live:
        start = live.current
        a = torch.zeros(1000)
        b = a.view(10, 100).t()[3:]
        assert live.current - start == 4000
        del a
        assert live.current - start == 4000  # the view keeps the storage alive
        del b
        assert live.current - start == 0
        assert live.peak - start == 4000
        c = torch.zeros(10)
        c.resize_(500)
        assert live.current - start == 2000


def test_memory_of_others_is_not_counted():
    with LiveBytes() as live:
        start = live.current
        shared = torch.from_numpy(np.zeros(1000))
        mapped = torch.frombuffer(mmap.mmap(-1, 4096), dtype=torch.uint8)
        nothing = torch.empty(1000, device="meta")
        assert (shared + 0).nbytes == 8000  # seen as an input; only the short-lived sum counts
        assert live.current - start == 0
        assert live.peak - start == 8000
    del shared, mapped, nothing


@pytest.mark.parametrize("recompute", [False, True])
def test_saved_tensors_live_until_the_backward(recompute):
    net, x = Net(), torch.randn(64, 256)

    def run():
        if recompute:
            return torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False)
        return net(x)

    with LiveBytes() as live:
        start = live.current
        loss = run()
        saved = live.current - start
        loss.backward()
        del loss
        gradients = sum(p.grad.nbytes for p in net.parameters())
        assert live.current - start == gradients
    assert (saved < 10_000) == recompute
