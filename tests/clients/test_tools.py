"""Programs that evaluate or front a server run unchanged, with its address, a model, its tokenizer and a load."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import plain_http
from tests.clients.environments import make_environment, make_node_environment
from tests.clients.forced_calls import CALLS, anthropic_call, forced_calls, responses_call
from tests.clients.open_webui_bodies import CHATS, FORCED, RESPONSES
from tests.clients.test_clients import TOOL_TEMPLATE
from tests.server.conftest import QUIET
from tests.server.harness import HOST, Model, Server, free_ports, serve
from tests.waiting import wait_until

_HERE = Path(__file__).parent
_RUN_S = 3000  # minutes of it are starts of processes that import transformers
_NODE_S = 300
_AGENT_S = 400
_ECHO = "echo forty-two"
_AGENT_CONTEXT = 131_072  # tokens; nearly each byte is one
_PROXY_START_S = 300
_STOP_S = 30

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = Model("tiny", str(tiny_model), extra={"chat_template": TOOL_TEMPLATE})
    with serve(tmp_path_factory.mktemp("tools") / "models", [model], settings=QUIET) as running:
        yield running


def _run(python: str, script: str, *arguments: str) -> None:
    command = [python, str(_HERE / f"{script}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_RUN_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("tool", ["aiperf", "guidellm"])
def test_a_load_is_answered_streamed_and_counted(tool: str, server: Server, tiny_model: Path, tmp_path: Path) -> None:
    _run(str(make_environment(tmp_path, tool)), f"loads_of_{tool}", server.url, str(tiny_model))


@pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="VLLM_PYTHON names no interpreter with vLLM")
def test_a_load_of_vllm_is_answered_and_streamed(server: Server, tiny_model: Path) -> None:
    _run(os.environ["VLLM_PYTHON"], "loads_of_vllm", server.url, str(tiny_model))


def test_a_tool_loop_through_litellms_proxy(server: Server, tmp_path: Path) -> None:
    python = make_environment(tmp_path, "litellm-proxy")
    with _litellm_proxy(python, server, tmp_path) as url:
        _run(str(python), "tools_of_openai", url)


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
@pytest.mark.parametrize("client", ["openai", "anthropic", "ai"])
def test_tool_loops_of_nodes_clients(client: str, server: Server, tmp_path: Path) -> None:
    script = _HERE / f"tools_of_node_{client}.mjs"
    copy = shutil.copy(script, make_node_environment(tmp_path, "node"))  # Node looks for packages beside the script
    done = subprocess.run(["node", copy, server.url], capture_output=True, text=True, timeout=_NODE_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def agents_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose model has a context for an agent's instructions, and samples answers that end by themselves."""
    folder = tmp_path_factory.mktemp("agents")
    long = folder / "long"
    shutil.copytree(tiny_model, long)
    config = json.loads((long / "config.json").read_text())
    (long / "config.json").write_text(json.dumps({**config, "max_position_embeddings": _AGENT_CONTEXT}))
    sampling = {"temperature": 1.0}
    model = Model("tiny", str(long), extra={"chat_template": TOOL_TEMPLATE, "default_sampling": sampling})
    environment = {
        "MLSERVER_TORCH_STREAM_MODEL_ALIASES": "claude-*=tiny",
        "MLSERVER_TORCH_STREAM_UNKNOWN_PARAMETERS": "ignore",  # Codex sends hosted tools, which are left out then
    }
    with serve(folder / "models", [model], settings=QUIET, environment=environment) as running:
        yield running


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_claude_code_calls_a_tool_twice_and_prints_an_answer(agents_server: Server, tmp_path: Path) -> None:
    claude = make_node_environment(tmp_path, "claude") / "node_modules" / ".bin" / "claude"
    options = ["--output-format", "json", "--allowedTools", "Bash(echo:*)"]
    with forced_calls(agents_server, anthropic_call("Bash", {"command": _ECHO})) as (url, sent):
        variables = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none"}
        answer = json.loads(_ask(tmp_path, variables, claude, "-p", "Where is it?", *options))
    assert not answer["is_error"] and answer["result"] and answer["usage"]["output_tokens"] > 0
    body, status = sent[-1]
    blocks = [block for message in body["messages"] if isinstance(message["content"], list)
              for block in message["content"]]  # fmt: skip
    results = [block for block in blocks if block["type"] == "tool_result"]
    assert status == 200 and [block["content"] for block in results] == ["forty-two"] * CALLS, results


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_codex_calls_a_tool_twice_and_prints_an_answer(agents_server: Server, tmp_path: Path) -> None:
    codex = make_node_environment(tmp_path, "codex") / "node_modules" / ".bin" / "codex"
    with forced_calls(agents_server, responses_call("exec_command", {"cmd": _ECHO})) as (url, sent):
        provider = f'{{name="ours", base_url="{url}/v1", wire_api="responses"}}'
        options = ["-c", "model_provider=ours", "-c", f"model_providers.ours={provider}", "-m", "tiny", "--json"]
        options += ["--skip-git-repo-check", "--sandbox", "danger-full-access"]  # of which a container has none
        lines = _ask(tmp_path, {}, codex, "exec", *options, "Where is it?").splitlines()
    events = [json.loads(line) for line in lines if line.startswith("{")]
    assert events[-1]["type"] == "turn.completed" and events[-1]["usage"]["output_tokens"] > 0
    body, status = sent[-1]
    results = [str(item["output"]) for item in body["input"] if item.get("type") == "function_call_output"]
    assert status == 200 and len(results) == CALLS and all("forty-two" in result for result in results)


def _ask(home: Path, variables: dict[str, str], program: Path, *arguments: str) -> str:
    """Returns the output of a command-line agent; ``home`` is its home and working directory."""
    environment = {**os.environ, "HOME": str(home), "CODEX_HOME": str(home), **variables}
    done = subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, timeout=_AGENT_S, check=False, env=environment,
        cwd=home, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", CHATS)
def test_the_chats_of_open_webui(name: str, server: Server) -> None:
    events = _answer(server, "/v1/chat/completions", CHATS[name])
    choices = [event["choices"][0] for event in events if event["choices"]]
    pieces = [choice.get("delta") or choice["message"] for choice in choices]
    assert any(piece.get("content") or piece.get("tool_calls") for piece in pieces)
    assert choices[-1]["finish_reason"] in ("length", "stop", "tool_calls")
    assert events[-1]["usage"]["completion_tokens"] > 0


def test_a_tool_loop_of_open_webui(server: Server) -> None:
    messages = FORCED["messages"]
    for turn in range(3):
        call = _joined_call(_answer(server, "/v1/chat/completions", {**FORCED, "messages": messages}))
        assert json.loads(call["function"]["arguments"])["place"] in ("home", "work")
        result = {"role": "tool", "tool_call_id": call["id"], "content": f"no, turn {turn}"}
        messages = [*messages, {"role": "assistant", "content": "", "tool_calls": [call]}, result]
    last = {**CHATS["the result of a tool"], "messages": messages}
    assert _answer(server, "/v1/chat/completions", last)[-1]["usage"]["completion_tokens"] > 0


def _joined_call(events: list[Any]) -> dict[str, Any]:
    """Returns the only call of a stream."""
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    pieces = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    arguments = "".join(piece["function"]["arguments"] for piece in pieces)
    function = {**pieces[0]["function"], "arguments": arguments}
    return {"id": pieces[0]["id"], "type": "function", "function": function}


def test_the_responses_of_open_webui(server: Server) -> None:
    done = _answer(server, "/v1/responses", RESPONSES)[-1]["response"]
    assert done["output"] and done["usage"]["output_tokens"] > 0


def _answer(server: Server, path: str, body: dict[str, Any]) -> list[Any]:
    """Returns the events of a stream, or the whole answer as the only event."""
    answer = plain_http.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    if not body["stream"]:
        return [answer.json()]
    data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


@contextmanager
def _litellm_proxy(python: Path, server: Server, folder: Path) -> Iterator[str]:
    """Yields the address of a proxy whose model ``tiny`` is that of the server."""
    backend = {"model": "openai/tiny", "api_base": f"{server.url}/v1", "api_key": "none"}
    config, log_path = folder / "config.yaml", folder / "proxy.log"
    config.write_text(json.dumps({"model_list": [{"model_name": "tiny", "litellm_params": backend}]}))
    (port,) = free_ports(1)
    alone = {"LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    command = [str(python.with_name("litellm")), "--config", str(config), "--host", HOST, "--port", str(port)]
    with log_path.open("wb") as log:
        proxy = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **alone}, cwd=folder)
    try:
        url = f"http://{HOST}:{port}"
        wait_until(lambda: proxy.poll() is not None or _is_alive(url), "LiteLLM's proxy", _PROXY_START_S)
        assert proxy.poll() is None, log_path.read_text(errors="replace")
        yield url
    finally:
        proxy.terminate()
        proxy.wait(_STOP_S)


def _is_alive(url: str) -> bool:
    try:
        return plain_http.get(f"{url}/health/liveliness", timeout=5).is_success
    except httpx.TransportError:
        return False
