"""Forms the group of ranks: with child processes on this machine, or with processes that a launcher has started.

A process is in one group at a time, as torch has one default group.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from mlserver_torch_stream.engine.machine import launched
from mlserver_torch_stream.engine.tensor_parallel.rank_group import RankGroup
from mlserver_torch_stream.engine.tensor_parallel.rank_processes import MODULE, RankProcesses
from mlserver_torch_stream.engine.tensor_parallel.validate import KEY
from mlserver_torch_stream.errors import LoadFailed

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
# To import Python, torch and transformers takes 5 s, on a busy machine several times as long.
_CHILDREN_TIMEOUT = timedelta(minutes=3)
# Pods of one group start when their images are pulled.
_LAUNCHED_TIMEOUT = timedelta(minutes=30)
_FORMING = threading.Lock()
_GROUP_USED = threading.Event()  # set once the launched ranks have formed their only group
_POLL = timedelta(seconds=0.1)  # a store reports no new keys
# The key under which rank 0 writes why there will be no group, or "" if there is one.
_REFUSAL = "mlserver-torch-stream/refusal"


def form(size: int, environ: Mapping[str, str], module: str = MODULE) -> tuple[RankGroup, RankProcesses]:
    """Forms a new group as its rank 0. Unless a launcher has started the other ranks, they run ``module``.

    Raises LoadFailed.
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
        raise LoadFailed(f"{KEY}: {size} ranks are wanted and {started} were started")
    if _GROUP_USED.is_set():
        raise LoadFailed(f"{KEY}: these ranks have loaded a model before: start all processes again")
    group = find_launched(environ)
    _GROUP_USED.set()
    return group, RankProcesses(1, 0)


def _form_local(size: int, module: str) -> tuple[RankGroup, RankProcesses]:
    if torch.cuda.is_available() and torch.cuda.device_count() < size:
        raise LoadFailed(f"{KEY}: {size} GPUs are wanted and {torch.cuda.device_count()} are here")
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
    """Joins the group of the process on this machine that has started this one."""
    store = dist.TCPStore(_HOST, port, is_master=False, timeout=_CHILDREN_TIMEOUT, wait_for_workers=False)
    store.set(_connected(rank), "")
    return RankGroup(store, rank, size)


def find_launched(environ: Mapping[str, str]) -> RankGroup:
    """Joins the group of the launcher's variables: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

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
    """Ends the wait of the other launched ranks for a group. Returns False if they have had one.

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
