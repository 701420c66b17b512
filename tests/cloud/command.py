"""The command as a process, and in this one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlserver_torch_stream.cli.cloud import main

PROCESS = [sys.executable, "-m", "mlserver_torch_stream.cli", "cloud"]


def cloud(*arguments: object) -> int:
    """The exit status, in this process."""
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


def trouble(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """The error of an output row: its own, or that in the response of a row that was refused; None of an answer."""
    error = row["error"] or (row["response"] or {}).get("body", {}).get("error")
    return None if error is None else dict(error)


def joined(folder: Path, start: str = "part-") -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.glob(f"{start}*.jsonl")))
