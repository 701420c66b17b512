"""What a result must say about the machine that it was had on.

Knows nothing of what is measured.
"""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

_BUSY = 0.25  # of a core


def describe() -> dict[str, Any]:
    described: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "cores": _cores(),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
        "load_before": _load(),
    }
    with suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        described["gpu"] = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    return described


def warning(described: dict[str, Any]) -> str | None:
    """Said where other processes have been busy: OpenMP servers collapse beside other load."""
    load = described["load_before"]
    if load is None or load <= _BUSY * described["cores"]:
        return None
    return f"the machine is busy (load {load:.1f} on {described['cores']} cores): these figures mean little"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _load() -> float | None:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
