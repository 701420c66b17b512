"""How ranks find each other: children of rank 0 on its machine, or whoever a launcher such as torchrun has started.

Knows nothing of models. One process has a seat in one group at a time: torch knows no more.
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

from mlserver_torch_stream.engine.tensor_parallel.rank_group import RankGroup
from mlserver_torch_stream.engine.tensor_parallel.rank_processes import MODULE, LaunchedRanks, OtherRanks, RankProcesses
from mlserver_torch_stream.engine.tensor_parallel.validate import KEY
from mlserver_torch_stream.errors import LoadFailed

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
# Python, torch and transformers take 5 s, on a busy machine several times as long.
_CHILDREN = timedelta(minutes=3)
# Pods of one group start when their images are there.
_LAUNCHED = timedelta(minutes=30)
_FORMING = threading.Lock()
_LEFT = threading.Event()  # those that a launcher has started: they have come, once
_LOOK = timedelta(seconds=0.1)  # a store does not say that somebody has come
# Rank 0's to those who wait for it: why there will be no group, nothing if there is one.
_WORD = "mlserver-torch-stream/word"


def launched(environ: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process as one rank of several."""
    return "RANK" in environ and int(environ.get("WORLD_SIZE", "1")) > 1


def ranks_here(size: int, environ: Mapping[str, str]) -> int:
    """How many of ``size`` ranks share this machine."""
    return int(environ.get("LOCAL_WORLD_SIZE", "1")) if launched(environ) else size


def form(size: int, environ: Mapping[str, str], module: str = MODULE) -> tuple[RankGroup, OtherRanks]:
    """Rank 0 of a new group, whose other ranks run ``module`` unless a launcher has started them. Raises LoadFailed."""
    if not _FORMING.acquire(blocking=False):
        raise LoadFailed(f"{KEY}: another model in this process is being split over ranks")
    try:
        if dist.is_initialized():
            raise LoadFailed(f"{KEY}: another model in this process is split over ranks already")
        return _form(size, environ, module)
    finally:
        _FORMING.release()


def _form(size: int, environ: Mapping[str, str], module: str) -> tuple[RankGroup, OtherRanks]:
    if launched(environ):
        started = int(environ["WORLD_SIZE"])
        if started != size:
            raise LoadFailed(f"{KEY}: {size} ranks are wanted and {started} were started")
        if _LEFT.is_set():
            raise LoadFailed(f"{KEY}: these ranks have had their model: start all processes anew")
        group = find_launched(environ)
        _LEFT.set()
        return group, LaunchedRanks()
    if torch.cuda.is_available() and torch.cuda.device_count() < size:
        raise LoadFailed(f"{KEY}: {size} GPUs are wanted and {torch.cuda.device_count()} are here")
    return _form_here(size, module)


def _form_here(size: int, module: str) -> tuple[RankGroup, OtherRanks]:
    # Nobody else can reach these ranks; torch would have them listen wherever the host's name points to.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    listener = socket.create_server((_HOST, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        _HOST, port, is_master=True, timeout=_CHILDREN, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    try:
        crew = RankProcesses(size, port, module)
    except OSError as error:
        raise LoadFailed(f"{KEY}: a rank could not be started: {error}") from error
    try:
        for rank in range(1, size):
            _wait_for(store, rank, crew)
        return RankGroup(store, 0, size), crew
    except BaseException as error:
        fate = crew.fate(1) if isinstance(error, RuntimeError) else None
        crew.end(0)
        if isinstance(error, RuntimeError):
            raise LoadFailed(f"{KEY}: the ranks did not find each other: {fate or error}") from error
        raise


def _wait_for(store: dist.Store, rank: int, crew: OtherRanks) -> None:
    for _ in range(int(_CHILDREN / _LOOK)):
        if store.check([_here(rank)]):
            return
        if fate := crew.fate(_LOOK.total_seconds()):
            raise LoadFailed(f"{KEY}: {fate}")
    raise LoadFailed(f"{KEY}: rank {rank} did not come within {_CHILDREN.total_seconds():.0f} s")


def find_local(rank: int, size: int, port: int) -> RankGroup:
    """The group of the process on this machine that has started this one."""
    store = dist.TCPStore(_HOST, port, is_master=False, timeout=_CHILDREN, wait_for_workers=False)
    store.set(_here(rank), "")
    return RankGroup(store, rank, size)


def find_launched(environ: Mapping[str, str]) -> RankGroup:
    """The group that the launcher's variables tell of: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Raises LoadFailed where one is missing, the others do not come, or rank 0 says that there will be no group.
    """
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=_LAUNCHED))
        store.set(_here(rank), "")
        if rank == 0:
            store.set(_WORD, "")
        store.wait([_WORD], _LAUNCHED)
        if why := store.get(_WORD).decode():
            store.set(_heard(rank), "")
            raise LoadFailed(why)
        store.wait([_here(other) for other in range(size)], _LAUNCHED)
        return RankGroup(store, rank, size)
    except (ValueError, RuntimeError) as error:
        raise LoadFailed(f"{KEY}: rank {environ['RANK']} found no group: {error}") from None


def dismiss(environ: Mapping[str, str], why: str, patience: float) -> bool:
    """Rank 0 tells the others that a launcher has started that they wait for nothing; False if they have had a model.

    Waits for so many seconds for those that are still to come, and says who has not.
    """
    if _LEFT.is_set():
        return False
    size = int(environ["WORLD_SIZE"])
    server = environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # torchrun has one of its own
    port, limit = int(environ["MASTER_PORT"]), timedelta(seconds=patience)
    try:
        store = dist.TCPStore(
            environ["MASTER_ADDR"], port, None, server, limit, wait_for_workers=False, multi_tenant=True
        )
        store.set(_WORD, why)
        store.wait([_heard(other) for other in range(1, size)], limit)
    except RuntimeError as error:
        logger.warning("not all of the other %d ranks have heard that they wait for nothing: %s", size - 1, error)
    return True


def _heard(rank: int) -> str:
    return f"mlserver-torch-stream/heard-{rank}"


def _here(rank: int) -> str:
    return f"mlserver-torch-stream/rank-{rank}"
