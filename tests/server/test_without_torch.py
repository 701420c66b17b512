"""A server whose models vLLM runs needs no torch: requirements-vllm.txt has all that it imports."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import grpc
import pytest
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub

from tests.engine.wire_worker import interpreter
from tests.server import openai, v2
from tests.server.conftest import QUIET
from tests.server.harness import Model, Server, serve
from tests.server.without_torch import REQUIREMENTS, linked_environment, new_environment

_ROOT = Path(__file__).parents[2]
_START = "from mlserver.cli import main; main()"
_BUILD = """
import sys
from mlserver_torch_stream.loading import build
from mlserver_torch_stream.settings import parse_settings
build(parse_settings(sys.argv[1], {}, environ={}), "", print)
"""
_MAX_MIB = 250
_INSTALL_S = 1800
_TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def torchless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return linked_environment(tmp_path_factory.mktemp("torchless") / "env")


@pytest.fixture(scope="module")
def doors(torchless: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with _served(torchless, folder, tiny_model) as running:
        yield running


def _served(python: Path, folder: Path, model: Path) -> AbstractContextManager[Server]:
    models = folder / "models"
    environment = {"MLSERVER_TORCH_STREAM_VLLM_PYTHON": str(interpreter(folder))}
    return serve(
        models,
        [Model("tiny", str(model), extra={"vllm": {}})],
        settings=QUIET,
        environment=environment,
        command=(str(python), "-c", _START, "start", str(models)),
        forked=False,
    )


def _answers_everywhere(server: Server) -> None:
    chat = openai.whole(server, openai.CHAT, openai.talk(max_tokens=6))
    assert chat["usage"]["completion_tokens"] == 6
    chunks = openai.stream(server, openai.CHAT, openai.talk(max_tokens=6))
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert text == chat["choices"][0]["message"]["content"]
    forced = openai.talk(max_tokens=6, tools=[_TOOL], tool_choice="required")
    assert openai.whole(server, openai.CHAT, forced)["usage"]["completion_tokens"] == 6
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    assert openai.whole(server, openai.CHAT, openai.talk(max_tokens=6, response_format=schema))
    with grpc.insecure_channel(server.grpc_target) as channel:
        reply = GRPCInferenceServiceStub(channel).ModelInfer(v2.grpc_request("tiny", "Hello", max_tokens=6))
    assert v2.grpc_reply(reply).text


@pytest.mark.long
def test_a_server_without_torch_answers_chats_tools_schemas_and_grpc(torchless: Path, doors: Server) -> None:
    imported = subprocess.run([torchless, "-c", "import torch"], capture_output=True, text=True, timeout=60)
    assert "No module named 'torch'" in imported.stderr
    _answers_everywhere(doors)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_server_without_torch_is_small(doors: Server) -> None:
    _answers_everywhere(doors)
    status = Path(f"/proc/{doors.process.pid}/status").read_text()
    resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    assert resident // 1024 <= _MAX_MIB


def test_a_model_of_this_packages_engine_is_refused_by_name_without_torch(torchless: Path, tiny_model: Path) -> None:
    ended = subprocess.run([torchless, "-c", _BUILD, tiny_model], capture_output=True, text=True, timeout=120)
    assert "LoadFailed: this environment has no torch" in ended.stderr
    assert "parameters.extra.vllm" in ended.stderr


def test_a_command_that_computes_with_torch_says_that_it_needs_it(torchless: Path, tiny_model: Path) -> None:
    program = "import sys; from mlserver_torch_stream.cli import main; sys.exit(main())"
    ended = subprocess.run([torchless, "-c", program, "plan", tiny_model], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (1, "error: plan needs torch, which is not installed here\n")


def test_the_versions_are_those_of_the_constraints_and_torch_is_not_among_them() -> None:
    locked, listed = (
        set(re.findall(r"^[\w.-]+==\S+", path.read_text(encoding="utf-8"), re.MULTILINE))
        for path in (_ROOT / "constraints.txt", REQUIREMENTS)
    )
    assert listed <= locked
    assert not [line for line in listed if line.startswith(("torch", "accelerate", "gguf", "nvidia", "triton="))]


@pytest.mark.slow
def test_pip_makes_such_an_environment(tiny_model: Path, tmp_path: Path) -> None:
    python = new_environment(tmp_path / "env")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "-r", REQUIREMENTS], check=True, timeout=_INSTALL_S)
    subprocess.run([*pip, "--no-deps", _ROOT], check=True, timeout=_INSTALL_S)
    with _served(python, tmp_path, tiny_model) as server:
        _answers_everywhere(server)
