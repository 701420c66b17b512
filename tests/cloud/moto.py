"""Moto as a process: S3 and SQS on this machine, in memory, for tests, the demo and measurements."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx

from benchmarks.process import free_ports

_START_S = 60.0
_STOP_S = 20.0


@contextmanager
def moto(port: int = 0) -> Iterator[dict[str, str]]:
    """Yields the environment in which clients find it. Port 0 means a free port."""
    port = port or free_ports(1)[0]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(url, process)
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        process.terminate()
        process.wait(_STOP_S)


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end and process.poll() is None:
        with suppress(httpx.TransportError):
            httpx.get(url, timeout=5)
            return
        time.sleep(0.02)
    raise RuntimeError("moto did not start; it is in the extra [test]")
