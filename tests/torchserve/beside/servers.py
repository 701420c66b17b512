"""TorchServe 0.12 as its package starts it, and our server, with one model store.

TorchServe needs a Java runtime, 11 or later.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import yaml

from benchmarks.process import running
from benchmarks.servers import answering, wait_until_ready
from tests import plain_http
from tests.server.harness import HOST, free_ports
from tests.torchserve.beside.store import Stored
from tests.waiting import wait_until

MAX_BYTES = 1_000_000  # of a request's body, on both
_START_S = 900.0
_NAMES = ("inference", "management", "metrics")
_STORE = "model-store"


@dataclass(frozen=True)
class Addresses:
    """The addresses of one of the two servers."""

    inference: str
    management: str
    grpc_inference: str
    token: str = ""  # of the management API, where it needs one


def missing() -> str:
    """Returns what TorchServe lacks to run here; empty if nothing."""
    if shutil.which("java") is None:
        return "there is no Java runtime, which TorchServe needs (for example openjdk-17-jre-headless)"
    if importlib.util.find_spec("ts") is None:
        return "torchserve is not installed"
    return ""


@contextmanager
def torchserve(
    folder: Path,
    models: Sequence[Stored],
    properties: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    tokens: bool = False,
) -> Iterator[Addresses]:
    """Yields once each model has a worker that is ready. ``folder`` is a model store, as KServe mounts it."""
    config, ports = configure(folder, models, properties)
    command = [sys.executable, "-m", "ts.model_server", "--start", "--foreground", "--ncs"]
    command += [] if tokens else ["--disable-token-auth"]
    command += ["--enable-model-api", "--model-store", str(folder / _STORE), "--ts-config", str(config)]
    with TemporaryDirectory() as own:
        log = Path(own, "server.log")
        locations = {name: own for name in ("LOG_LOCATION", "METRICS_LOCATION", "TEMP", "TMPDIR")}
        with running(command, {**os.environ, **locations, **(environment or {})}, log, Path(own)) as process:
            if tokens:
                wait_until(lambda: _key(Path(own)), "TorchServe's key_file.json", _START_S)
            addresses = _addresses(ports["inference"], ports["management"], ports["grpc_inference"], _key(Path(own)))
            wait_until_ready(process, lambda: _all_ready(addresses, models), log)
            yield addresses


def _addresses(inference: int, management: int, grpc_inference: int, token: str) -> Addresses:
    """Returns the addresses for these ports."""
    rest = (f"http://{HOST}:{port}" for port in (inference, management))
    return Addresses(*rest, f"{HOST}:{grpc_inference}", token)


def _key(folder: Path) -> str:
    """Returns the management API's token, which TorchServe writes when it starts; empty if there is none."""
    path = folder / "key_file.json"
    with suppress(FileNotFoundError, json.JSONDecodeError):  # not yet written
        return str(json.loads(path.read_text())["management"]["key"])
    return ""


def configure(
    folder: Path, models: Sequence[Stored], properties: Mapping[str, str] | None = None
) -> tuple[Path, Mapping[str, int]]:
    """Writes ``config.properties``, which both servers read, with free ports for TorchServe."""
    ports = dict(zip((*_NAMES, "grpc_inference", "grpc_management", "worker"), free_ports(6), strict=True))
    lines = {f"{name}_address": f"http://{HOST}:{ports[name]}" for name in _NAMES}
    lines |= {f"{name}_port": str(ports[name]) for name in ("grpc_inference", "grpc_management")}
    lines |= {"enable_envvars_config": "false", "initial_worker_port": str(ports["worker"])}
    lines |= {"max_request_size": str(MAX_BYTES), "default_workers_per_model": "1", "vmargs": "-Xmx512m"}
    lines |= {"load_models": ",".join(each.file for each in models), **(properties or {})}
    (folder / "config").mkdir(exist_ok=True)
    path = folder / "config/config.properties"
    path.write_text("".join(f"{name}={value}\n" for name, value in lines.items()))
    return path, ports


def _all_ready(addresses: Addresses, models: Sequence[Stored]) -> bool:
    for each in models:
        path = f"{addresses.management}/models/{each.name}/{each.version}"
        with suppress(httpx.TransportError):  # not listening yet
            headers = {"authorization": f"Bearer {addresses.token}"} if addresses.token else {}
            answer = plain_http.get(path, headers=headers, timeout=10)
            if answer.status_code == 200 and _workers(answer.text) == ["READY"]:
                continue
        return False
    return True


def _workers(described: str) -> list[str]:
    return [worker["status"] for worker in yaml.safe_load(described)[0]["workers"]]


@contextmanager
def ours(
    folder: Path,
    models: Sequence[Stored],
    which: str = "shim",
    environment: Mapping[str, str] | None = None,
    token: str = "",
) -> Iterator[Addresses]:
    """Runs ``serve-torchserve`` on the same folder, with its configuration.

    ``which`` is the ``ts`` that handlers import. ``token`` is what its management API requires; empty means nothing.
    """
    http_port, grpc_port, metrics_port, management, grpc_inference = free_ports(5)
    own = {f"MLSERVER_{name}": str(port) for name, port in (("HTTP_PORT", http_port), ("GRPC_PORT", grpc_port))}
    own |= {"MLSERVER_METRICS_PORT": str(metrics_port), "MLSERVER_MODEL_EXTRA": json.dumps({"ts": which})}
    prefix = "MLSERVER_TORCH_STREAM"
    own |= {f"{prefix}_MANAGEMENT_PORT_TORCHSERVE": str(management), f"{prefix}_MODEL_STORE": str(folder / _STORE)}
    own |= {f"{prefix}_GRPC_PORT_TORCHSERVE": str(grpc_inference), f"{prefix}_ALLOWED_URLS": "file://.*"}
    own |= {f"{prefix}_MANAGEMENT_TOKEN": token} if token else {f"{prefix}_DISABLE_TOKEN_AUTHORIZATION": "true"}
    command = [sys.executable, "-m", "mlserver_torch_stream.cli", "serve-torchserve", str(folder)]
    with TemporaryDirectory() as place:
        log = Path(place, "server.log")
        with running(command, {**os.environ, **own, **(environment or {})}, log, Path(place)) as process:
            addresses = _addresses(http_port, management, grpc_inference, token)
            wait_until_ready(process, lambda: answering(http_port, "/v2/health/ready") == 200, log)
            yield addresses
