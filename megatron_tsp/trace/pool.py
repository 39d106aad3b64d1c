"""Processes that trace: started when first needed, ended with the program."""

import atexit
import json
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from megatron_tsp.errors import TSPError


class TraceFailed(RuntimeError):
    """A trace failed, and not for the configuration's sake; the message has its traceback."""


class Pool:
    """``pool.submit(request)`` runs `step.trace(**request)` in a fresh process; up to `size` at a
    time. ``close`` ends the servers."""

    def __init__(self, size: int = 1):
        self._threads = ThreadPoolExecutor(size)
        self._free: SimpleQueue[subprocess.Popen | None] = SimpleQueue()
        self._servers: list[subprocess.Popen] = []
        for _ in range(size):
            self._free.put(None)
        atexit.register(self.close)

    def submit(self, name: str, request: dict) -> Future:
        """A future of the answer; `name` says in messages whose it is.

        It raises TSPError for a configuration that cannot run, TraceFailed otherwise.
        """
        return self._threads.submit(self._ask, name, request)

    def close(self) -> None:
        """End the servers, and what they are tracing."""
        atexit.unregister(self.close)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for server in self._servers:
            server.stdin.close()
            server.kill()
            server.wait()
        self._servers.clear()

    def _ask(self, name: str, request: dict) -> dict:
        server = self._free.get()
        try:
            if server is None or server.poll() is not None:
                server = self._start()
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            line = server.stdout.readline()
        finally:
            self._free.put(server)
        if not line:
            raise TraceFailed(f"{name}: the tracing process ended")
        answer = json.loads(line)
        if "refused" in answer:
            raise TSPError(f"{name}: {answer['refused']}")
        if answer.get("megatron"):
            raise TSPError(f"{name}: Megatron refuses these flags: {answer['megatron']}")
        if "crash" in answer:
            raise TraceFailed(f"{name}: {answer['crash']}")
        return answer["result"]

    def _start(self) -> subprocess.Popen:
        package = str(Path(__file__).parents[2])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        server = subprocess.Popen(
            [sys.executable, "-m", "megatron_tsp.trace.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        self._servers.append(server)
        return server
