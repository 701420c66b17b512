"""Starts the other ranks as child processes of this one, watches them and ends them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from mlserver_torch_stream.engine.child_process import how_it_ended

MODULE = "mlserver_torch_stream.engine.rank_main"

OnEnd = Callable[[str], None]
"""Is called with a text such as ``rank 1 was killed by SIGKILL``, on a separate thread."""


class RankProcesses:
    """Ranks 1 to ``size - 1``, which run ``module`` and find rank 0 at ``port`` on this machine.

    ``size`` is 1 if a launcher such as torchrun has started the other ranks: then the launcher watches and ends them.
    Raises OSError if a process cannot be started.
    """

    def __init__(self, size: int, port: int, module: str = MODULE) -> None:
        self._lock = threading.Lock()
        self._one_ended = threading.Event()
        self._fate: str | None = None
        self._on_end: OnEnd = lambda fate: None
        self._children: list[_Child] = []
        try:
            for rank in range(1, size):
                self._children.append(_Child(module, rank, size, port, self._ended))
        except OSError:
            self.end(0)
            raise

    def fate(self, seconds: float) -> str | None:
        """Waits up to ``seconds`` for a process to end. Returns how the first one ended; None if all run."""
        if self._children:
            self._one_ended.wait(seconds)
        return self._fate

    def watch(self, on_end: OnEnd) -> None:
        """Calls ``on_end`` for each process that ends from now on, and at once if one has ended already."""
        with self._lock:
            self._on_end = on_end
            fate = self._fate
        if fate is not None:
            on_end(fate)

    def kill(self) -> None:
        for child in self._children:
            child.process.kill()

    def end(self, grace: float) -> None:
        """Waits up to ``grace`` seconds until all processes have ended, then kills the rest. Blocks."""
        end = time.monotonic() + grace
        for child in self._children:
            child.join(max(0.0, end - time.monotonic()))
        self.kill()
        for child in self._children:
            child.join()

    def _ended(self, fate: str) -> None:
        with self._lock:
            self._fate = self._fate or fate
            self._one_ended.set()
            on_end = self._on_end
        on_end(fate)


class _Child(threading.Thread):
    """Lives as long as its process: the kernel kills a child at the end of the thread that started it."""

    process: subprocess.Popen[bytes]

    def __init__(self, module: str, rank: int, size: int, port: int, on_end: OnEnd) -> None:
        super().__init__(name=f"rank-{rank}", daemon=True)
        self._rank = rank
        self._command = [sys.executable, "-m", module, *map(str, (rank, size, port, os.getpid()))]
        self._on_end = on_end
        self._spawned = threading.Event()
        self._failure: OSError | None = None
        self.start()
        self._spawned.wait()
        if self._failure is not None:
            raise self._failure

    def run(self) -> None:
        environment = {**os.environ, "RANK": str(self._rank), "LOCAL_RANK": str(self._rank)}
        try:
            self.process = subprocess.Popen(self._command, stdin=subprocess.PIPE, env=environment)
        except OSError as error:
            self._failure = error
            return
        finally:
            self._spawned.set()
        status = self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._on_end(f"rank {self._rank} {how_it_ended(status)}")
