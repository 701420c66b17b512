"""The client over OpenAI's API against a scripted server: chunks, usage, errors, and what other servers do."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from mlserver_torch_stream.client import (
    AsyncClient,
    Client,
    ClientError,
    Delta,
    GenerationError,
    RequestUsage,
    StreamBroken,
)
from tests.cli.scripted import scripted_server

_USAGE = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}}
_DONE = b"data: [DONE]\n\n"


def _chunk(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def _choice(index: int, content: str | None, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": {"content": content}, "finish_reason": finish}], "usage": None}


def _stream(*events: bytes, path: str = "") -> list[Delta]:
    with scripted_server(events) as server, Client(f"{server.url}{path}", api="openai") as client:
        return list(client.stream("m", messages=[]))


def test_the_last_delta_is_final_and_has_the_usage() -> None:
    events = [_choice(0, ""), _choice(0, "Hi"), _choice(0, None, "stop"), _USAGE]
    assert _stream(*map(_chunk, events), _DONE) == [
        Delta("Hi"),
        Delta(finish_reason="stop", usage=RequestUsage(5, 2), final=True),
    ]


def test_every_sequence_ends_with_its_reason() -> None:
    events = [_choice(0, "a", "stop"), _choice(1, "b"), _choice(1, "c", "length")]
    assert _stream(*map(_chunk, events), _DONE) == [
        Delta("a", finish_reason="stop"),
        Delta("b", index=1),
        Delta("c", index=1, finish_reason="length", final=True),
    ]


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_the_base_url_may_end_with_v1_as_openais_clients_write_it(path: str) -> None:
    with scripted_server([_DONE]) as server, Client(f"{server.url}{path}", api="openai") as client:
        assert client.models() == ["m"]
        list(client.stream("m", ["a", "b"], n=2, seed=None))
    assert server.asked[0] == {
        "path": "/v1/completions",
        "model": "m",
        "prompt": ["a", "b"],
        "n": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_an_error_in_the_stream_is_raised_with_its_message() -> None:
    with pytest.raises(GenerationError, match=r"the generation failed: it burned$"):
        _stream(_chunk(_choice(0, "a")), _chunk({"error": {"message": "it burned", "type": "server_error"}}))


def test_a_stream_without_done_is_whole_if_all_its_sequences_have_ended() -> None:
    """transformers' server sends no [DONE], and the usage with the last choice."""
    last = {**_choice(1, "b", "length"), "usage": _USAGE["usage"]}
    assert _stream(_chunk(_choice(0, "a", "stop")), _chunk(last)) == [
        Delta("a", finish_reason="stop"),
        Delta("b", index=1, finish_reason="length", usage=RequestUsage(5, 2), final=True),
    ]


@pytest.mark.parametrize("events", [[_choice(0, "a")], [_choice(1, "b"), _choice(0, "a", "stop")]])
def test_a_stream_that_ends_within_a_sequence_is_an_error_after_its_deltas(events: list[dict[str, Any]]) -> None:
    seen = []
    with scripted_server([*map(_chunk, events)]) as server, Client(server.url, api="openai") as client:
        deltas = client.stream("m", messages=[])
        with pytest.raises(StreamBroken, match="before its final event"):
            while True:
                seen.append(next(deltas).text)
    assert "".join(seen).endswith("a")


def test_a_server_that_leaves_out_the_index_and_writes_empty_reasons_is_read() -> None:
    choices = [{"delta": {"content": "a"}, "finish_reason": ""}, {"delta": {"content": "b"}, "finish_reason": "stop"}]
    deltas = _stream(*(_chunk({"choices": [choice]}) for choice in choices), _DONE)
    assert deltas == [Delta("a"), Delta("b", finish_reason="stop", final=True)]


@pytest.mark.parametrize("data", ["not JSON", "[]", '{"choices": [{}]}', "{}"])
def test_an_event_that_is_no_chunk_is_an_error_of_the_stream(data: str) -> None:
    with pytest.raises(StreamBroken, match="cannot be read"):
        _stream(f"data: {data}\n\n".encode())


def test_a_list_of_models_that_is_none_is_an_error() -> None:
    no_names: Any = [["m"]]
    with (
        scripted_server(models=no_names) as server,
        Client(server.url, api="openai") as client,
        pytest.raises(ClientError, match="cannot be read"),
    ):
        client.models()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"url": "localhost:8080"}, "url: must begin with"),
        ({"url": "http://"}, "url: must begin with"),
        ({"url": "grpc://h:1", "api": "openai"}, "url: OpenAI's API is spoken over http"),
        ({"url": "grpc://h:1/v2"}, "url: over gRPC it is a host and a port"),
        ({"url": "grpc://me:secret@h:1"}, "url: over gRPC it is a host and a port"),
        ({"url": "http://h:port"}, "url: is a scheme, a host, a port"),
        ({"url": "http://me:secret@h:99999"}, "url: is a scheme, a host, a port"),
        ({"url": "grpc://h:99999"}, "url: is a scheme, a host, a port"),
        ({"url": "http://[::1"}, "url: is a scheme, a host, a port"),
        ({"url": " http://h"}, "url: is a scheme, a host, a port"),
        ({"url": "http://h\n"}, "url: is a scheme, a host, a port"),
        ({"url": "http://h?a=b"}, "url: is a scheme, a host, a port"),
        ({"url": "http://xn--ü"}, "url: "),
        ({"url": "http://h", "api": "v3"}, "api: must be one of v2, openai"),
        ({"url": "http://h", "headers": {"a b": "x"}}, "is not a valid name of a header"),
        ({"url": "http://h", "headers": {"a": "secret\n"}}, "the value of a has characters"),
        ({"url": "http://h", "headers": {"a": "secret "}}, "the value of a has characters"),
        ({"url": "http://h", "headers": {"Content-Length": "5"}}, "headers: Content-Length cannot be chosen"),
        ({"url": "grpc://h:1", "headers": {"x-bin": "5"}}, "headers: x-bin cannot be chosen"),
        *(
            ({"url": url, "timeout": seconds}, "timeout: must be above 0")
            for url in ("http://h", "grpc://h:1")
            for seconds in (0, -1, math.nan, math.inf)
        ),
    ],
)
def test_what_a_client_cannot_be_made_of_is_a_value_error(arguments: dict[str, Any], said: str) -> None:
    for made in (Client, AsyncClient):
        with pytest.raises(ValueError, match=said) as refused:
            made(**arguments)
        assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("HTTP_PROXY", "http://[::1"), ("ALL_PROXY", "nonsense://h"), ("SSL_CERT_FILE", "/nowhere/at.all")],
)
def test_a_proxy_or_certificate_of_the_environment_that_cannot_be_is_a_value_error(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    for made in (Client, AsyncClient):
        with pytest.raises(ValueError, match="of the environment cannot be used"):
            made("http://127.0.0.1:1")


def test_a_password_in_the_url_is_not_shown() -> None:
    with scripted_server() as server:
        url = server.url.replace("//", "//me:secret@")
    with Client(url) as client, pytest.raises(ClientError, match="no server at http://127") as failed:
        client.models()
    assert "secret" not in str(failed.value)
