"""A real ``mlserver start`` process on free ports, and what tests ask it.

Knows nothing of the models' answers. Every wait has a limit, and started processes are stopped by their pids.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx

from tests import plain_http
from tests.server.fork_server import ForkedProcess, can_fork, fork_server

HOST = "127.0.0.1"
PACKAGE_SPELLING = "mlserver_torch_stream.TorchStreamRuntime"
MODULE_SPELLING = "mlserver_torch_stream.runtime.TorchStreamRuntime"
TORCHSERVE_PORT = "MLSERVER_TORCH_STREAM_GRPC_PORT_TORCHSERVE"
TRITON_PORT = "MLSERVER_TORCH_STREAM_GRPC_PORT_TRITON"
_START_S = 180.0
_EXIT_S = 30.0
_STOP_S = 20.0  # less than the grace of streams in flight: a server without any ends at once


@dataclass(frozen=True)
class Model:
    """One ``model-settings.json``."""

    name: str
    uri: str | None
    implementation: str = PACKAGE_SPELLING
    version: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        parameters: dict[str, Any] = {"extra": dict(self.extra)}
        if self.uri is not None:
            parameters["uri"] = self.uri
        if self.version is not None:
            parameters["version"] = self.version
        return {"name": self.name, "implementation": self.implementation, "parameters": parameters}


@dataclass(frozen=True)
class Server:
    """A running server: its ports, its log, and its counters."""

    http_port: int
    grpc_port: int
    metrics_port: int
    log_path: Path
    process: subprocess.Popen[bytes] | ForkedProcess
    triton_port: int = 0  # 0: it has no such port

    @property
    def triton_target(self) -> str:
        return f"{HOST}:{self.triton_port}"

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.http_port}"

    @property
    def grpc_target(self) -> str:
        return f"{HOST}:{self.grpc_port}"

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def counters(self, model: str) -> dict[str, float]:
        """Returns our metrics of one model, by their names without the prefix."""
        text = plain_http.get(f"http://{HOST}:{self.metrics_port}/metrics").text
        found = {}
        for line in text.splitlines():
            if line.startswith("torch_stream_") and f'model="{model}"' in line:
                name = line.partition("{")[0].removeprefix("torch_stream_").removesuffix("_total")
                found[name] = float(line.rpartition(" ")[2])
        return found

    def wait_for(
        self, model: str, condition: Callable[[dict[str, float]], bool], seconds: float = 60.0
    ) -> dict[str, float]:
        """Waits until the counters meet the condition, and returns them."""
        end = time.monotonic() + seconds
        while not condition(counters := self.counters(model)):
            if time.monotonic() > end:
                raise AssertionError(f"not within {seconds:.0f} s: {counters}")
            time.sleep(0.04)  # each look takes some milliseconds of the server
        return counters


def exit_code(server: Server) -> int:
    return server.process.wait(_EXIT_S)


def get_ready(server: Server, path: str = "health") -> httpx.Response:
    return plain_http.get(f"{server.url}/v2/{path}/ready")


def free_ports(count: int) -> list[int]:
    """Returns ports that this process has not returned before, for servers that listen some seconds later.

    They are below those that Linux gives to connections, and each process of a run has other ones. So no client and no
    other server takes such a port before its server listens.
    """
    free: list[int] = []
    while len(free) < count:
        port = next(_PORTS)
        with socket.socket() as probe, suppress(OSError):  # another program has it
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
            free.append(port)
    return free


def _own_ports() -> Iterator[int]:
    """Yields the ports of this process again and again, from a random one on, because other runs have the same ones."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
    ports = range(12_000 + worker * 2_500, 12_000 + (worker + 1) * 2_500)
    begin = random.randrange(len(ports))
    return cycle((*ports[begin:], *ports[:begin]))


_PORTS = _own_ports()


@contextmanager
def serve(
    folder: Path,
    models: Sequence[Model],
    *,
    settings: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    ready: bool = True,
    triton: bool = False,
    command: Sequence[str] | None = None,
    forked: bool = True,
) -> Iterator[Server]:
    """Runs ``mlserver start folder``. If ``settings`` is None, there is no settings.json, and the environment sets the
    ports.

    With ``ready`` false, yields at once, for servers that are expected to fail. With ``triton``, has Triton's port.
    ``command`` is another program of this environment, or the path of a program, with its arguments, in the folder.
    With ``forked`` false, runs in a separate Python, which imports all that the server needs, for tests of the start
    and memory.
    """
    http_port, grpc_port, metrics_port, *more = free_ports(4 if triton else 3)
    ports = {"http_port": http_port, "grpc_port": grpc_port, "metrics_port": metrics_port, "host": HOST}
    folder.mkdir(parents=True, exist_ok=True)
    for model in models:
        (folder / model.name).mkdir()
        (folder / model.name / "model-settings.json").write_text(json.dumps(model.settings()))
    if settings is not None:
        (folder / "settings.json").write_text(json.dumps({**settings, **ports}))
    server_environment = {f"MLSERVER_{key.upper()}": str(value) for key, value in ports.items()}
    if command is not None:  # serve-torchserve would take 7070
        server_environment[TORCHSERVE_PORT] = str(free_ports(1)[0])
    if triton:
        server_environment[TRITON_PORT] = str(more[0])
    log_path = folder.parent / f"{folder.name}.log"
    program, *arguments = command or ("mlserver", "start", str(folder))
    script = [str(Path(sys.executable).parent / program), *arguments]
    variables = {**_clean_environment(), **server_environment, **(environment or {})}
    with log_path.open("wb") as log:
        process: subprocess.Popen[bytes] | ForkedProcess
        if forked and can_fork() and fork_server().suits(variables):
            process = fork_server().start(script, folder, variables, log)
        else:
            process = subprocess.Popen(script, stdout=log, stderr=subprocess.STDOUT, cwd=folder, env=variables)
    server = Server(http_port, grpc_port, metrics_port, log_path, process, *more)
    try:
        if ready:
            _wait_until_ready(server)
        yield server
    finally:
        _stop(server)


def _clean_environment() -> dict[str, str]:
    """Returns the test's own environment without settings that would affect the server."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MLSERVER_MODEL_")}


def _wait_until_ready(server: Server) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        if server.process.poll() is not None:
            raise AssertionError(f"the server ended with {server.process.returncode}:\n{server.log}")
        with suppress(httpx.TransportError):  # not listening yet
            models = plain_http.post(f"{server.url}/v2/repository/index", json={}, timeout=5).json()
            if models and all(model["state"] == "READY" for model in models):
                return
        time.sleep(0.1)
    raise AssertionError(f"the server was not ready within {_START_S:.0f} s:\n{server.log}")


def _stop(server: Server) -> None:
    server.process.terminate()
    try:
        server.process.wait(_STOP_S)
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"the server did not end within {_STOP_S:.0f} s:\n{server.log}") from error
    finally:
        server.process.kill()
        server.process.wait(_STOP_S)
