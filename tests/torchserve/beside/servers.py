"""TorchServe 0.12 as its package starts it, and our server, on one model store.

Know nothing of requests. TorchServe needs a Java runtime, 11 or later.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import yaml

from benchmarks.process import running
from tests import plain_http
from tests.server.harness import HOST, free_ports, serve
from tests.torchserve.beside.store import Stored
from tests.waiting import wait_until

MOST_BYTES = 1_000_000  # of a request's body, on both
_START_S = 240.0
_NAMES = ("inference", "management", "metrics")


@dataclass(frozen=True)
class Addresses:
    """Where one of the two is asked."""

    inference: str
    management: str
    log: Path


def missing() -> str:
    """What TorchServe lacks to run here; empty if nothing."""
    if shutil.which("java") is None:
        return "there is no Java runtime, which TorchServe needs (for example openjdk-17-jre-headless)"
    if importlib.util.find_spec("ts") is None:
        return "torchserve is not installed"
    return ""


@contextmanager
def torchserve(
    folder: Path,
    store: Path,
    models: Sequence[Stored],
    properties: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Addresses]:
    """Yields once each model has a worker that is ready. ``folder``: its log, its settings, its temporary files."""
    (folder / "tmp").mkdir(parents=True)
    ports = dict(zip((*_NAMES, "grpc_inference", "grpc_management", "worker"), free_ports(6), strict=True))
    config = folder / "config.properties"
    config.write_text(_properties(ports) + "".join(f"{key}={value}\n" for key, value in (properties or {}).items()))
    command = [sys.executable, "-m", "ts.model_server", "--start", "--foreground", "--ncs", "--disable-token-auth"]
    command += ["--model-store", str(store), "--ts-config", str(config), "--models", *(each.file for each in models)]
    locations = {"LOG_LOCATION": str(folder), "METRICS_LOCATION": str(folder)}
    temporary = {"TEMP": str(folder / "tmp"), "TMPDIR": str(folder / "tmp")}
    own = {**os.environ, **locations, **temporary, **(environment or {})}
    log = folder / "server.log"
    with running(command, own, log, folder) as process:
        addresses = Addresses(f"http://{HOST}:{ports['inference']}", f"http://{HOST}:{ports['management']}", log)
        wait_until(lambda: _all_ready(process, addresses, models), "TorchServe's workers", _START_S)
        yield addresses


def _properties(ports: Mapping[str, int]) -> str:
    lines = {f"{name}_address": f"http://{HOST}:{ports[name]}" for name in _NAMES}
    lines |= {f"{name}_port": str(ports[name]) for name in ("grpc_inference", "grpc_management")}
    lines |= {"enable_envvars_config": "false", "initial_worker_port": str(ports["worker"])}
    lines |= {"max_request_size": str(MOST_BYTES), "default_workers_per_model": "1", "vmargs": "-Xmx512m"}
    return "".join(f"{name}={value}\n" for name, value in lines.items())


def _all_ready(process: subprocess.Popen[bytes], addresses: Addresses, models: Sequence[Stored]) -> bool:
    assert process.poll() is None, addresses.log.read_text(errors="replace")[-3000:]
    for each in models:
        path = f"{addresses.management}/models/{each.name}/{each.version}"
        with suppress(httpx.TransportError):  # not listening yet
            answer = plain_http.get(path, timeout=10)
            if answer.status_code == 200 and _workers(answer.text) == ["READY"]:
                continue
        return False
    return True


def _workers(described: str) -> list[str]:
    return [worker["status"] for worker in yaml.safe_load(described)[0]["workers"]]


@contextmanager
def ours(
    folder: Path,
    store: Path,
    models: Sequence[Stored],
    which: str = "shim",
    environment: Mapping[str, str] | None = None,
) -> Iterator[Addresses]:
    """``which``: the ``ts`` that handlers import."""
    for each in models:
        place = folder / "models" / f"{each.name}-{each.version}"
        place.mkdir(parents=True)
        parameters = {"uri": str(store / each.file), "version": each.version, "extra": {"ts": which}}
        settings = {"name": each.name, "implementation": "mlserver_torch_stream.TorchServeRuntime"}
        (place / "model-settings.json").write_text(json.dumps({**settings, "parameters": parameters}))
    own = {"MLSERVER_TORCH_STREAM_MAX_BODY_BYTES": str(MOST_BYTES), **(environment or {})}
    settings = {"debug": False, "parallel_workers": 0, "gzip_enabled": False}
    with serve(folder / "models", [], settings=settings, environment=own) as server:
        yield Addresses(server.url, server.url, server.log_path)
