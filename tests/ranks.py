"""Run a function on real gloo ranks, forked from one process that has imported everything once."""

import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import traceback
from datetime import timedelta

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["ranks_preload"])
# Python 3.12's fork server looks for what it preloads in PYTHONPATH only.
_paths = [os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__))]
os.environ["PYTHONPATH"] = os.pathsep.join(_paths + [os.environ.get("PYTHONPATH", "")])


class RankFailed(AssertionError):
    """A rank raised; the message holds its traceback."""


def run(function, world: int, *args, timeout: float = 120) -> list:
    """`function(*args)` on `world` ranks; returns their results, by rank.

    The function is a module's, its arguments and result can be pickled. Each call has processes
    of its own, so that Megatron's global state is fresh.

    Raises:
        RankFailed: a rank raised, died, or took longer than `timeout` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            receiver, sender = _context.Pipe(duplex=False)
            work = pickle.dumps((function, args))
            process = _context.Process(target=_rank, args=(work, rank, world, folder, sender))
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes, timeout)
        finally:
            for process in processes:
                process.join(0.1 if process.exitcode is None else None)
                if process.exitcode is None:
                    process.kill()
                    process.join()


def _collect(pipes, timeout) -> list:
    """The ranks' results; the first failure ends the wait, whichever rank it comes from."""
    waiting, results = dict(enumerate(pipes)), {}
    while waiting:
        ready = multiprocessing.connection.wait(waiting.values(), timeout)
        if not ready:
            raise RankFailed(f"ranks {sorted(waiting)} did not finish in {timeout} s")
        for rank in [r for r, pipe in waiting.items() if pipe in ready]:
            try:
                succeeded, value = pickle.loads(waiting.pop(rank).recv_bytes())
            except EOFError:
                raise RankFailed(f"rank {rank} died") from None
            if not succeeded:
                raise RankFailed(f"rank {rank} raised\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank(work, rank, world, folder, sender):
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(os.path.join(folder, "store"), world)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )
        function, args = pickle.loads(work)
        outcome = True, function(*args)
        dist.barrier()
    except BaseException:
        outcome = False, traceback.format_exc()
    sender.send_bytes(pickle.dumps(outcome))
    sender.close()
    for child in multiprocessing.active_children():  # writers of checkpoints, else left behind
        child.kill()
        child.join()
    os._exit(0)  # gloo's threads need no goodbye
