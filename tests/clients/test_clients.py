"""Every cell of the table of docs/compatibility.md, client by feature, against real servers.

Each client runs in its own process, and in its own environment if it needs other packages than the tests.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from tests import markdown
from tests.batches.conftest import serve_batches
from tests.clients.environments import make_environment
from tests.clients.page import ROWS, Row
from tests.server.conftest import QUIET
from tests.server.harness import HOST, Model, Server, free_ports, serve
from tests.server.seldon_proxy import seldon_proxy
from tests.server.test_lifecycle_loading import loading_server
from tests.torchserve.test_grpc_predictions import SEQUENCES, STATEFUL
from tests.torchserve.workshop import HELLO, write_handler

_RUN_S = 400
_NARROW = {"max_queued_requests": 1, "max_num_seqs": 1}
_SLOW = {"MLSERVER_TORCH_STREAM_FAULTS": "decode:1:slow=0.02"}

pytestmark = pytest.mark.slow


class Clients:
    """The outcome of each client's features; a client runs when its outcome is first requested."""

    def __init__(self, tiny_model: Path, folder: Path) -> None:
        self._tiny_model = tiny_model
        self._folder = folder
        self._python = lru_cache(lambda name: str(make_environment(folder, name)))
        self._ended: dict[str, dict[str, Any]] = {}
        self._servers = ExitStack()
        self._addresses = lru_cache(self._serve)

    def ended(self, row: Row) -> Mapping[str, Any]:
        if row.key not in self._ended:
            with ExitStack() as servers:
                self._ended[row.key] = self._run(row, {**self._addresses(), **self._more(row, servers)})
        return self._ended[row.key]

    def close(self) -> None:
        self._servers.close()

    def _run(self, row: Row, addresses: Mapping[str, str]) -> dict[str, Any]:
        python = self._python(row.environment) if row.environment else sys.executable
        command = [python, str(row.script), json.dumps(addresses)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_RUN_S, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        ended: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return ended

    def _serve(self) -> dict[str, str]:
        models = [Model("tiny", str(self._tiny_model)), Model("narrow", str(self._tiny_model), extra=_NARROW)]
        store = self._folder / "batches"
        server = self._servers.enter_context(serve_batches(self._folder / "models", models, store, _SLOW))
        return _addresses(server)

    def _more(self, row: Row, servers: ExitStack) -> dict[str, str]:
        """Returns what only this client needs: a server that is loading, or Seldon's proxy and models named for it."""
        folder = self._folder / f"for-{row.key}"
        if row.key == "openai":
            folder.mkdir()
            loading, gate = servers.enter_context(loading_server(self._tiny_model, folder))
            return {"loading": loading.url, "gate": str(gate)}
        if row.key == "openai-behind-seldon":
            versions = {"tiny": "tiny_1", "narrow": "narrow_1"}
            models = [
                Model("tiny_1", str(self._tiny_model)),
                Model("narrow_1", str(self._tiny_model), extra=_NARROW),
            ]
            server = servers.enter_context(serve(folder / "models", models, settings=QUIET, environment=_SLOW))
            return {**_addresses(server), "seldon": servers.enter_context(seldon_proxy(server, versions))}
        return {}


def _addresses(server: Server) -> dict[str, str]:
    return {"rest": server.url, "grpc": server.grpc_target, "triton": server.triton_target}


@pytest.fixture(scope="module")
def clients(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    made = Clients(tiny_model, tmp_path_factory.mktemp("clients"))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("row", "feature"),
    [pytest.param(row, feature, id=f"{row.key}-{feature}") for row in ROWS for feature in row.tried],
)
def test_a_cell(clients: Clients, row: Row, feature: str) -> None:
    trouble = clients.ended(row)["features"][feature]
    assert trouble is None, trouble


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.key)
def test_the_version_of_a_client_is_that_which_ran(clients: Clients, row: Row) -> None:
    assert clients.ended(row)["version"] == row.version


_HERE = Path(__file__).parent
_AGENT_RUN_S = 300
_900_TOKENS_TAKE_SECONDS = {"MLSERVER_TORCH_STREAM_FAULTS": "decode:1:slow=0.002"}  # a timeout of 0.3 s comes first
TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call>{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %} {{ call.function.arguments.place }}{% endfor %}\n{% endfor %}"
)


@pytest.fixture(scope="module")
def tools(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = Model("tiny", str(tiny_model), extra={"chat_template": TOOL_TEMPLATE})
    folder = tmp_path_factory.mktemp("agents") / "models"
    with serve(folder, [model], settings=QUIET, environment=_900_TOKENS_TAKE_SECONDS) as server:
        yield server


@pytest.mark.parametrize(
    ("environment", "scripts"),
    [
        ("anthropic", ("tools_of_anthropic",)),
        ("litellm-mcp", ("tools_of_litellm",)),
        ("openai", ("tools_of_openai", "responses_of_openai")),
        ("langchain-openai", ("agents_of_langchain",)),
        ("pydantic-ai", ("agents_of_pydantic_ai",)),
        ("openai-agents", ("agents_of_openai",)),
        ("instructor", ("typed_of_instructor",)),
        ("llama-index", ("chats_of_llama_index",)),
        ("huggingface-hub", ("chats_of_huggingface_hub",)),
    ],
)
def test_tool_loops_and_typed_answers(
    environment: str, scripts: tuple[str, ...], tools: Server, tmp_path: Path
) -> None:
    python = make_environment(tmp_path, environment)
    for script in scripts:
        command = [str(python), str(_HERE / f"{script}.py"), tools.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_AGENT_RUN_S, check=False)
        assert done.returncode == 0, done.stderr[-3000:]


_TS = "mlserver_torch_stream.TorchServeRuntime"
_STUBS_RUN_S = 120


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    """The server, and the address of the port with TorchServe's gRPC service."""
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
    """The environment's interpreter, and the folder with the stubs."""
    folder = tmp_path_factory.mktemp("stubs")
    python = make_environment(folder, "grpcio-tools")
    for name in ("inference.proto", "torchserve_calls.py"):
        shutil.copy(_HERE / name, folder / name)
    packages = next(python.parents[1].glob("lib/python3*/site-packages"))  # with google/rpc/status.proto
    options = ["-I.", f"-I{packages}", "--python_out=.", "--grpc_python_out=."]
    command = [str(python), "-m", "grpc_tools.protoc", *options, "inference.proto"]
    subprocess.run(command, cwd=folder, check=True, timeout=_STUBS_RUN_S)
    return python, folder


def _run(client: tuple[Path, Path], *arguments: str) -> str:
    python, folder = client
    done = subprocess.run([str(python), *arguments], cwd=folder, capture_output=True, text=True, timeout=_STUBS_RUN_S)
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
