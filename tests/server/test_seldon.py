"""OpenAI's clients through Seldon Core 2's proxy: their requests are understood, and they get OpenAI's objects."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlserver_torch_stream.client import EventParser
from tests import plain_http
from tests.examples import examples
from tests.protocol.test_seldon_fuzz import FIELDS, message
from tests.protocol.test_v2_fuzz import json_value
from tests.server import v2
from tests.server.conftest import QUIET, SMALL_BODY
from tests.server.harness import Model, Server, serve
from tests.server.seldon_proxy import seldon_proxy
from tests.server.test_statuses import queue_filled

_REASONS = {None, "stop", "length", "tool_calls", "content_filter"}  # all that OpenAI's clients know
_HELLO = [{"role": "user", "content": "Hello fox"}]
_UNARY, _STREAM = "infer", "infer_stream"


@pytest.fixture(scope="module")
def proxy(server: Server) -> Iterator[str]:
    with seldon_proxy(server) as url:
        yield url


@pytest.fixture(scope="module")
def paced_proxy(triton: Server) -> Iterator[str]:
    """A proxy of a server whose decode steps are slowed down, so that it sends several chunks."""
    with seldon_proxy(triton) as url:
        yield url


@pytest.fixture(scope="module")
def slow_proxy(slow: Server) -> Iterator[str]:
    with seldon_proxy(slow) as url:
        yield url


@pytest.fixture(scope="module")
def versioned(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Models with the names that Seldon gives them. The 40th decode step of each fails."""
    environment = {"MLSERVER_TORCH_STREAM_FAULTS": "decode:1:slow=0.03,decode:40:raise"}
    models = [
        Model(name, str(tiny_model), extra={"max_model_len": 1000 + i}) for i, name in enumerate(("a_1", "b_c_1"))
    ]
    folder = tmp_path_factory.mktemp("versioned") / "models"
    with serve(folder, models, settings=QUIET, environment=environment) as running:
        yield running


@pytest.fixture(scope="module")
def versioned_proxy(versioned: Server) -> Iterator[str]:
    with seldon_proxy(versioned, {"a": "a_1", "b_c": "b_c_1"}) as url:
        yield url


@dataclass(frozen=True)
class _Streamed:
    """What an OpenAI client reads of a stream; it raises at the first chunk with an error."""

    chunks: list[dict[str, Any]]
    error: dict[str, Any] | None

    def text(self, index: int = 0) -> str:
        return "".join(choice["delta"].get("content", "") for choice in self.choices(index))

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        return [choice for chunk in self.chunks for choice in chunk["choices"] if choice["index"] == index]

    def reason(self, index: int = 0) -> str:
        """Returns the finish reason, which only the last chunk may have."""
        *others, last = [choice["finish_reason"] for choice in self.choices(index)]
        assert others == [None] * len(others)
        return str(last)


def _ask(url: str, endpoint: str, model: str = "tiny", **body: Any) -> httpx.Response:
    path = f"/v2/models/{model}/{endpoint}/chat/completions"
    raw = json.dumps({"model": model, "messages": _HELLO, **body})  # NaN and lone surrogates are sent, too
    return plain_http.post(url + path, content=raw, headers={"Content-Type": "application/json"}, timeout=v2.TIMEOUT_S)


def _whole(url: str, **body: Any) -> dict[str, Any]:
    response = _ask(url, _UNARY, **body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    answer: dict[str, Any] = response.json()
    assert {choice["finish_reason"] for choice in answer["choices"]} <= _REASONS
    return answer


def _stream(url: str, **body: Any) -> _Streamed:
    response = _ask(url, _STREAM, stream=True, **body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return _read(response)


def _read(response: httpx.Response) -> _Streamed:
    chunks = []
    for event in EventParser().feed(response.content):
        chunk = json.loads(event)
        if chunk.get("error"):
            return _Streamed(chunks, chunk["error"])
        assert chunk["object"] == "chat.completion.chunk" and chunk["id"] == (chunks or [chunk])[0]["id"]
        assert {choice["finish_reason"] for choice in chunk["choices"]} <= _REASONS
        chunks.append(chunk)
    return _Streamed(chunks, None)


def _error(response: httpx.Response) -> dict[str, Any]:
    """Returns OpenAI's error object, which must be all that the response has."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


# --- answers ---


def test_an_answer_is_openais_object(proxy: str) -> None:
    answer = _whole(proxy, max_tokens=6, ignore_eos=True)
    [choice] = answer["choices"]
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "tiny" and abs(answer["created"] - time.time()) < 120
    assert (choice["index"], choice["finish_reason"], choice["message"]["role"]) == (0, "length", "assistant")
    usage = answer["usage"]
    assert usage["completion_tokens"] == 6 and usage["prompt_tokens"] > 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.long
def test_a_stream_is_openais_chunks_and_the_same_text(paced_proxy: str) -> None:
    asked = {"max_tokens": 30, "temperature": 1.0, "seed": 4, "ignore_eos": True}
    _whole(paced_proxy, max_tokens=1)  # from here on the prompt is cached, which the usage counts
    answer, streamed = _whole(paced_proxy, **asked), _stream(paced_proxy, **asked)
    assert streamed.error is None and len(streamed.chunks) > 3
    assert streamed.text() == answer["choices"][0]["message"]["content"]
    assert streamed.reason() == "length"
    assert ["role" in choice["delta"] for choice in streamed.choices()] == [True] + [False] * (len(streamed.chunks) - 1)
    assert streamed.chunks[-1]["usage"] == answer["usage"]


def test_the_text_is_that_of_a_v2_chat(server: Server, proxy: str) -> None:
    conversation = v2.bytes_tensor("messages", json.dumps(_HELLO))
    body = v2.rest_body(inputs=[conversation], max_tokens=12, seed=7, temperature=0.8)
    there = v2.rest_unary(server.url, "/v2/models/tiny/infer", body)
    assert _whole(proxy, max_tokens=12, seed=7, temperature=0.8)["choices"][0]["message"]["content"] == there.text


def test_several_choices_are_streamed_side_by_side(proxy: str) -> None:
    asked = {"n": 3, "max_tokens": 8, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    answer, streamed = _whole(proxy, **asked), _stream(proxy, **asked)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice in answer["choices"]:
        assert streamed.text(choice["index"]) == choice["message"]["content"]
        assert streamed.reason(choice["index"]) == "length"
    assert [chunk.get("usage") for chunk in streamed.chunks[:-1]] == [None] * (len(streamed.chunks) - 1)
    assert streamed.chunks[-1]["usage"]["completion_tokens"] == 24


def test_a_stop_string_ends_an_answer_and_is_no_part_of_it(proxy: str) -> None:
    whole = _whole(proxy, max_tokens=40, ignore_eos=True)["choices"][0]["message"]["content"]
    stop = whole[len(whole) // 2 : len(whole) // 2 + 2]
    [choice] = _whole(proxy, max_tokens=40, ignore_eos=True, stop=[stop])["choices"]
    streamed = _stream(proxy, max_tokens=40, ignore_eos=True, stop=[stop])
    assert (choice["message"]["content"], choice["finish_reason"]) == (whole.partition(stop)[0], "stop")
    assert (streamed.text(), streamed.reason()) == (whole.partition(stop)[0], "stop")


def test_log_probabilities_have_text_and_bytes(proxy: str) -> None:
    asked = {"max_tokens": 12, "logprobs": True, "top_logprobs": 2, "ignore_eos": True, "skip_special_tokens": False}
    [choice] = _whole(proxy, **asked)["choices"]
    entries = choice["logprobs"]["content"]
    assert len(entries) == 12 and all(len(entry["top_logprobs"]) == 2 for entry in entries)
    joined = b"".join(bytes(entry["bytes"]) for entry in entries)
    broken = re.compile("\ufffd+")  # of bytes that are no character, how many such characters stand for them differs
    assert broken.sub("", joined.decode("utf-8", "replace")) == broken.sub("", choice["message"]["content"])
    for entry in entries:
        for named in (entry, *entry["top_logprobs"]):
            assert named["logprob"] <= 0 and named["bytes"] and not named["token"].startswith("token_id:")
    streamed = _stream(proxy, **asked).choices()
    assert [entry for each in streamed for entry in each["logprobs"]["content"]] == entries


def test_the_usage_that_is_asked_for_is_the_last_chunk(proxy: str) -> None:
    streamed = _stream(proxy, max_tokens=5, ignore_eos=True, stream_options={"include_usage": True})
    *chunks, usage = streamed.chunks
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 5
    assert streamed.reason() == "length"


def test_a_silence_before_the_first_token_breaks_no_stream(slow_proxy: str) -> None:
    """Elsewhere, comments are sent during the silence, but the proxy cannot read them."""
    streamed = _stream(slow_proxy, max_tokens=2, ignore_eos=True)
    assert streamed.error is None and streamed.reason() == "length"


def test_conversations_of_all_shapes_are_understood(proxy: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    conversations: list[list[dict[str, Any]]] = [
        [{"role": "system", "content": "Brief."}, *_HELLO],
        [{"role": "user", "content": [{"type": "text", "text": "Hello "}, {"type": "text", "text": "fox"}]}],
        [*_HELLO, {"role": "assistant", "content": None, "tool_calls": [call]},
         {"role": "tool", "tool_call_id": "c1", "content": "sunny"}],
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": '["quoted"] & <b>\n\u2028 🙂'}, {"role": "user", "content": [], "name": "x"}],
    ]  # fmt: skip
    sizes = [_whole(proxy, messages=each, max_tokens=1)["usage"]["prompt_tokens"] for each in conversations]
    assert sizes[1] == _whole(proxy, max_tokens=1)["usage"]["prompt_tokens"], "parts are one text"
    assert min(sizes) > 0


def test_calls_and_schemas_come_through(proxy: str) -> None:
    """Seldon's proxy passes the tools on as tensors, and the format among the other parameters."""
    schema = {"type": "object", "properties": {"at": {"enum": ["home", "work"]}}, "required": ["at"]}
    schema["additionalProperties"] = False
    look = {"type": "function", "function": {"name": "look", "parameters": schema}}
    forced = {"tools": [look], "tool_choice": "required", "parallel_tool_calls": False}
    usual = {"max_tokens": 300, "temperature": 1.0, "seed": 3}
    message = _whole(proxy, **usual, **forced)["choices"][0]["message"]
    arguments = message["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments)["at"] in ("home", "work") and message["content"] is None
    streamed = _stream(proxy, **usual, **forced)
    deltas = [each for chunk in streamed.chunks for each in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert "".join(each["function"]["arguments"] for each in deltas) == arguments
    assert streamed.reason() == "tool_calls"
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    text = _whole(proxy, **usual, **form)["choices"][0]["message"]["content"]
    assert json.loads(text)["at"] in ("home", "work")


# --- errors before the first token ---

_IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}]


@pytest.mark.parametrize("endpoint", [_UNARY, _STREAM])
@pytest.mark.parametrize(
    ("body", "status", "param", "kind"),
    [
        ({"max_tokenz": 3}, 422, "max_tokenz", "invalid_request_error"),
        ({"temperature": "hot"}, 422, "temperature", "invalid_request_error"),
        ({"n": 1_000_000_000}, 422, "n", "invalid_request_error"),
        ({"stop": ["x"] * 1_000}, 422, "stop", "invalid_request_error"),
        ({"top_logprobs": 3}, 422, "top_logprobs", "invalid_request_error"),
        ({"messages": _IMAGE}, 422, "messages", "invalid_request_error"),
        ({"messages": [{"role": "user", "content": "fox " * 4000}]}, 422, "messages", "invalid_request_error"),
        ({"response_format": {"type": "json"}}, 422, "response_format.type", "invalid_request_error"),
        ({"timeout": 1}, 504, None, "server_error"),
    ],
)  # fmt: skip
def test_an_error_keeps_its_status_and_names_the_field(
    proxy: str, endpoint: str, body: Mapping[str, Any], status: int, param: str | None, kind: str
) -> None:
    response = _ask(proxy, endpoint, **body)
    assert response.status_code == status, response.text
    error = _error(response)
    assert (error["param"], error["type"]) == (param, kind)
    assert param is None or error["message"].startswith(f"{param}: ")


def test_a_stream_on_the_endpoint_that_answers_once_is_refused(proxy: str) -> None:
    response = _ask(proxy, _UNARY, stream=True)
    assert response.status_code == 422 and "use the stream endpoint" in _error(response)["message"]


@pytest.mark.parametrize("endpoint", [_UNARY, _STREAM])
def test_an_unknown_model_is_not_found(proxy: str, endpoint: str) -> None:
    """Only the path shows that the request comes from Seldon."""
    response = _ask(proxy, endpoint, "nobody")
    assert response.status_code == 404
    error = _error(response)
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "model", "model_not_found")


@pytest.mark.parametrize("endpoint", [_UNARY, _STREAM])
def test_a_body_that_is_too_large_is_refused_before_it_is_read(slow_proxy: str, endpoint: str) -> None:
    response = _ask(slow_proxy, endpoint, messages=[{"role": "user", "content": "x" * SMALL_BODY}])
    assert response.status_code == 413 and "bytes" in _error(response)["message"]


@pytest.mark.parametrize("endpoint", [_UNARY, _STREAM])
def test_a_full_queue_keeps_its_retry_after(slow: Server, slow_proxy: str, endpoint: str) -> None:
    with queue_filled(slow):
        response = _ask(slow_proxy, endpoint, "narrow", max_tokens=2)
    assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
    assert _error(response)["type"] == "rate_limit_error"


def test_an_error_has_v2s_field_too(server: Server) -> None:
    """V2's own clients may send these tensors, too. The errors of their other requests have only V2's field."""
    conversation = [v2.bytes_tensor("role", "user"), v2.bytes_tensor("content", "Hi")]
    url = f"{server.url}/v2/models/tiny/infer"
    body = plain_http.post(url, json=v2.rest_body(inputs=conversation, max_tokenz=1)).json()
    assert set(body) == {"error", "outputs"} and "max_tokenz" in body["error"]
    [tensor] = body["outputs"]
    assert (tensor["name"], tensor["datatype"], tensor["shape"]) == ("output_all", "BYTES", [1])
    assert json.loads(tensor["data"][0])["error"]["message"] == body["error"]
    assert set(plain_http.post(url, json=v2.rest_body("Hi", max_tokenz=1)).json()) == {"error"}


@settings(examples(60, fast=20), database=None, suppress_health_check=list(HealthCheck))
@given(
    body=st.dictionaries(st.sampled_from(FIELDS), json_value, max_size=3),
    messages=st.just(_HELLO) | st.lists(message, min_size=1, max_size=3),
    streaming=st.booleans(),
)
def test_any_body_is_answered_or_refused_by_name(
    proxy: str, body: dict[str, Any], messages: list[dict[str, Any]], streaming: bool
) -> None:
    asked = {"timeout": 20_000_000, **body, "messages": messages, "max_tokens": 2}
    response = _ask(proxy, _STREAM if streaming else _UNARY, **asked)
    if response.status_code == 200:
        assert not streaming or _read(response).error is None
    elif response.status_code != 504:  # a timeout of microseconds can be asked for
        assert response.status_code == 422, response.text
        assert str(_error(response)["param"]).partition(".")[0] in (asked if _is_json(asked) else ["body"])


def _is_json(asked: dict[str, Any]) -> bool:
    """Returns whether the body is valid JSON.

    Python writes infinity and lone surrogates, which are not JSON, so that such a body is refused as a whole.
    """
    try:
        orjson.loads(json.dumps(asked))
    except orjson.JSONDecodeError:
        return False
    return True


# --- errors later on ---


@pytest.mark.long
def test_a_failure_behind_the_first_token_is_an_error_event(versioned_proxy: str) -> None:
    """The path has the name without a version; the server's model has a version."""
    streamed = _stream(versioned_proxy, model="a", max_tokens=400, ignore_eos=True)
    assert streamed.text() and streamed.error is not None
    assert streamed.error["type"] == "server_error" and "decode failed" in streamed.error["message"]
    assert {choice["finish_reason"] for choice in streamed.choices()} == {None}


def test_a_client_that_leaves_ends_the_generation(slow: Server, slow_proxy: str) -> None:
    body = {"model": "tiny", "messages": _HELLO, "stream": True, "max_tokens": 900, "ignore_eos": True}
    path = f"{slow_proxy}/v2/models/tiny/{_STREAM}/chat/completions"
    with plain_http.stream("POST", path, json=body, timeout=v2.TIMEOUT_S) as response:
        next(response.iter_lines())
    slow.wait_for("tiny", lambda now: now["running_sequences"] == 0)


# --- names ---


def test_a_name_with_an_underscore_is_warned_about_in_one_line(versioned: Server, versioned_proxy: str) -> None:
    [line] = [line for line in versioned.log.splitlines() if "Seldon" in line]
    assert "'b_c_1'" in line and "'b-c'" in line and "WARNING" in line
    refused = _ask(versioned_proxy, _UNARY, "b_c")
    assert refused.status_code == 400 and "not loaded" in refused.text, "the proxy refuses it"


# --- the last test: it ends the server ---


def test_a_draining_server_says_when_to_come_again(versioned: Server, versioned_proxy: str) -> None:
    body = {"model": "a", "messages": _HELLO, "stream": True, "max_tokens": 900, "ignore_eos": True}
    path = f"{versioned_proxy}/v2/models/a/{_STREAM}/chat/completions"
    with plain_http.stream("POST", path, json=body, timeout=v2.TIMEOUT_S) as running:
        lines = running.iter_lines()
        next(lines)
        versioned.process.terminate()
        _until_draining(versioned)
        response = _ask(versioned_proxy, _UNARY, "a")
        assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
        assert _error(response)["type"] == "server_error"


def _until_draining(server: Server) -> None:
    end = time.monotonic() + 20
    while plain_http.get(f"{server.url}/v2/health/ready", timeout=5).status_code != 503:
        assert time.monotonic() < end
        time.sleep(0.02)
