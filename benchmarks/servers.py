"""Defines what a benchmark needs of a server (it starts, becomes ready, and has endpoints), and starts ours.

Does not know what is measured, nor how other servers are started.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from benchmarks.endpoints import HOST, GrpcEndpoint, HttpEndpoint, OpenAISpelling, V2Spelling
from benchmarks.load import Endpoint
from benchmarks.process import free_ports, running

OURS = "mlserver-torch-stream"
EMBEDDED = "embedded://smollm2-135m-instruct"
_READY_S = 900.0  # the first start converts, compiles or warms
_POLL_S = 0.05
_LOG_TAIL = 1500


class StartFailed(Exception):
    """Raised if a server ends or is not ready in time; the message has the end of its log."""


@dataclass(frozen=True)
class Live:
    """A server that is ready; ``ready_s`` is the time from the start of its process."""

    pid: int
    http_port: int
    ready_s: float
    endpoints: Mapping[str, Endpoint]
    grpc_port: int = 0  # 0: none


class Contender(Protocol):
    """One server of a comparison."""

    @property
    def name(self) -> str: ...

    def versions(self) -> dict[str, str]: ...

    def start(self, folder: Path) -> AbstractContextManager[Live]:
        """Starts it with an empty folder for its settings and log. Raises StartFailed if it does not become ready."""


@dataclass(frozen=True)
class Ours:
    """``mlserver start`` with one model, as a user would start it, from the environment of ``python``."""

    uri: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    name: str = OURS
    python: Path = Path(sys.executable)
    model: str = "bench"

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in ("mlserver", "torch", "transformers")}

    @contextmanager
    def start(self, folder: Path) -> Iterator[Live]:
        http_port, grpc_port, metrics_port = free_ports(3)
        ports = {"http_port": http_port, "grpc_port": grpc_port, "metrics_port": metrics_port}
        parameters = {"uri": self.uri, "extra": dict(self.extra)}
        described = {"implementation": "mlserver_torch_stream.TorchStreamRuntime", "parameters": parameters}
        write_mlserver_folder(folder, {self.model: described}, ports)
        log = folder / "server.log"
        began = time.perf_counter()
        command = [str(self.python.with_name("mlserver")), "start", str(folder)]
        environment = {**clean_environment(), "MLSERVER_TORCH_STREAM_BATCH_STORE": str(folder / "batches")}
        with running(command, environment, log, folder) as process:
            wait_until_ready(process, lambda: answering(http_port, f"/v2/models/{self.model}/ready") == 200, log)
            rest: Endpoint = HttpEndpoint(http_port, V2Spelling(self.model))
            openai = HttpEndpoint(http_port, OpenAISpelling(self.model, {"ignore_eos": True}))
            endpoints = {"rest": rest, "grpc": GrpcEndpoint(grpc_port, self.model, http_port), "openai": openai}
            yield Live(process.pid, http_port, time.perf_counter() - began, endpoints, grpc_port)


def write_mlserver_folder(folder: Path, models: Mapping[str, Mapping[str, Any]], more: Mapping[str, Any]) -> None:
    """Writes model-settings.json for each name in ``models``, and settings.json with ``more`` settings."""
    settings = {"host": HOST, "debug": False, "parallel_workers": 0, "gzip_enabled": False, **more}
    (folder / "settings.json").write_text(json.dumps(settings))
    for name, described in models.items():
        (folder / name).mkdir()
        (folder / name / "model-settings.json").write_text(json.dumps({"name": name, **described}))


def clean_environment() -> dict[str, str]:
    """Returns this process's variables without settings of MLServer, which would change the server."""
    kept = "MLSERVER_TORCH_STREAM_CACHE"
    return {name: text for name, text in os.environ.items() if name == kept or not name.startswith("MLSERVER_")}


def wait_until_ready(process: subprocess.Popen[bytes], is_ready: Callable[[], bool], log: Path) -> None:
    """Raises StartFailed with the end of the log if the process ends first, or takes too long."""
    end = time.monotonic() + _READY_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise StartFailed(f"ended with {process.returncode}: {_tail(log)}")
        if is_ready():
            return
        time.sleep(_POLL_S)
    raise StartFailed(f"not ready within {_READY_S:.0f} s: {_tail(log)}")


def answering(port: int, path: str) -> int | None:
    """Returns the status of ``GET path``; None if nothing listens yet."""
    with (
        closing(http.client.HTTPConnection(HOST, port, timeout=5)) as connection,
        suppress(OSError, http.client.HTTPException),
    ):
        connection.request("GET", path)
        return connection.getresponse().status
    return None


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-_LOG_TAIL:].strip()
