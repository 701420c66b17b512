"""Describes a loaded model and its workers in the words of TorchServe's management API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mlserver_torch_stream.handlers.pool.supervisor import WorkerSlot
from mlserver_torch_stream.handlers.runtime.build import BuiltPool


def describe_pool(built: BuiltPool) -> dict[str, Any]:
    """Times as in the model's settings: ms for ``maxBatchDelay``, s for the timeouts; memory in bytes."""
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
        "pid": next(iter(pids[1:2] or pids), 0),  # the first process is the worker's supervisor
        "gpu": gpu,
        "gpuUsage": "N/A",
    }


def _tree(pid: int) -> Iterator[int]:
    """The process and its descendants."""
    yield pid
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _tree(int(child))


def _resident_bytes(pid: int) -> int:
    """0 for a process that has ended, and where there is no /proc."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))
