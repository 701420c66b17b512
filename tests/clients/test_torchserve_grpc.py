"""Stubs that protoc makes for TorchServe's gRPC service, in an environment of their own, against one real server."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import markdown
from tests.clients.environments import make_environment
from tests.server.conftest import QUIET
from tests.server.harness import HOST, Model, Server, free_ports, serve
from tests.torchserve.test_grpc_predictions import SEQUENCES, STATEFUL
from tests.torchserve.workshop import HELLO, write_handler

_HERE = Path(__file__).parent
_TS = "mlserver_torch_stream.TorchServeRuntime"
_RUN_S = 120

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    """The server, and the address of the service's own port."""
    folder = tmp_path_factory.mktemp("torchserve-grpc")
    hello = write_handler(folder / "hello", HELLO)
    models = [Model(name, hello, _TS, extra={"ts": "shim"}) for name in ("hello", "assistant")]
    models.append(Model("stateful", write_handler(folder / "stateful", STATEFUL, SEQUENCES), _TS, extra={"ts": "shim"}))
    (port,) = free_ports(1)
    environment = {"MLSERVER_TORCH_STREAM_GRPC_PORT_TORCHSERVE": str(port)}
    with serve(folder / "models", models, settings=QUIET, environment=environment) as running:
        yield running, f"{HOST}:{port}"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The interpreter of the environment, and the folder of the stubs."""
    folder = tmp_path_factory.mktemp("stubs")
    python = make_environment(folder, "grpcio-tools")
    for name in ("inference.proto", "torchserve_calls.py"):
        shutil.copy(_HERE / name, folder / name)
    packages = next((folder / "grpcio-tools" / "lib").glob("python3*/site-packages"))  # with google/rpc/status.proto
    options = ["-I.", f"-I{packages}", "--python_out=.", "--grpc_python_out=."]
    command = [str(python), "-m", "grpc_tools.protoc", *options, "inference.proto"]
    subprocess.run(command, cwd=folder, check=True, timeout=_RUN_S)
    return python, folder


def _run(client: tuple[Path, Path], *arguments: str) -> str:
    python, folder = client
    done = subprocess.run([str(python), *arguments], cwd=folder, capture_output=True, text=True, timeout=_RUN_S)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def test_all_methods_on_both_ports(served: tuple[Server, str], client: tuple[Path, Path]) -> None:
    server, own = served
    for target in (server.grpc_target, own):
        assert _run(client, "torchserve_calls.py", target) == "done\n"
    assert "Traceback" not in server.log


def test_the_client_of_the_page(served: tuple[Server, str], client: tuple[Path, Path]) -> None:
    (block,) = [each for each in markdown.blocks("docs/torchserve.md") if "StreamPredictions" in each.code]
    code = block.code.replace("127.0.0.1:8081", served[0].grpc_target)
    assert _run(client, "-c", code) == block.output
