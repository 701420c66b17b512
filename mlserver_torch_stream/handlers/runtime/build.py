"""Builds a model's pool of workers from its settings, and describes it as TorchServe's management API does.

``build`` blocks, so it runs in a thread and not on the event loop.
"""

from __future__ import annotations

import asyncio
import glob
import logging
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from mlserver import ModelSettings

from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.handlers.config.archive import Archive, open_archive
from mlserver_torch_stream.handlers.config.model_config import HandlerConfig, not_honoured, read_config
from mlserver_torch_stream.handlers.config.unpacking import take_bounds
from mlserver_torch_stream.handlers.config.worker_settings import (
    WorkerFiles,
    find_worker_files,
    install_requirements,
    not_installed,
)
from mlserver_torch_stream.handlers.pool.handler_metrics import HANDLER_METRICS
from mlserver_torch_stream.handlers.pool.supervisor import WorkerSlot, rank_environments
from mlserver_torch_stream.handlers.pool.worker_pool import WorkerPool
from mlserver_torch_stream.handlers.pool.worker_rank import WorkerOrder
from mlserver_torch_stream.server.host import source_of

logger = logging.getLogger("mlserver_torch_stream.handlers")
_PICKLE = 4  # a version of pickle's protocol that Python 3.8 reads too


@dataclass
class BuiltPool:
    """The running workers of a model, as a ``ModelSlot`` holds them."""

    engine: WorkerPool
    archive: Archive
    summary: str

    def has_gpu(self, number: int) -> bool:
        """Whether the worker with this number uses a GPU."""
        return _device(self.engine.config, number)[0] is not None

    def give_back(self) -> bool:
        """Returns True: a pool is never shared, so its only user may shut it down."""
        return True

    def shutdown(self) -> None:
        """Ends the workers, and blocks until their processes have ended."""
        self.engine.shutdown()


def build(settings: ModelSettings, loop: asyncio.AbstractEventLoop) -> BuiltPool:
    """Opens the model's archive, finds or installs what its workers need, and starts them on the event loop ``loop``.

    Raises SettingsError or LoadFailed.
    """
    uri, extra, folder = _given(settings)
    archive = open_archive(uri, folder, take_bounds(extra))
    try:
        config = read_config(archive.yaml, extra)
        workers = find_worker_files(config, folder)
        if config.service_envelope:
            archive = archive.with_envelope(config.service_envelope)
        for line in not_honoured(archive.yaml, config):
            logger.warning("Model '%s': model-config.yaml: %s", settings.name, line)
        if archive.requirements and config.install_py_dep_per_model:
            if not archive.own:
                raise SettingsError("parameters.extra.install_py_dep_per_model: needs an archive, not a folder")
            install_requirements(workers.python, archive.folder, archive.requirements)
        elif archive.requirements and workers.python is None:
            line = not_installed(archive.packed_requirements, uri, config.useVenv)
            if config.useVenv:
                raise SettingsError(line)
            logger.warning("Model '%s': %s", settings.name, line)
        pool = asyncio.run_coroutine_threadsafe(_start(settings, archive, config, workers), loop).result()
    except BaseException:
        archive.close()
        raise
    return BuiltPool(pool, archive, _summary(archive, config, workers))


async def _start(settings: ModelSettings, archive: Archive, config: HandlerConfig, workers: WorkerFiles) -> WorkerPool:
    metrics = HANDLER_METRICS.of(settings.name, settings.parameters.version if settings.parameters else None)
    order = partial(worker_order, settings.name, archive, config, workers)
    pool = WorkerPool(settings.name, config, order, metrics, archive.close)
    await pool.start()
    return pool


def worker_order(model: str, archive: Archive, config: HandlerConfig, workers: WorkerFiles, number: int) -> WorkerOrder:
    """Returns what the worker with this number loads, and on which device."""
    gpu, visible = _device(config, number)
    message = {
        "t": "load",
        "model": model,
        "folder": str(archive.folder),
        "manifest": archive.manifest,
        "handler": config.handler or archive.handler,
        "envelope": archive.envelope,
        "batch_size": config.batchSize,
        "gpu": gpu,
        "mode": _mode(config),
        "ts": config.ts,
        "metrics": workers.metrics,
        "stops": config.stops,
        "limits_pixels": config.limit_max_image_pixels,
    }
    # JSON cannot hold every YAML value, and a worker's interpreter may have no YAML parser.
    body = pickle.dumps(dict(archive.yaml), protocol=_PICKLE)
    return WorkerOrder(message, body, rank_environments(config, visible), workers.python, config.hidden)


def _device(config: HandlerConfig, number: int) -> tuple[int | None, str | None]:
    """Returns the number of a worker's GPU, and the value of CUDA_VISIBLE_DEVICES for a worker of several ranks.

    As in TorchServe, the workers are assigned to the GPUs in turn.
    """
    devices = config.deviceIds if config.deviceIds is not None else tuple(range(gpu_count()))
    if config.deviceType == "cpu" or not devices:
        return None, None
    if config.parallelType is None:
        return devices[number % len(devices)], None
    level = max(config.ranks, config.parallelLevel)
    first = number * level % len(devices)
    chosen = (*devices[first:], *devices[:first])[:level]
    return 0, ",".join(map(str, chosen))


def _mode(config: HandlerConfig) -> str:
    if config.asyncCommunication:
        return "async"
    return "continuous" if config.continuousBatching else "static"


def gpu_count() -> int:
    """Returns the number of GPUs that workers see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([each for each in visible.split(",") if each.strip() not in ("", "-1")])
    return len(glob.glob("/dev/nvidia[0-9]*"))


def _given(settings: ModelSettings) -> tuple[str, dict[str, Any], str | None]:
    """Returns the model's ``uri``, its ``extra`` and the folder of its model-settings.json."""
    parameters = settings.parameters
    source = source_of(settings)
    folder = os.path.dirname(source) if source else None
    extra: Mapping[str, Any] = (parameters.extra if parameters is not None else None) or {}
    uri = parameters.uri if parameters is not None else None
    if not uri:
        raise SettingsError("parameters.uri: missing: name the .mar, .tar.gz, folder or handler.py[:function] to serve")
    return uri, dict(extra), folder


def _summary(archive: Archive, config: HandlerConfig, workers: WorkerFiles) -> str:
    ranks = f" of {config.ranks} ranks ({config.parallelType})" if config.ranks > 1 else ""
    batching = {"async": "asynchronous", "continuous": "continuous batches", "static": "batches"}[_mode(config)]
    python = "" if workers.python is None else f", run by {workers.python}"
    workers_up_to = "" if config.most_workers == config.minWorkers else f" to {config.most_workers}"
    of = f"{config.minWorkers}{workers_up_to} worker(s){ranks}, {batching} of up to {config.batchSize}"
    return f"handler {archive.handler}, {of}{python}"


def describe_pool(built: BuiltPool) -> dict[str, Any]:
    """Returns the model and its workers as TorchServe's management API shows them.

    Times have the units of the model's settings: ms for ``maxBatchDelay``, s for the timeouts. Memory is in bytes.
    """
    pool = built.engine
    config = pool.config
    waiting = pool.waiting
    return {
        "runtime": str(built.archive.manifest.get("runtime", "python")),
        "minWorkers": pool.scaling.least,
        "maxWorkers": pool.scaling.most,
        "batchSize": config.batchSize,
        "maxBatchDelay": config.maxBatchDelay,
        "responseTimeout": config.responseTimeout,
        "startupTimeout": config.startupTimeout,
        "clientTimeoutInMills": config.clientTimeoutInMills,
        "parallelType": config.parallelType or "",
        "parallelLevel": config.parallelLevel,
        "deviceType": config.deviceType or "",
        **({"deviceIds": list(config.deviceIds)} if config.deviceIds is not None else {}),
        "continuousBatching": config.continuousBatching,
        "useJobTicket": config.useJobTicket,
        "useVenv": config.useVenv,
        "stateful": config.sequenceBatching,
        "sequenceMaxIdleMSec": config.sequenceMaxIdleMSec,
        "sequenceTimeoutMSec": config.sequenceTimeoutMSec,
        "maxNumSequence": pool.most_sequences,
        "maxSequenceJobQueueSize": config.maxSequenceJobQueueSize,
        "workers": [_worker(slot, built.has_gpu(slot.number)) for slot in pool.supervisor.slots],
        "jobQueueStatus": {
            "remainingCapacity": max(0, config.queue_size - waiting),
            "pendingRequests": waiting,
        },
    }


def _worker(slot: WorkerSlot, gpu: bool) -> dict[str, Any]:
    started = datetime.fromtimestamp(slot.started_at, timezone.utc)
    pids = [pid for top in (slot.worker.pids if slot.worker is not None else []) for pid in _tree(top)]
    return {
        "id": str(slot.number),
        "startTime": started.strftime("%Y-%m-%dT%H:%M:%S.") + f"{started.microsecond // 1000:03d}Z",
        "status": "READY" if slot.ready and not slot.leaving else "UNLOADING",
        "memoryUsage": sum(map(_resident_bytes, pids)),
        "pid": next(iter(pids[1:2] or pids), 0),  # the first process is the subreaper
        "gpu": gpu,
        "gpuUsage": "N/A",
    }


def _tree(pid: int) -> Iterator[int]:
    """Yields the pid of a process and of all its descendants."""
    yield pid
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _tree(int(child))


def _resident_bytes(pid: int) -> int:
    """Returns the resident memory of a process; 0 if it has ended, or if the system has no /proc."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))
