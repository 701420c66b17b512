"""A server that ``serve-torchserve`` has started: versions, limits, and what its handlers get."""

from __future__ import annotations

import asyncio
import io
import json
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from mlserver.settings import ModelParameters, ModelSettings

from mlserver_torch_stream.errors import LoadFailed, SettingsError
from mlserver_torch_stream.handlers.config.model_config import read_config
from mlserver_torch_stream.handlers.config.worker_settings import install_requirements
from mlserver_torch_stream.handlers.runtime.build import build
from tests import plain_http
from tests.server.harness import HOST, TORCHSERVE_PORT, Server, free_ports, serve
from tests.torchserve.inference_client import PredictionsRequest, Stub
from tests.torchserve.workshop import without_torchserve, write_handler, write_mar

_TIMEOUT_S = 60.0
_PROPERTIES = """
load_models=all
metrics_mode=prometheus
decode_input_request=false
max_request_size=1000
blacklist_env_vars=.*SECRET.*
limit_max_image_pixels=false
install_py_dep_per_model=true
models={"cat": {"1.0": {"defaultVersion": true, "minWorkers": 1, "maxWorkers": 1}}}
"""
# Answers with the version of its archive, and with what it finds.
_FINDS = """
import os

def handle(data, context):
    if data is None:
        return None
    seen = {name: os.environ.get(name) for name in ("AWS_SECRET_KEY", "AWS_REGION")}
    pixels = context.system_properties["limit_max_image_pixels"]
    return [[context.manifest["model"]["modelVersion"], type(row["body"]).__name__, seen, pixels] for row in data]
"""
_WHEEL = "tiny_of_the_archive-1.0-py3-none-any.whl"


@pytest.fixture(scope="module")
def torchserve_port() -> str:
    """A free port instead of 7070."""
    return str(free_ports(1)[0])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, torchserve_port: str) -> Iterator[Server]:
    """Two versions of one model, with the older one as the default; a model with requirements; and two bad archives."""
    folder = tmp_path_factory.mktemp("layout") / "models"
    for each in ("model-store", "config"):
        (folder / each).mkdir(parents=True)
    for version in ("1.0", "2.0"):
        model = {"modelName": "cat", "modelVersion": version, "handler": "h.py"}
        write_mar(folder / f"model-store/cat-{version}.mar", {"h.py": _FINDS}, model)
    _mar_with_requirements(folder / "model-store/tiny.mar")
    (folder / "model-store/broken.tar.gz").write_bytes(b"no archive")
    failing = {"modelName": "failing", "handler": "h.py"}
    write_mar(folder / "model-store/failing.mar", {"h.py": "raise ValueError('at import')"}, failing)
    (folder / "config/config.properties").write_text(_PROPERTIES)
    command = ["mlserver-torch-stream", "serve-torchserve", str(folder)]
    own = {"AWS_SECRET_KEY": "hidden", "AWS_REGION": "shown", TORCHSERVE_PORT: torchserve_port}
    own |= without_torchserve(folder.parent)
    with serve(folder.parent / "work", [], command=command, environment=own, ready=False) as found:
        _wait_for_log(found, {"Loaded model": 3, "Couldn't load model": 2})
        yield found


def _wait_for_log(server: Server, counts: dict[str, int]) -> None:
    end = time.monotonic() + _TIMEOUT_S
    while any(server.log.count(text) < count for text, count in counts.items()):
        assert time.monotonic() < end and server.process.poll() is None, server.log
        time.sleep(0.1)


def _mar_with_requirements(path: Path) -> None:
    """Its requirements are a wheel in the archive, so that pip needs no index."""
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("tiny_of_the_archive.py", "ANSWER = 'installed'\n")
        folder = "tiny_of_the_archive-1.0.dist-info"
        packed.writestr(f"{folder}/METADATA", "Metadata-Version: 2.1\nName: tiny-of-the-archive\nVersion: 1.0\n")
        packed.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        packed.writestr(f"{folder}/RECORD", "")
    source = """
        import tiny_of_the_archive

        def handle(data, context):
            return None if data is None else [tiny_of_the_archive.ANSWER] * len(data)
    """
    model = {"modelName": "tiny", "handler": "h.py", "requirementsFile": "requirements.txt"}
    write_mar(path, {"h.py": source, "requirements.txt": f"--no-index\n./{_WHEEL}\n"}, model)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(_WHEEL, wheel.getvalue())


def _asked(server: Server, path: str) -> httpx.Response:
    return plain_http.post(f"{server.url}{path}", json={"a": 1}, timeout=_TIMEOUT_S)


def test_versions_are_served_side_by_side_and_the_default_is_the_configured_one(server: Server) -> None:
    """The same holds after both were loaded again."""
    for path, version in (("cat", "1.0"), ("cat/1.0", "1.0"), ("cat/2.0", "2.0")):
        assert _asked(server, f"/predictions/{path}").json()[0] == version, path
    assert _asked(server, "/v2/repository/models/cat/load").status_code == 200
    assert _asked(server, "/predictions/cat").json()[0] == "1.0"


def test_an_archive_that_cannot_be_loaded_costs_its_own_model_alone(server: Server) -> None:
    assert [_asked(server, f"/predictions/{name}").status_code for name in ("failing", "broken", "cat")] == [
        404,
        404,
        200,
    ]
    assert "Cannot load model 'broken.tar.gz': cannot unpack " in server.log
    assert "Cannot load model 'failing': importing h.py raised ValueError: at import" in server.log


def test_handlers_find_what_config_properties_leaves_them(server: Server) -> None:
    """The body is not decoded, one variable is hidden, and images have no size limit."""
    seen = {"AWS_SECRET_KEY": None, "AWS_REGION": "shown"}
    assert _asked(server, "/predictions/cat").json() == ["1.0", "bytearray", seen, False]


def test_the_largest_body_is_the_configured_one(server: Server) -> None:
    reply = plain_http.post(f"{server.url}/predictions/cat", content=b"x" * 1001, timeout=_TIMEOUT_S)
    assert (reply.status_code, reply.json()["type"]) == (413, "TooLongFrameException")


def test_torchserves_grpc_port_and_its_names_of_metrics_are_there(server: Server, torchserve_port: str) -> None:
    with grpc.insecure_channel(f"{HOST}:{torchserve_port}") as channel:
        request = PredictionsRequest(model_name="tiny", input={"data": b"x"})
        assert Stub(channel).Predictions(request, timeout=_TIMEOUT_S).prediction == b"installed"
    shown = plain_http.get(f"http://{HOST}:{server.metrics_port}/metrics", timeout=_TIMEOUT_S).text
    assert "ts_inference_requests_total{" in shown


def test_requirements_are_installed_where_config_properties_says_so(server: Server) -> None:
    assert _asked(server, "/predictions/tiny").text == "installed"


def test_requirements_that_cannot_be_installed_are_named(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match="the archive has no requirements"):
        install_requirements(None, tmp_path, "requirements.txt")
    (tmp_path / "requirements.txt").write_text("--no-index\nno-such-package-anywhere\n")
    with pytest.raises(LoadFailed, match=r"installing requirements\.txt failed with status 1: (?s:.*)no-such-package"):
        install_requirements(None, tmp_path, "requirements.txt")


def test_requirements_are_installed_into_no_folder_of_the_users_own(tmp_path: Path) -> None:
    write_handler(tmp_path, "def handle(data, context): ...")
    (tmp_path / "MAR-INF").mkdir()
    model = {"handler": "handler.py", "requirementsFile": "requirements.txt"}
    (tmp_path / "MAR-INF/MANIFEST.json").write_text(json.dumps({"model": model}))
    parameters = ModelParameters(uri=str(tmp_path), extra={"install_py_dep_per_model": True})
    settings = ModelSettings(
        name="open", implementation="mlserver_torch_stream.TorchServeRuntime", parameters=parameters
    )

    async def load() -> None:
        await asyncio.to_thread(build, settings, asyncio.get_running_loop())

    with pytest.raises(SettingsError, match="install_py_dep_per_model: needs an archive, not a folder"):
        asyncio.run(load())


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"blacklist_env_vars": "("}, "blacklist_env_vars: is not a regular expression"),
        ({"install_py_dep_per_model": "yes"}, "install_py_dep_per_model: Input should be a valid boolean, got 'yes'"),
        ({"service_envelope": 1}, "service_envelope: Input should be a valid string, got 1"),
    ],
)
def test_a_wrong_key_of_a_model_is_named(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=f"parameters.extra: {said}"):
        read_config({}, extra)
