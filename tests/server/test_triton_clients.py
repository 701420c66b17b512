"""Triton's own client, over gRPC and HTTP, with threads and with asyncio, unchanged and in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.server import triton_scripts
from tests.server.harness import Server

pytestmark = pytest.mark.slow


def _run(script: str, target: str) -> str:
    done = subprocess.run([sys.executable, "-c", script, target], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("script", ["GRPC", "GRPC_AIO"])
def test_over_grpc(triton: Server, script: str) -> None:
    """Streams, unary calls, health, configuration, statistics; what the client cancels is freed."""
    before = triton.counters("tiny")
    assert _run(getattr(triton_scripts, script), triton.triton_target) == "done\n"
    after = triton.wait_for("tiny", lambda now: now["running_sequences"] == 0)
    assert after["cancelled_sequences"] > before["cancelled_sequences"]
    triton.wait_for("other", lambda now: now["running_sequences"] == 0)
    assert "Traceback" not in triton.log


@pytest.mark.parametrize("script", ["HTTP", "HTTP_AIO"])
def test_over_http(triton: Server, script: str) -> None:
    assert _run(getattr(triton_scripts, script), triton.url.removeprefix("http://")) == "done\n"
