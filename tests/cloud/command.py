"""The command as a process, and in this one; moto as its object store."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from mlserver_torch_stream.cli.cloud import main

PROCESS = [sys.executable, "-m", "mlserver_torch_stream.cli", "cloud"]
_START_S = 60.0


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


def joined(folder: Path, start: str = "part-") -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.glob(f"{start}*.jsonl")))


@contextmanager
def moto() -> Iterator[dict[str, str]]:
    """A running S3 and SQS; yields the environment in which clients find it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + _START_S
        while time.monotonic() < end:
            with suppress(httpx.TransportError):
                httpx.get(url, timeout=5)
                break
            time.sleep(0.02)
        else:
            raise AssertionError("moto did not start")
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        process.terminate()
        process.wait(20)
