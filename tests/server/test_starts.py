"""Starts that fail: an error status for the supervisor, one line that says why, and no traceback around it."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import QUIET
from tests.server.harness import HOST, Model, Server, serve
from tests.server.inflight import rest_unary
from tests.server.test_lifecycle_drain import exit_code, get_ready

_FOREIGN = """
from mlserver import MLModel


class Fine(MLModel):
    async def load(self):
        return True


class Broken(MLModel):
    async def load(self):
        raise ValueError("a foreign fault")
"""


_STARTS_S = 180.0  # torch is imported before a load can fail: seconds, on a busy machine many


def foreign(tmp_path: Path) -> dict[str, str]:
    """The environment with MLServer models that are not ours."""
    (tmp_path / "foreign_models.py").write_text(_FOREIGN)
    return {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}


def ended(server: Server) -> tuple[int, str]:
    return server.process.wait(_STARTS_S), server.log


@pytest.mark.parametrize(
    ("extra", "reason"), [({"max_contxt": 64}, "max_contxt"), ({"tokenizer": "/nowhere"}, "/nowhere")]
)
def test_a_model_of_ours_that_cannot_load_ends_the_server_with_an_error(
    tiny_model: Path, tmp_path: Path, extra: dict[str, str | int], reason: str
) -> None:
    models = [Model("tiny", str(tiny_model), extra=extra), Model("fine", None, "foreign_models.Fine")]
    with serve(tmp_path / "models", models, settings=QUIET, environment=foreign(tmp_path), ready=False) as server:
        status, log = ended(server)
    assert status == 1
    lines = [line for line in log.splitlines() if reason in line]
    assert len(lines) == 1 and "Cannot load model 'tiny'" in lines[0], log
    assert "Traceback" not in log


def test_a_variable_of_ours_that_is_wrong_ends_the_server_with_an_error(tiny_model: Path, tmp_path: Path) -> None:
    wrong = {"MLSERVER_TORCH_STREAM_DRAIN_GRAZE": "1"}
    with serve(tmp_path / "models", [Model("tiny", str(tiny_model))], environment=wrong, ready=False) as server:
        status, log = ended(server)
    assert status == 1
    assert "did you mean MLSERVER_TORCH_STREAM_DRAIN_GRACE" in log and "Traceback" not in log


def test_a_foreign_model_that_cannot_load_is_mlservers_own_affair(tiny_model: Path, tmp_path: Path) -> None:
    models = [Model("tiny", str(tiny_model)), Model("broken", None, "foreign_models.Broken")]
    with serve(tmp_path / "models", models, settings=QUIET, environment=foreign(tmp_path), ready=False) as server:
        status, log = ended(server)
    assert status == 0
    assert "ValueError: a foreign fault" in log


def test_a_load_that_fails_later_ends_nothing_and_the_idle_server_ends_at_once(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Seldon's agent starts servers without models and loads them by the repository API, or models come later.

    The ports are taken by then, by the server itself.
    """
    folder = tmp_path / "models"
    environment = {**foreign(tmp_path), "MLSERVER_TORCH_STREAM_DRAIN_GRACE": "600"}
    with serve(folder, [Model("fine", None, "foreign_models.Fine")], environment=environment) as server:
        for name, uri in (("tiny", str(tiny_model)), ("lost", "/nowhere")):
            (folder / name).mkdir()
            (folder / name / "model-settings.json").write_text(json.dumps(Model(name, uri).settings()))

        def load(name: str) -> httpx.Response:
            return httpx.post(f"{server.url}/v2/repository/models/{name}/load", timeout=120)

        failed = load("lost")
        assert failed.status_code == 500 and "no such file or folder: /nowhere" in failed.json()["error"]
        assert load("tiny").status_code == 200
        assert load("lost").status_code == 500
        assert rest_unary(server, "tiny", max_tokens=1).code == 200
        assert get_ready(server).status_code == 200
        server.process.terminate()
        assert exit_code(server) == 0, server.log


@pytest.mark.parametrize("port", ["http_port", "grpc_port", "metrics_port"])
def test_a_busy_port_is_named_in_one_line(port: str, tiny_model: Path, tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind((HOST, 0))
        holder.listen()
        taken = holder.getsockname()[1]
        environment = {f"MLSERVER_{port.upper()}": str(taken)}
        with serve(
            tmp_path / "models", [Model("tiny", str(tiny_model))], environment=environment, ready=False
        ) as server:
            status, log = ended(server)
    assert status == 1
    lines = [line for line in log.splitlines() if "The server cannot start" in line]
    assert len(lines) == 1 and f"port {taken} ({port})" in lines[0]
    assert "Traceback" not in log and "Loaded the weights" not in log
