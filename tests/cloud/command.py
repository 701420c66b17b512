"""Runs the command in this process or as a process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mlserver_torch_stream.cli.cloud import main

FULL_SIZE = "FULL_SIZE" in os.environ  # of the largest tests, which take an hour then
PROCESS = [sys.executable, "-m", "mlserver_torch_stream.cli", "cloud"]


def cloud(*arguments: object) -> int:
    """Runs the command in this process, and returns its exit status."""
    try:
        return main([str(each) for each in arguments])
    except SystemExit as left:
        return int(left.code or 0)


def start(*arguments: object, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*PROCESS, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **(environment or {})},
    )


def finish(process: subprocess.Popen[bytes], seconds: float = 120.0) -> tuple[int, bytes, str]:
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, out, err.decode()


def peak_mib(
    process: subprocess.Popen[bytes], until: Callable[[], object] = lambda: False, seconds: float = 900.0
) -> float:
    """Returns the peak memory of the command, watched until it ends or ``until`` returns true."""
    peak, end = 0.0, time.monotonic() + seconds
    while process.poll() is None and not until():
        assert time.monotonic() < end, "the run does not end"
        status = Path(f"/proc/{process.pid}/status").read_text()
        found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
        peak = max([peak, *(int(each) / 1024 for each in found)])
        time.sleep(0.1)
    return peak


def trouble(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the error of an output row: its own, or that in the response to a refused row; None for an answer."""
    error = row["error"] or (row["response"] or {}).get("body", {}).get("error")
    return None if error is None else dict(error)


def joined(folder: Path, start: str = "part-") -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.glob(f"{start}*.jsonl")))
