"""A server that ``serve-torchserve`` starts without a model: its ports are open, and register models."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf import empty_pb2

from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.handlers.config.registration import read_registration, registered_settings
from mlserver_torch_stream.handlers.config.server_config import ServerConfig
from tests import plain_http
from tests.server.harness import HOST, Server, exit_code, free_ports, get_ready, serve
from tests.torchserve.inference_client import Stub
from tests.torchserve.workshop import without_torchserve, write_mar
from tests.waiting import wait_until

_TIMEOUT_S = 60.0
_START_S = 180.0
_TYPES = "def handle(data, context):\n    return None if data is None else [type(row).__name__ for row in data]\n"
_MODEL = {"modelName": "assistant", "modelVersion": "1.0", "handler": "h.py"}
_DEFAULTS = """
default_workers_per_model=2
default_response_timeout=33
job_queue_size=7
service_envelope=body
metrics_config=metrics.yaml
install_py_dep_per_model=false
models={"assistant": {"1.0": {"batchSize": 3, "responseTimeout": 44}}}
"""
_METRICS = "model_metrics:\n  counter:\n    - {name: C, unit: count, dimensions: [Level]}\n"


@dataclass(frozen=True)
class _Empty:
    store: Path
    server: Server
    ports: tuple[int, ...]  # of our own: management, TorchServe's gRPC, Triton's

    def ask(self, method: str, path: str) -> httpx.Response:
        url = f"http://{HOST}:{self.ports[0]}/models{path}"
        return plain_http.request(method, url, timeout=_TIMEOUT_S, trust_env=False)

    def managed(self, method: str, path: str = "") -> Any:
        response = self.ask(method, path)
        assert response.status_code == 200, response.text
        return response.json()


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Empty]:
    """TorchServe's own command line, which names no archive of the model store."""
    folder = tmp_path_factory.mktemp("empty")
    (folder / "model_store").mkdir()
    write_mar(folder / "model_store" / "assistant.mar", {"h.py": _TYPES}, _MODEL)
    (folder / "metrics.yaml").write_text(_METRICS)
    management, inference, triton = ports = tuple(free_ports(3))
    own = f"management_address=http://{HOST}:{management}\n"
    allowed = "disable_token_authorization=true\nenable_model_api=true\n"
    (folder / "config.properties").write_text(f"{own}{allowed}{_DEFAULTS}")
    command = ["mlserver-torch-stream", "torchserve", "--start", "--model-store", "model_store"]
    environment = {
        "MLSERVER_TORCH_STREAM_GRPC_PORT_TORCHSERVE": str(inference),
        "MLSERVER_TORCH_STREAM_GRPC_PORT_TRITON": str(triton),
        "MLSERVER_TORCH_STREAM_DRAIN_DELAY": "15",
        **without_torchserve(folder),
    }
    with serve(folder, [], command=command, environment=environment, ready=False) as server:
        wait_until(lambda: _listens(server.http_port), "started", _START_S)
        yield _Empty(folder / "model_store", server, ports)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def test_a_server_without_a_model_is_healthy_and_has_all_its_ports(empty: _Empty) -> None:
    assert "no model is loaded: the management API registers models" in empty.server.log
    ping = plain_http.get(f"{empty.server.url}/ping", timeout=_TIMEOUT_S)
    assert (ping.status_code, ping.json()) == (200, {"status": "Healthy"})
    assert (get_ready(empty.server).status_code, get_ready(empty.server).json()) == (200, {"ready": True})
    assert empty.managed("GET") == {"models": []}
    missing = plain_http.post(f"{empty.server.url}/predictions/assistant", content=b"x", timeout=_TIMEOUT_S)
    assert (missing.status_code, missing.json()["type"]) == (404, "ModelNotFoundException")
    assert all(_listens(port) for port in empty.ports)
    for port in (empty.ports[1], empty.server.grpc_port):
        with grpc.insecure_channel(f"{HOST}:{port}") as channel:
            answer = Stub(channel).Ping(empty_pb2.Empty(), timeout=_TIMEOUT_S)
            assert json.loads(answer.health) == {"status": "Healthy"}


def test_a_model_that_is_registered_takes_the_defaults_of_the_configuration_and_answers(empty: _Empty) -> None:
    """Its handler gets bodies rather than rows, as ``service_envelope`` defines."""
    said = empty.managed("POST", "?url=assistant.mar")["status"]
    assert said == 'Model "assistant" Version: 1.0 registered with 2 initial workers'
    (described,) = empty.managed("GET", "/assistant")
    assert len(described["workers"]) == 2
    shown = {key: described[key] for key in ("minWorkers", "maxWorkers", "batchSize", "responseTimeout")}
    assert shown == {"minWorkers": 2, "maxWorkers": 2, "batchSize": 3, "responseTimeout": 44}
    assert described["jobQueueStatus"]["remainingCapacity"] == 7
    url = f"{empty.server.url}/predictions/assistant"
    answered = plain_http.post(url, content=b"x", timeout=_TIMEOUT_S)
    assert (answered.status_code, answered.text) == (200, "bytearray")
    empty.managed("DELETE", "/assistant")


def test_a_server_without_a_model_refuses_models_after_sigterm_closes_all_its_ports_and_ends(empty: _Empty) -> None:
    """The second signal ends the delay of the drain."""
    assert empty.managed("GET") == {"models": []}
    empty.server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: get_ready(empty.server).status_code == 503, "not ready")
    assert empty.ask("POST", "?url=assistant.mar").status_code == 503
    empty.server.process.send_signal(signal.SIGTERM)
    assert exit_code(empty.server) == 0
    assert not any(map(_listens, (empty.server.http_port, empty.server.grpc_port, *empty.ports)))
    assert "Traceback" not in empty.server.log


@pytest.mark.long
def test_a_server_that_cannot_open_a_port_of_ours_ends_with_one_line_before_it_has_a_model(tmp_path: Path) -> None:
    environment = {
        "MLSERVER_MODEL_REPOSITORY_IMPLEMENTATION": "mlserver_torch_stream.GuardedModelRepository",
        "MLSERVER_TORCH_STREAM_MANAGEMENT_PORT_TORCHSERVE": str(free_ports(1)[0]),
    }
    with serve(tmp_path / "models", [], environment=environment, ready=False) as server:
        assert exit_code(server) == 1
    assert server.log.count("MANAGEMENT_TOKEN_FILE") == 1 and "Traceback" not in server.log, server.log


def test_a_request_beats_the_archives_yaml_which_beats_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "metrics.yaml").write_text(_METRICS)
    (tmp_path / "config.properties").write_text(_DEFAULTS)
    config = ServerConfig.read(tmp_path / "config.properties")
    path = tmp_path / "assistant.mar"
    write_mar(path, {"h.py": _TYPES, "c.yaml": "batchSize: 5\n"}, {**_MODEL, "configFile": "c.yaml"})

    def extra(**given: str) -> dict[str, Any]:
        asked = read_registration({"url": "assistant.mar", **given})
        return dict(registered_settings(asked, path, config)["parameters"]["extra"])

    of_all = {
        "metrics_config": str(tmp_path / "metrics.yaml"),
        "service_envelope": "body",
        "install_py_dep_per_model": False,
        "jobQueueSize": 7,
    }
    assert extra() == {**of_all, "minWorkers": 2, "maxWorkers": 0, "responseTimeout": 44}
    asked = {"minWorkers": 0, "maxWorkers": 0, "responseTimeout": 9, "batchSize": 8}
    assert extra(initial_workers="0", response_timeout="9", batch_size="8") == {**of_all, **asked}
    write_mar(path, {"h.py": _TYPES, "c.yaml": "minWorkers: 1\nmaxWorkers: 4\n"}, {**_MODEL, "configFile": "c.yaml"})
    own = {"minWorkers": 1, "maxWorkers": 4, "responseTimeout": 44, "batchSize": 3}
    assert extra(initial_workers="3") == {**of_all, **own}


def test_a_configuration_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot read .*none\.properties"):
        ServerConfig.read(tmp_path / "none.properties")
