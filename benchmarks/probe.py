"""How fast gloo is between hosts: run by `benchmarks.links` before it measures.

    python -m benchmarks.launch ... -- python -m benchmarks.probe OUT MEBIBYTES

Rank 0 sends to rank 1 alone; then every rank sends to the next one and receives from the one before
at the same time. OUT becomes a JSON object of two rates in bits of payload per second.
"""

import json
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def one_way(data: torch.Tensor) -> None:
    """Rank 0 to rank 1; the others watch."""
    if dist.get_rank() == 0:
        dist.send(data, 1)
    elif dist.get_rank() == 1:
        dist.recv(data, 0)


def ring(data: torch.Tensor) -> None:
    """Each rank to the next, all at once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pending = [dist.isend(data, (rank + 1) % size)]
    pending.append(dist.irecv(torch.empty_like(data), (rank - 1) % size))
    for request in pending:
        request.wait()


def rate(exchange: Callable, data: torch.Tensor) -> float:
    """Bits per second of one exchange, between two barriers, after a small one to warm up."""
    exchange(data[: data.numel() // 16])
    dist.barrier()
    start = time.perf_counter()
    exchange(data)
    dist.barrier()
    return data.numel() * 8 / (time.perf_counter() - start)


def main() -> None:
    """Measure; rank 0 writes."""
    out, mebibytes = sys.argv[1:]
    dist.init_process_group("gloo")
    data = torch.zeros(int(mebibytes) * 2**20, dtype=torch.uint8)
    rates = {"one_way": rate(one_way, data), "ring": rate(ring, data)}
    if dist.get_rank() == 0:
        with open(out, "w", encoding="utf-8") as file:
            json.dump(rates, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
