"""Describes the machine on which a result was measured."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

_BUSY = 0.25  # load for each core


def describe() -> dict[str, Any]:
    described: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "cores": _cores(),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
        "load_before": psutil.getloadavg()[0],
    }
    with suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        described["gpu"] = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    return described


def chip() -> str:
    """Returns the name of this machine's file of results, made from the CPU's family or name."""
    name, info = _cpu_name(), _cpu_info()
    if "EPYC" in name or "Ryzen" in name:
        family = {"25": "zen4" if "avx512f" in info.get("flags", "") else "zen3", "26": "zen5"}
        return family.get(info.get("cpu family", ""), "amd")
    if "Xeon" in name:
        return "xeon-amx" if "amx_bf16" in info.get("flags", "") else "xeon"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def warning(described: dict[str, Any]) -> str | None:
    """Returns a warning if other processes are busy, because they make servers that use OpenMP very slow."""
    load = described["load_before"]
    if load <= _BUSY * described["cores"]:
        return None
    return f"the machine is busy (load {load:.1f} on {described['cores']} cores): these figures mean little"


def show(described: dict[str, Any], **figures: Any) -> None:
    """Prints the machine and what was measured as one line of JSON, and a warning if the machine was busy before."""
    print(json.dumps({**described, **figures}))
    if (busy := warning(described)) is not None:
        print(busy, file=sys.stderr)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_info() -> dict[str, str]:
    """Returns the fields of /proc/cpuinfo for the first CPU; empty without that file."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {}


def _cpu_name() -> str:
    return _cpu_info().get("model name") or platform.processor() or platform.machine()
