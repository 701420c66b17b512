"""OpenAI's API below ``/predictions/{model}``: for a handler that implements it, and for a generating model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import markdown, plain_http
from tests.clients.environments import make_environment
from tests.server.harness import HOST, Server
from tests.server.openai import DONE, events, joined, refused, texts

_TIMEOUT_S = 60.0
_BOTH = pytest.mark.parametrize("model", ["speaker", "tokens"])
_VERSIONED = pytest.mark.parametrize("version", ["/1.0", ""])


@pytest.fixture(scope="module")
def server(predictions_server: Server) -> Server:
    return predictions_server


def _ask(server: Server, path: str, body: Any = None, method: str = "POST") -> httpx.Response:
    return plain_http.request(method, f"{server.url}/predictions/{path}", json=body, timeout=_TIMEOUT_S)


def _chat(**more: Any) -> dict[str, Any]:
    """Returns a chat as the launcher's clients send it, with the hub's name of the model."""
    messages = [{"role": "user", "content": "Hello"}]
    return {"model": "meta-llama/Llama-3.1-8B", "messages": messages, "max_tokens": 5, "temperature": 0, **more}


def _completion(**more: Any) -> dict[str, Any]:
    return {"model": "meta-llama/Llama-3.1-8B", "prompt": "Hello", "max_tokens": 5, "temperature": 0, **more}


@pytest.mark.long
@_BOTH
@_VERSIONED
@pytest.mark.parametrize(("endpoint", "body"), [("chat/completions", _chat()), ("completions", _completion())])
def test_a_stream_joins_to_the_whole_answer(
    server: Server, model: str, version: str, endpoint: str, body: dict[str, Any]
) -> None:
    path = f"{model}{version}/v1/{endpoint}"
    whole = _ask(server, path, body)
    assert whole.status_code == 200, whole.text
    streamed = _ask(server, path, {**body, "stream": True})
    assert streamed.headers["transfer-encoding"] == "chunked"
    *chunks, end = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
    assert end == DONE
    assert joined([json.loads(chunk) for chunk in chunks]) == texts(whole.json()) != [""]
    if model == "tokens":
        assert events(streamed)[-1] == DONE and whole.json()["model"] == "tokens"
        own = plain_http.post(f"{server.url}/v1/{endpoint}", json={**body, "model": "tokens"}, timeout=_TIMEOUT_S)
        assert texts(own.json()) == texts(whole.json())


def test_a_handlers_replies_are_forwarded_as_they_are(server: Server) -> None:
    whole = _ask(server, "speaker/1.0/v1/completions", _completion())
    assert whole.text.startswith('{\n  "id": "1"') and "content-type" not in whole.headers
    with plain_http.stream(
        "POST", f"{server.url}/predictions/speaker/1.0/v1/completions", json=_completion(stream=True)
    ) as streamed:
        pieces = [piece for piece in streamed.iter_raw() if piece]
    assert b"".join(pieces).count(b"data: ") == 3 and b"".join(pieces).endswith(b"data: [DONE]\n\n")


@_BOTH
@_VERSIONED
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_the_models_are_listed(server: Server, model: str, version: str, method: str) -> None:
    listed = _ask(server, f"{model}{version}/v1/models", method=method).json()
    assert listed["object"] == "list"
    assert [each["id"] for each in listed["data"]] == ["served" if model == "speaker" else "tokens"]


def test_an_unknown_endpoint_is_named(server: Server) -> None:
    refused_by_handler = _ask(server, "speaker/1.0/v1/embeddings", {})
    assert refused_by_handler.status_code == 404
    assert refused_by_handler.json()["message"] == "Unknown API endpoint: v1/embeddings"
    unknown = _ask(server, "tokens/1.0/v1/embeddings", {})
    assert unknown.status_code == 404 and unknown.json()["type"] == "ResourceNotFoundException"
    assert "v1/embeddings; the endpoints are /predictions/tokens/v1/chat/completions" in unknown.json()["message"]
    for path in ("tokens/2.0/v1/completions", "speaker/2.0/v1/completions"):
        assert _ask(server, path, _completion()).json()["type"] == "ModelVersionNotFoundException"
    assert _ask(server, "nobody/v1/completions", _completion()).json()["type"] == "ModelNotFoundException"
    assert _ask(server, "tokens/1.0/v1/completions", method="GET").status_code == 405
    explained = _ask(server, "../explanations/tokens/1.0/v1/completions", _completion())
    assert explained.status_code == 400 and "generates tokens" in explained.json()["message"]


def test_errors_of_a_model_that_generates_tokens_are_openais(server: Server) -> None:
    response = _ask(server, "tokens/1.0/v1/chat/completions", _chat(max_tokns=3))
    assert response.status_code == 400 and refused(response)["param"] == "max_tokns"


def test_a_version_of_the_name_v1_is_a_version(server: Server) -> None:
    assert _ask(server, "older/v1/v1/completions", _completion()).status_code == 200
    assert _ask(server, "older/v1/completions", _completion()).json()["message"] == "Unknown API endpoint: completions"


@_BOTH
def test_the_commands_of_the_page_are_answered(server: Server, model: str) -> None:
    (block,) = [each for each in markdown.blocks("docs/torchserve.md") if "/predictions/model/" in each.code]
    commands = block.code.replace("127.0.0.1:8080/predictions/model", f"{HOST}:{server.http_port}/predictions/{model}")
    commands = commands.replace("curl ", "curl -sS --fail ")
    done = subprocess.run(["bash", "-euc", commands], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    assert all(part in done.stdout for part in ('"chat.completion"', "data: [DONE]", '"list"'))


# Reads an event of each chunk, as TorchServe's examples/large_models/utils/test_llm_streaming_response.py does.
_EXAMPLE = """
import json, sys, requests
endpoint, body = sys.argv[2], json.loads(sys.argv[3])
said = ""
with requests.post(sys.argv[1], json=body, stream=True, timeout=60) as response:
    for chunk in response.iter_content(chunk_size=None):
        if chunk:
            chunk = chunk.decode("utf-8")
            if chunk.startswith("data:"):
                chunk = chunk[len("data:"):].split("\\n")[0].strip()
                if chunk.startswith("[DONE]"):
                    continue
            choice = json.loads(chunk)["choices"][0]
            said += choice["delta"].get("content", "") if "chat" in endpoint else choice["text"]
print(json.dumps(said))
"""


@_BOTH
@pytest.mark.parametrize(("endpoint", "body"), [("v1/chat/completions", _chat()), ("v1/completions", _completion())])
def test_torchserves_example_client_reads_every_piece(
    server: Server, model: str, endpoint: str, body: dict[str, Any]
) -> None:
    path = f"{model}/1.0/{endpoint}"
    command = [sys.executable, "-c", _EXAMPLE, f"{server.url}/predictions/{path}", endpoint]
    command.append(json.dumps({**body, "stream": True}))
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    assert [json.loads(done.stdout)] == texts(_ask(server, path, body).json()) != [""]


# What users of the SDK write: the answers of both kinds of request, and the models.
_SDK = """
import json, sys
from openai import OpenAI
client = OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
messages = [{"role": "user", "content": "Hello"}]
chat = dict(model="hub/name", messages=messages, max_tokens=5, temperature=0)
text = dict(model="hub/name", prompt="Hello", max_tokens=5, temperature=0)
print(json.dumps([
    client.chat.completions.create(**chat).choices[0].message.content,
    "".join(c.choices[0].delta.content or "" for c in client.chat.completions.create(stream=True, **chat)),
    client.completions.create(**text).choices[0].text,
    "".join(c.choices[0].text for c in client.completions.create(stream=True, **text)),
    [model.id for model in client.models.list()],
]))
"""


@pytest.mark.slow
def test_the_openai_sdk_reaches_both(server: Server, tmp_path: Path) -> None:
    python = make_environment(tmp_path, "openai")
    for model, listed in (("speaker", "served"), ("tokens", "tokens")):
        for version in ("/1.0", ""):
            command = [str(python), "-c", _SDK, f"{server.url}/predictions/{model}{version}/v1"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
            assert done.returncode == 0, done.stderr[-3000:]
            chat, chat_streamed, text, text_streamed, models = json.loads(done.stdout)
            assert chat == chat_streamed != "" and text == text_streamed != "" and models == [listed]
