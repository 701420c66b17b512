"""Errors of OpenAI's API: a status and an error object before the first token, an error event after it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests import plain_http
from tests.server import raw
from tests.server.harness import Server
from tests.server.openai import CHAT, DONE, TEXT, events, post, prompt, refused, talk

_IMAGE = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": "http://x"}}]
_LONG = {"max_tokens": 800, "ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {}, "model"),
        (CHAT, talk(model=None), "model"),
        (CHAT, talk(model=3), "model"),
        (CHAT, {"model": "tiny"}, "messages"),
        (CHAT, talk(messages=[]), "messages"),
        (CHAT, talk(messages=["Hello"]), "messages[0]"),
        (CHAT, talk(messages=[{"content": "Hello"}]), "messages[0].role"),
        (CHAT, talk(messages=[{"role": "user"}]), "messages"),
        (CHAT, talk(_IMAGE), "messages[0].content[1].type"),
        (CHAT, talk([{"type": "text"}]), "messages[0].content[0].text"),
        (CHAT, talk(messages=[{"role": "user", "content": "a", "colour": "red"}]), "messages[0].colour"),
        (CHAT, talk(max_tokns=3), "max_tokns"),
        (CHAT, talk(max_tokens=0), "max_tokens"),
        (CHAT, talk(max_tokens=3, max_completion_tokens=4), "max_completion_tokens"),
        (CHAT, talk(temperature="0.5"), "temperature"),
        (CHAT, talk(top_logprobs=3), "top_logprobs"),
        (CHAT, talk(top_p=0), "top_p"),
        (CHAT, talk(n=1_000_000_000), "n"),
        (CHAT, talk(stop=["x"] * 1_000_000), "stop"),
        (CHAT, talk(stop=["x", ""]), "stop[1]"),
        (CHAT, talk(stop=["x" * 3000, "y" * 1097]), "stop"),
        (CHAT, talk(bad_words=["x" * 4097]), "bad_words"),
        (CHAT, talk(logit_bias={"a": 1}), "logit_bias"),
        (CHAT, talk(logit_bias={"7": "1"}), "logit_bias.7"),
        (CHAT, talk(tools=[{"type": "function", "function": {"name": "f"}}]), "tools"),
        (CHAT, talk(tool_choice="required"), "tool_choice"),
        (CHAT, talk(response_format={"type": "json"}), "response_format.type"),
        (CHAT, talk(response_format={"type": "json_schema"}), "response_format.json_schema"),
        (CHAT, talk(reasoning_effort="low"), "reasoning_effort"),
        (CHAT, talk(modalities=["text", "audio"]), "modalities"),
        (CHAT, talk(structured_outputs={"structural_tag": {}}), "structured_outputs.structural_tag"),
        (CHAT, talk(chat_template_kwargs={"tokenize": True}), "chat_template_kwargs"),
        (CHAT, talk(stream_options={"include_usge": True}), "stream_options.include_usge"),
        (CHAT, talk("word " * 2000), "messages"),
        (TEXT, {"model": "tiny"}, "prompt"),
        (TEXT, prompt(""), "prompt"),
        (TEXT, prompt([]), "prompt"),
        (TEXT, prompt(["a", ""]), "prompt[1]"),
        (TEXT, prompt(["a", 3]), "prompt[1]"),
        (TEXT, prompt([3, 400]), "prompt[1]"),
        (TEXT, prompt([[3], [4, 400]]), "prompt[1][1]"),
        (TEXT, prompt([7] * 2000), "prompt"),
        (TEXT, prompt("word " * 2000), "prompt"),
        (TEXT, prompt(suffix="end"), "suffix"),
        (TEXT, prompt(best_of=3), "best_of"),
        (TEXT, prompt(prompt_logprobs=1), "prompt_logprobs"),
        (TEXT, prompt(max_tokens=0), "max_tokens"),
        (CHAT, talk(max_tokens=0), "max_tokens"),
        (TEXT, prompt(logprobs=True), "logprobs"),
        (TEXT, prompt(max_completion_tokens=3), "max_completion_tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith(("/", "m")) else "",
)
def test_bad_input_is_400_and_names_the_parameter(
    server: Server, path: str, body: dict[str, Any], param: str, stream: bool
) -> None:
    response = post(server, path, {**body, "stream": stream})
    assert response.status_code == 400
    error = refused(response)
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert error["message"].startswith(param) and len(error["message"]) < 500
    assert error["code"] == ("context_length_exceeded" if "maximum context length is" in error["message"] else None)


def test_stream_options_need_a_stream(server: Server) -> None:
    response = post(server, CHAT, talk(stream_options={"include_usage": True}))
    assert response.status_code == 400 and refused(response)["param"] == "stream_options"


@pytest.mark.parametrize("path", ["/openai/v1/embeddings", "/v1/embeddings", "/v1/a/b"])
def test_a_path_that_is_not_there_is_named(server: Server, path: str) -> None:
    for response in (post(server, path, {"model": "tiny"}), plain_http.get(f"{server.url}{path}")):
        error = refused(response)
        assert response.status_code == 404 and f"{path} is not implemented" in error["message"]
        prefix = path[: path.index("/v1") + 3]
        assert f"{prefix}/chat/completions, {prefix}/completions, " in error["message"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "unknown_url")
        assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("PUT", f"/openai{TEXT}", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("DELETE", "/v1/models/tiny", "GET, HEAD"),
        ("PATCH", "/v1/files", "GET, HEAD, POST"),
    ],
)
def test_a_method_that_a_path_does_not_take_is_405(server: Server, method: str, path: str, allowed: str) -> None:
    response = plain_http.request(method, f"{server.url}{path}")
    assert (response.status_code, response.headers["allow"]) == (405, allowed)
    error = refused(response)
    assert (error["type"], error["code"]) == ("invalid_request_error", "method_not_supported")
    assert path in error["message"] and method in error["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_unknown_model_is_404_and_a_body_that_is_none_400(server: Server, path: str) -> None:
    unknown = post(server, path, {"model": "nobody"})
    assert unknown.status_code == 404
    error = refused(unknown)
    assert (error["param"], error["code"]) == ("model", "model_not_found") and "nobody" in error["message"]
    assert refused(post(server, path, [1]))["param"] == "body"


def test_a_full_queue_is_429_and_says_when_to_come_back(slow: Server) -> None:
    asked = {**talk(model="narrow"), **_LONG, "stream": True}
    with raw.connected(slow) as running, raw.connected(slow) as waiting:
        running.sendall(raw.post(CHAT, asked))
        slow.wait_for("narrow", lambda now: now["running_sequences"] == 1)
        waiting.sendall(raw.post(CHAT, asked))
        slow.wait_for("narrow", lambda now: now["waiting_requests"] == 1)
        for stream in (False, True):
            response = post(slow, CHAT, {**asked, "stream": stream})
            assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
            error = refused(response)
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    slow.wait_for("narrow", lambda now: now["running_sequences"] == now["waiting_requests"] == 0)


@pytest.mark.long
def test_time_that_is_over_is_504_before_the_first_token_and_an_error_event_after_it(slow: Server) -> None:
    early = post(slow, CHAT, talk(timeout=1, stream=True))
    assert early.status_code == 504 and refused(early)["type"] == "server_error"
    *chunks, last = events(post(slow, CHAT, talk(timeout=1_500_000, stream=True, **_LONG)))
    assert any(json.loads(chunk)["choices"][0]["delta"].get("content") for chunk in chunks)
    error = json.loads(last)
    assert last != DONE and error.keys() == {"error"} and error["error"]["type"] == "server_error"
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in json.loads(chunk)["choices"])
    late = post(slow, CHAT, talk(timeout=1_500_000, **_LONG))
    assert late.status_code == 504 and refused(late)["type"] == "server_error"
