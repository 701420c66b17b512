"""Reads how many cores and how much memory this process may use, and returns free memory to the system.

In a process that had loaded SmolLM2, trimming the heap returned 80 of 841 MiB (measured on 2026-11-21).
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mlserver_torch_stream.engine_settings import EngineSettings

KV_SHARE = 0.5  # the cache's share of the available memory; the rest is for activations and other allocations
PANELS_SUFFIX = ".panels"  # of mapped files with weights: their pages are file cache, but not free
_NO_LIMIT = 1 << 60  # cgroup v1 writes "no limit" as a number just under 2**63


@dataclass(frozen=True, slots=True)
class Host:
    """The number of cores and the memory that this process may use, and the source of each number."""

    threads: int
    available_bytes: int
    threads_origin: str
    memory_origin: str


@dataclass(frozen=True, slots=True)
class _MemoryFiles:
    limit: str
    usage: str
    reclaimable: str  # the key in memory.stat for file cache that the kernel drops when memory is short


_RLIMITS = (("Max address space", "VmSize", "-v"), ("Max data size", "VmData", "-d"))
_V2 = _MemoryFiles("memory.max", "memory.current", "inactive_file")
_V1 = _MemoryFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def read_host(root: Path | str = "/") -> Host:
    """Returns the cores and the memory of this process now. ``root`` holds ``proc`` and ``sys/fs/cgroup``."""
    root = Path(root)
    threads, threads_origin = _threads(root)
    available, memory_origin = _available_memory(root)
    return Host(threads, available, threads_origin, memory_origin)


def default_kv_budget(available_bytes: int, models_sharing: int = 1) -> int:
    """Returns the bytes of KV cache for one of ``models_sharing`` models in this process."""
    return int(available_bytes * KV_SHARE / max(1, models_sharing))


def _threads(root: Path) -> tuple[int, str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in _cgroup_folders(root, "cpu") if (quota := _cpu_quota(folder)) is not None]
    if quotas:
        granted = max(1, math.ceil(min(quotas)))
        if granted <= cores:
            return granted, "cgroup CPU quota"
    return cores, "CPU affinity"


def _cpu_quota(folder: Path) -> float | None:
    if (text := _read(folder / "cpu.max")) is not None:
        quota, _, period = text.partition(" ")
        return None if quota == "max" else int(quota) / int(period or 100_000)
    quota_us, period_us = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and quota_us > 0 and period_us else None


def _available_memory(root: Path) -> tuple[int, str]:
    mapped = _mapped_weights(root)
    candidates = [
        (free, "cgroup memory limit")
        for folder in _cgroup_folders(root, "memory")
        for files in (_V2, _V1)
        if (free := _cgroup_free(folder, files, mapped)) is not None
    ]
    if (available := _meminfo_available(root)) is not None:
        candidates.append((max(0, available - mapped), "MemAvailable"))
    candidates += _rlimits(root)
    return min(candidates) if candidates else (0, "unknown")


def _mapped_weights(root: Path) -> int:
    """Returns the bytes of weights that this process reads from mapped files."""
    mapped = [line.split()[0] for line in (_read(root / "proc/self/maps") or "").splitlines() if PANELS_SUFFIX in line]
    return sum(int(end, 16) - int(start, 16) for start, _, end in (place.partition("-") for place in mapped))


def _cgroup_free(folder: Path, files: _MemoryFiles, mapped: int) -> int | None:
    limit, usage = _number(folder / files.limit), _number(folder / files.usage)
    if limit is None or usage is None or limit >= _NO_LIMIT:
        return None
    reclaimable = 0
    for line in (_read(folder / "memory.stat") or "").splitlines():
        key, _, value = line.partition(" ")
        if key == files.reclaimable:
            reclaimable = int(value)
    return max(0, limit - usage + max(0, reclaimable - mapped))


def _meminfo_available(root: Path) -> int | None:
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _rlimits(root: Path) -> Iterator[tuple[int, str]]:
    """Returns the bytes that this process can still map under its own limits (``ulimit -v`` and ``-d``)."""
    limits = (_read(root / "proc/self/limits") or "").splitlines()
    used = dict(line.split(":", 1) for line in (_read(root / "proc/self/status") or "").splitlines() if ":" in line)
    for name, mapped, option in _RLIMITS:
        soft = next((line.removeprefix(name).split()[0] for line in limits if line.startswith(name)), "unlimited")
        if soft != "unlimited" and mapped in used:
            yield max(0, int(soft) - int(used[mapped].split()[0]) * 1024), f"ulimit {option}"


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """Returns this process's cgroup (v2, or else the v1 controller's) and its ancestors, because each can set a limit.

    In a container the path in ``/proc/self/cgroup`` is often the host's and does not exist below the mount. In that
    case the root of the mount is the container's own cgroup.
    """
    mount = root / "sys/fs/cgroup"
    paths = {"": "/", controller: "/"}
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        for name in names.split(","):
            paths[name] = path
    if (mount / "cgroup.controllers").exists():
        top, path = mount, paths[""]
    else:
        joined = next((entry for entry in sorted(mount.glob("*")) if controller in entry.name.split(",")), None)
        top, path = joined or mount / controller, paths[controller]
    group = top / path.strip("/")
    below = [group, *group.parents]
    return [folder for folder in below[: below.index(top) + 1] if folder.is_dir()] if top in below else [top]


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text is not None and text.lstrip("-").isdigit() else None


def trim_heap() -> None:
    """Trims glibc's heap after a load or an unload; this takes milliseconds. Has no effect with other C libraries."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def launched(environ: Mapping[str, str]) -> bool:
    """Returns whether a launcher such as torchrun has started this process as one rank of several."""
    return "RANK" in environ and int(environ.get("WORLD_SIZE", "1")) > 1


def ranks_here(size: int, environ: Mapping[str, str]) -> int:
    """Returns how many of ``size`` ranks share this machine."""
    return int(environ.get("LOCAL_WORLD_SIZE", "1")) if launched(environ) else size


def thread_count(settings: EngineSettings, host: Host) -> int:
    """Returns the number of threads for this process: the setting, or else its share of the container's cores."""
    return settings.threads or max(1, host.threads // ranks_here(settings.tensor_parallel_size, os.environ))
