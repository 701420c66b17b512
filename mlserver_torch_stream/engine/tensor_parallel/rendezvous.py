"""Forms the group of ranks, from child processes on this machine or from processes that a launcher has started.

A process is in one group at a time, because torch has only one default group.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from mlserver_torch_stream.engine.child_process import how_it_ended
from mlserver_torch_stream.engine.machine import launched
from mlserver_torch_stream.engine.tensor_parallel.rank_group import RankGroup
from mlserver_torch_stream.engine.tensor_parallel.validate import KEY
from mlserver_torch_stream.errors import LoadFailed

MODULE = "mlserver_torch_stream.engine.rank_main"

OnEnd = Callable[[str], None]
"""A callable that gets a text such as ``rank 1 was killed by SIGKILL``, on a separate thread."""


class RankProcesses:
    """Ranks 1 to ``size - 1``, which run ``module`` and find rank 0 at ``port`` on this machine.

    ``size`` is 1 if a launcher such as torchrun has started the other ranks, because then the launcher watches and ends
    them. Raises OSError if a process cannot be started.
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
        """Waits up to ``seconds`` for a process to end.

        Returns how the first process ended; None if all of them still run.
        """
        if self._children:
            self._one_ended.wait(seconds)
        return self._fate

    def watch(self, on_end: OnEnd) -> None:
        """Calls ``on_end`` for each process that ends from now on.

        If processes have already ended, calls it at once for the first of them.
        """
        with self._lock:
            self._on_end = on_end
            fate = self._fate
        if fate is not None:
            on_end(fate)

    def kill(self) -> None:
        for child in self._children:
            child.process.kill()

    def end(self, grace: float) -> None:
        """Waits up to ``grace`` seconds until all processes have ended, then kills the others. Blocks."""
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
    """A thread that starts a process and lives as long as the process, because the end of the thread would kill it."""

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


logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
# Starting Python and importing torch and transformers takes 5 s, and several times as long on a busy machine.
_CHILDREN_TIMEOUT = timedelta(minutes=3)
# Pods of one group start only when their images are pulled.
_LAUNCHED_TIMEOUT = timedelta(minutes=30)
_FORMING = threading.Lock()
_GROUP_USED = threading.Event()  # set once the launched ranks have formed their only group
_POLL = timedelta(seconds=0.1)  # a store reports no new keys
# The key under which rank 0 writes why there will be no group, or "" if there is one.
_REFUSAL = "mlserver-torch-stream/refusal"


def form(size: int, environ: Mapping[str, str], module: str = MODULE) -> tuple[RankGroup, RankProcesses]:
    """Forms a new group as its rank 0. Unless a launcher has started the other ranks, they run ``module``.

    Raises LoadFailed if the group cannot be formed.
    """
    if not _FORMING.acquire(blocking=False):
        raise LoadFailed(f"{KEY}: another model in this process is being split over ranks")
    try:
        if dist.is_initialized():
            raise LoadFailed(f"{KEY}: another model in this process is split over ranks already")
        return _form_launched(size, environ) if launched(environ) else _form_local(size, module)
    finally:
        _FORMING.release()


def _form_launched(size: int, environ: Mapping[str, str]) -> tuple[RankGroup, RankProcesses]:
    started = int(environ["WORLD_SIZE"])
    if started != size:
        raise LoadFailed(f"{KEY}: {size} ranks are needed, but {started} were started")
    if _GROUP_USED.is_set():
        raise LoadFailed(f"{KEY}: these ranks have loaded a model before: start all processes again")
    group = find_launched(environ)
    _GROUP_USED.set()
    return group, RankProcesses(1, 0)


def _form_local(size: int, module: str) -> tuple[RankGroup, RankProcesses]:
    if torch.cuda.is_available() and torch.cuda.device_count() < size:
        raise LoadFailed(f"{KEY}: {size} GPUs are needed, but this machine has {torch.cuda.device_count()}")
    # Other machines must not reach these ranks; torch would listen on the address of the host's name.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    listener = socket.create_server((_HOST, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        *(_HOST, port),
        is_master=True,
        timeout=_CHILDREN_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    try:
        other_ranks = RankProcesses(size, port, module)
    except OSError as error:
        raise LoadFailed(f"{KEY}: a rank could not be started: {error}") from error
    try:
        for rank in range(1, size):
            _wait_for(store, rank, other_ranks)
        return RankGroup(store, 0, size), other_ranks
    except BaseException as error:
        fate = other_ranks.fate(1) if isinstance(error, RuntimeError) else None
        other_ranks.end(0)
        if isinstance(error, RuntimeError):
            raise LoadFailed(f"{KEY}: the ranks did not find each other: {fate or error}") from error
        raise


def _wait_for(store: dist.Store, rank: int, other_ranks: RankProcesses) -> None:
    for _ in range(int(_CHILDREN_TIMEOUT / _POLL)):
        if store.check([_connected(rank)]):
            return
        if fate := other_ranks.fate(_POLL.total_seconds()):
            raise LoadFailed(f"{KEY}: {fate}")
    raise LoadFailed(f"{KEY}: rank {rank} did not connect within {_CHILDREN_TIMEOUT.total_seconds():.0f} s")


def find_local(rank: int, size: int, port: int) -> RankGroup:
    """Joins the group of rank 0, which is this process's parent."""
    store = dist.TCPStore(_HOST, port, is_master=False, timeout=_CHILDREN_TIMEOUT, wait_for_workers=False)
    store.set(_connected(rank), "")
    return RankGroup(store, rank, size)


def find_launched(environ: Mapping[str, str]) -> RankGroup:
    """Joins the group in the launcher's environment variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Raises LoadFailed if a variable is missing, if another rank does not connect, or if rank 0 needs no group.
    """
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=_LAUNCHED_TIMEOUT))
        store.set(_connected(rank), "")
        if rank == 0:
            store.set(_REFUSAL, "")
        store.wait([_REFUSAL], _LAUNCHED_TIMEOUT)
        if why := store.get(_REFUSAL).decode():
            store.set(_dismissed(rank), "")
            raise LoadFailed(why)
        store.wait([_connected(other) for other in range(size)], _LAUNCHED_TIMEOUT)
        return RankGroup(store, rank, size)
    except (ValueError, RuntimeError) as error:
        raise LoadFailed(f"{KEY}: rank {environ['RANK']} found no group: {error}") from None


def dismiss(environ: Mapping[str, str], why: str, patience: float) -> bool:
    """Tells the other launched ranks that no group will be formed. Returns False if a group has already been formed.

    Waits ``patience`` seconds for ranks that have not connected yet, then logs that some are missing.
    """
    if _GROUP_USED.is_set():
        return False
    size = int(environ["WORLD_SIZE"])
    server = environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # torchrun has a server of its own
    port, limit = int(environ["MASTER_PORT"]), timedelta(seconds=patience)
    try:
        store = dist.TCPStore(
            environ["MASTER_ADDR"], port, None, server, limit, wait_for_workers=False, multi_tenant=True
        )
        store.set(_REFUSAL, why)
        store.wait([_dismissed(other) for other in range(1, size)], limit)
    except RuntimeError as error:
        logger.warning("Not all of the other %d ranks know that there will be no group: %s", size - 1, error)
    return True


def _dismissed(rank: int) -> str:
    return f"mlserver-torch-stream/dismissed-{rank}"


def _connected(rank: int) -> str:
    return f"mlserver-torch-stream/rank-{rank}"
