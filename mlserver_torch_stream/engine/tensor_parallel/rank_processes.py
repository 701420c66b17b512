"""The other ranks as child processes of this one: started, watched and ended, each by a thread of its own.

Knows nothing of torch or of what they do.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

MODULE = "mlserver_torch_stream.engine.tensor_parallel.rank_main"

OnEnd = Callable[[str], None]
"""Is told in words which rank has ended, and how; on a thread of its own."""


class OtherRanks(Protocol):
    """The processes of the other ranks, as far as this one has to do with them."""

    def fate(self, seconds: float) -> str | None:
        """How the first of them to end has ended; waits for so long for one to do so."""

    def watch(self, on_end: OnEnd) -> None: ...

    def kill(self) -> None: ...

    def end(self, grace: float) -> None:
        """Waits for so many seconds for them to end by themselves, then kills them. Blocks."""


class LaunchedRanks:
    """Ranks that somebody else has started, watches and ends."""

    def fate(self, seconds: float) -> str | None:
        return None

    def watch(self, on_end: OnEnd) -> None:
        pass

    def kill(self) -> None:
        pass

    def end(self, grace: float) -> None:
        pass


class RankProcesses:
    """Ranks 1 to ``size - 1``, which run ``module`` and find rank 0 at ``port`` on this machine.

    Raises OSError if one cannot be started.
    """

    def __init__(self, size: int, port: int, module: str = MODULE) -> None:
        self._lock = threading.Lock()
        self._one_ended = threading.Event()
        self._fate: str | None = None
        self._on_end: OnEnd = lambda fate: None
        self._members: list[_Child] = []
        try:
            for rank in range(1, size):
                self._members.append(_Child(module, rank, size, port, self._ended))
        except OSError:
            self.end(0)
            raise

    @property
    def pids(self) -> Sequence[int]:
        return [member.process.pid for member in self._members]

    def fate(self, seconds: float) -> str | None:
        self._one_ended.wait(seconds)
        return self._fate

    def watch(self, on_end: OnEnd) -> None:
        """From now on, and at once for the first that has ended already."""
        with self._lock:
            self._on_end = on_end
            fate = self._fate
        if fate is not None:
            on_end(fate)

    def kill(self) -> None:
        for member in self._members:
            member.process.kill()

    def end(self, grace: float) -> None:
        end = time.monotonic() + grace
        for member in self._members:
            member.join(max(0.0, end - time.monotonic()))
        self.kill()
        for member in self._members:
            member.join()

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
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        self._on_end(f"rank {self._rank} {how}")
