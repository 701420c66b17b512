"""Starts that fail: an error status for the supervisor, one line with the reason, and no traceback."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from mlserver.settings import Settings

from mlserver_torch_stream.server.lifecycle.ports import port_problem
from mlserver_torch_stream.server.options import ServerOptions
from tests.server.conftest import QUIET
from tests.server.harness import HOST, Model, Server, free_ports, serve

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
    """The environment in which MLServer finds models that are not ours."""
    (tmp_path / "foreign_models.py").write_text(_FOREIGN)
    return {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}


def ended(server: Server) -> tuple[int, str]:
    return server.process.wait(_STARTS_S), server.log


@pytest.mark.parametrize(
    ("extra", "reason"),
    [({"max_contxt": 64}, "max_contxt"), pytest.param({"tokenizer": "/nowhere"}, "/nowhere", marks=pytest.mark.slow)],
)
def test_a_model_of_ours_that_cannot_load_ends_the_server_with_an_error(
    tiny_model: Path, tmp_path: Path, extra: dict[str, str | int], reason: str
) -> None:
    models = [Model("tiny", str(tiny_model), extra=extra), Model("fine", None, "foreign_models.Fine")]
    place, environment = tmp_path / "models", foreign(tmp_path)
    with serve(place, models, settings=QUIET, environment=environment, ready=False) as server:
        status, log = ended(server)
    assert status == 1
    lines = [line for line in log.splitlines() if reason in line]
    assert len(lines) == 1 and "Cannot load model 'tiny'" in lines[0], log
    assert "Traceback" not in log


def test_a_variable_of_ours_that_is_wrong_ends_the_server_with_an_error(tiny_model: Path, tmp_path: Path) -> None:
    wrong = {"MLSERVER_TORCH_STREAM_DRAIN_GRAZE": "1"}
    with serve(
        tmp_path / "models", [Model("tiny", str(tiny_model))], settings=QUIET, environment=wrong, ready=False
    ) as server:
        status, log = ended(server)
    assert status == 1
    assert "did you mean MLSERVER_TORCH_STREAM_DRAIN_GRACE" in log and "Traceback" not in log


_GUARDED = {"MLSERVER_MODEL_REPOSITORY_IMPLEMENTATION": "mlserver_torch_stream.GuardedModelRepository"}


@pytest.mark.parametrize(
    ("repository", "said"),
    [
        pytest.param(_GUARDED, "the key file /nowhere/keys cannot be read", id="no-file"),
        pytest.param({}, "MLSERVER_MODEL_REPOSITORY_IMPLEMENTATION=", id="no-repository", marks=pytest.mark.slow),
    ],
)
def test_keys_that_would_not_be_asked_for_end_the_server_with_an_error(
    repository: dict[str, str], said: str, tiny_model: Path, tmp_path: Path
) -> None:
    environment = {"MLSERVER_TORCH_STREAM_API_KEYS_FILE": "/nowhere/keys", **repository}
    models = [Model("tiny", str(tiny_model))]
    with serve(tmp_path / "models", models, settings=QUIET, environment=environment, ready=False) as server:
        status, log = ended(server)
    assert status == 1
    assert said in log and "Traceback" not in log and "Loaded the weights" not in log


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{\n  "name": "broken",\n}', ", line 3, column 1: a comma before '}'"),
        pytest.param('{"implementation": "x.Y", "parameters": 7}', "line 1: parameters: ", marks=pytest.mark.slow),
    ],
)
def test_a_settings_file_that_cannot_be_read_ends_the_server_with_its_line(
    text: str, says: str, tiny_model: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "models" / "broken" / "model-settings.json"
    broken.parent.mkdir(parents=True)
    broken.write_text(text)
    models = [Model("tiny", str(tiny_model))]
    with serve(tmp_path / "models", models, settings=QUIET, environment=_GUARDED, ready=False) as server:
        status, log = ended(server)
    assert status == 1
    lines = [line for line in log.splitlines() if str(broken) in line]
    assert len(lines) == 1 and "Cannot load model 'broken'" in lines[0] and says in lines[0], log
    assert "Traceback" not in log


@pytest.mark.long
def test_a_runtime_of_ours_that_does_not_exist_ends_a_server_without_settings(tmp_path: Path) -> None:
    wrong = tmp_path / "models" / "m" / "model-settings.json"
    wrong.parent.mkdir(parents=True)
    wrong.write_text('{"name": "m",\n "implementation": "mlserver_torch_stream.TorchStreamRuntim"}')
    with serve(tmp_path / "models", [], settings=None, ready=False, forked=False) as server:
        status, log = ended(server)
    assert status == 1
    (line,) = [line for line in log.splitlines() if "Cannot load model 'm'" in line]
    assert f"{wrong}, line 2: no runtime mlserver_torch_stream.TorchStreamRuntim; did you mean" in line


@pytest.mark.slow  # tests/settings/test_settings_file.py has the keys
def test_a_key_that_mlserver_ignores_ends_the_server_with_its_place(tiny_model: Path, tmp_path: Path) -> None:
    place = tmp_path / "models"
    (place / "stray").mkdir(parents=True)
    settings = {**Model("stray", str(tiny_model)).settings(), "max_num_seqs": 8}
    (place / "stray" / "model-settings.json").write_text(json.dumps(settings))
    with serve(place, [], settings=QUIET, ready=False) as server:
        status, log = ended(server)
    assert status == 1 and "Traceback" not in log
    assert f"{place}/stray/model-settings.json, line 1: 'max_num_seqs' belongs in parameters.extra" in log


@pytest.mark.long
def test_a_setting_of_the_server_that_mlserver_ignores_ends_the_server(tiny_model: Path, tmp_path: Path) -> None:
    """This holds if the file names another folder of models, too: MLServer uses the folder with which it is started."""
    settings = {**QUIET, "paralel_workers": 0, "model_repository_root": str(tmp_path)}
    with serve(tmp_path / "models", [Model("tiny", str(tiny_model))], settings=settings, ready=False) as server:
        status, log = ended(server)
    assert status == 1 and "Traceback" not in log
    assert "unknown key 'paralel_workers'; did you mean 'parallel_workers'?" in log


def test_a_foreign_model_that_cannot_load_is_mlservers_own_affair(tiny_model: Path, tmp_path: Path) -> None:
    models = [Model("tiny", str(tiny_model)), Model("broken", None, "foreign_models.Broken")]
    with serve(tmp_path / "models", models, settings=QUIET, environment=foreign(tmp_path), ready=False) as server:
        status, log = ended(server)
    assert status == 0
    assert "ValueError: a foreign fault" in log


@pytest.mark.parametrize("port", ["http_port", "grpc_port", "metrics_port"])
def test_a_port_that_cannot_be_listened_on_is_named(port: str) -> None:
    """The gRPC listener already has its port by then, so that a port of this process is no problem."""
    with socket.create_server((HOST, 0)) as holder, socket.create_server((HOST, 0)) as own:
        http, metrics, unused = free_ports(3)
        ports = {"http_port": http, "metrics_port": metrics, "grpc_port": own.getsockname()[1]}
        options = ServerOptions()
        assert port_problem(Settings(host=HOST, **ports), options) is None
        taken = unused if port == "grpc_port" else holder.getsockname()[1]
        problem = port_problem(Settings(host=HOST, **{**ports, port: taken}), options)
    assert problem is not None and problem.startswith(f"cannot listen on port {taken} ({port}) at {HOST}: ")


@pytest.mark.parametrize("port", ["http_port", "grpc_port", "metrics_port"])
def test_a_number_that_is_no_port_is_named(port: str) -> None:
    ports = dict(zip(("http_port", "metrics_port", "grpc_port"), free_ports(3), strict=True))
    problem = port_problem(Settings(host=HOST, **{**ports, port: 70000}), ServerOptions())
    assert problem is not None and problem.startswith(f"cannot listen on port 70000 ({port}) at {HOST}: ")


def test_a_look_at_the_ports_leaves_no_descriptor() -> None:
    with tempfile.TemporaryFile() as file, socket.create_server((HOST, 0)) as own:
        ports = dict(zip(("http_port", "metrics_port"), free_ports(2), strict=True))
        assert port_problem(Settings(host=HOST, grpc_port=own.getsockname()[1], **ports), ServerOptions()) is None
        for each in (file.fileno(), own.fileno()):
            assert [number for number in os.listdir("/proc/self/fd") if _is_of(int(number), each)] == [str(each)]


def _is_of(number: int, other: int) -> bool:
    with suppress(OSError):  # the one that listed the folder
        return os.path.sameopenfile(number, other)
    return False


_SLOW_PORTS = ("http_port", "metrics_port", "torch_stream_grpc_port_triton", "torch_stream_grpc_port_torchserve")


@pytest.mark.parametrize("port", ["grpc_port", *(pytest.param(name, marks=pytest.mark.slow) for name in _SLOW_PORTS)])
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
    assert len(lines) == 1 and f"port {taken} (" in lines[0] and port.upper() in lines[0].upper()
    assert "Traceback" not in log and "Loaded the weights" not in log


@pytest.mark.parametrize("ours", ["grpc_port_triton", "grpc_port_torchserve"])
@pytest.mark.parametrize("other", ["http_port", "metrics_port"])
def test_a_port_of_ours_is_none_of_the_others(ours: str, other: str) -> None:
    (port,) = free_ports(1)
    problem = port_problem(Settings(host=HOST, **{other: port}), ServerOptions(**{ours: port}))
    assert problem is not None and f"port {port} (MLSERVER_TORCH_STREAM_{ours.upper()})" in problem
    assert "another port of this server" in problem


def test_two_ports_of_ours_differ() -> None:
    (port,) = free_ports(1)
    problem = port_problem(Settings(host=HOST), ServerOptions(grpc_port_triton=port, grpc_port_torchserve=port))
    assert problem is not None and "GRPC_PORT_TORCHSERVE" in problem and "another port of this server" in problem
