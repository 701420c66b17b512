"""The client with a scripted server: any chunking, any line ending, and every way in which a stream can break."""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import certifi
import pytest

from mlserver_torch_stream import client
from mlserver_torch_stream.tool_calls import ToolCallDelta
from mlserver_torch_stream.types import TokenLogprob
from mlserver_torch_stream.v2_reader import SequenceReply, read_reply
from tests.cli.scripted import event, scripted_server

_EVENTS = [event("Grü"), event("ße 🙂"), event("", finish="stop")]


def _text(deltas: list[client.Delta]) -> str:
    return "".join(delta.text for delta in deltas)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_events_survive_any_chunking_and_line_end(size: int, line_end: bytes) -> None:
    body = b": ping\n\n".join(_EVENTS).replace(b"\n", line_end) + line_end
    parser = client.EventParser()
    found = [data for start in range(0, len(body), size) for data in parser.feed(body[start : start + size])]
    assert len(found) == 3
    assert "Grü" in found[0] and "ße 🙂" in found[1]


def test_data_over_several_lines_is_one_event() -> None:
    assert list(client.EventParser().feed(b"event: x\ndata: a\ndata:b\nid: 3\n\n")) == ["a\nb"]


def test_a_lone_carriage_return_that_is_cut_off_ends_a_line_once() -> None:
    parser = client.EventParser()
    chunks = [b"data: a\r", b"\ndata: b\r", b"data: c\r", b"\r", b"data: d\r\n\r", b"\n"]
    assert [data for chunk in chunks for data in parser.feed(chunk)] == ["a\nb\nc", "d"]


@pytest.mark.parametrize("endless", [b"x" * 100, b"data: " + b"x" * 94, b"data: x\n" * 12, b": ping\n" * 15])
def test_an_event_without_an_end_is_an_error_at_the_bound_and_behind_the_events_before_it(endless: bytes) -> None:
    parser = client.EventParser(most_bytes=400)
    seen = [data for _ in range(9) for data in parser.feed(b"data: " + b"y" * 300 + b"\n\n")]
    assert seen == ["y" * 300] * 9, "the bound is that of one event"

    def read() -> Iterator[str]:
        for _ in range(6):
            yield from parser.feed(endless)

    with pytest.raises(ValueError, match="an event has more than 400 bytes"):
        list(read())


def test_a_stream_of_one_endless_line_is_broken_and_takes_bounded_time() -> None:
    chunk = b"x" * 2**20
    with (
        scripted_server([_EVENTS[0], b"data: ", *[chunk] * 70]) as server,
        pytest.raises(client.StreamBroken, match="cannot be read: ValueError: an event has more than 67108864 bytes"),
    ):
        list(client.stream(server.url, "m", "Hello"))


def test_calls_share_a_tls_context_until_the_environment_names_other_certificates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = []
    create = ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", lambda **given: made.append(given) or create(**given))
    certificates = tmp_path / "certificates.pem"
    certificates.write_bytes(Path(certifi.where()).read_bytes())
    with scripted_server(*[_EVENTS] * 6) as server:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificates))
        for _ in range(3):
            list(client.stream(server.url, "m", "Hello"))
        assert len(made) == 1
        monkeypatch.delenv("SSL_CERT_FILE")
        for _ in range(3):
            list(client.stream(server.url, "m", "Hello"))
        assert len(made) == 2


def test_stream_yields_deltas_and_the_reason() -> None:
    with scripted_server(_EVENTS) as server:
        deltas = list(client.stream(server.url, "m", "Hello", max_tokens=3))
    assert _text(deltas) == "Grüße 🙂"
    assert deltas[-1].finish_reason == "stop" and deltas[-1].final
    assert server.asked[0]["path"] == "/v2/models/m/generate_stream"
    assert server.asked[0]["parameters"] == {"max_tokens": 3}
    assert server.asked[0]["inputs"][0]["data"] == ["Hello"]


def test_astream_yields_the_same() -> None:
    async def collect(url: str) -> list[client.Delta]:
        return [delta async for delta in client.astream(url, "m", messages=[{"role": "user", "content": "Hi"}])]

    with scripted_server(_EVENTS) as server:
        deltas = asyncio.run(collect(server.url))
    assert _text(deltas) == "Grüße 🙂"
    assert server.asked[0]["inputs"][0]["name"] == "messages"


def test_a_stream_without_a_final_event_is_an_error() -> None:
    with scripted_server(_EVENTS[:2]) as server, pytest.raises(client.ClientError, match="before its final event"):
        list(client.stream(server.url, "m", "Hello"))


def test_a_stream_that_breaks_is_an_error_after_its_deltas() -> None:
    with scripted_server(_EVENTS[:2], truncate=True) as server:
        deltas = client.stream(server.url, "m", "Hello")
        assert next(deltas).text == "Grü" and next(deltas).text == "ße 🙂"
        with pytest.raises(client.ClientError, match="broke"):
            next(deltas)


def test_a_stream_that_breaks_before_its_first_event_points_to_the_log() -> None:
    with scripted_server([], truncate=True) as server, pytest.raises(client.ClientError, match="log"):
        list(client.stream(server.url, "m", "Hello"))


def test_a_refusal_carries_the_servers_status_and_reason() -> None:
    body = b'{"error": "max_tokens: must be positive"}'
    with scripted_server([body], status=422) as server, pytest.raises(client.ClientError) as caught:
        list(client.stream(server.url, "m", "Hello"))
    assert "422: max_tokens: must be positive" in str(caught.value)
    assert caught.value.status == 422


@pytest.mark.parametrize(
    ("body", "headers", "said"),
    [
        (b"", {}, "502: Bad Gateway"),
        (b"<html>", {"Location": "https://me:secret@h/"}, "502: it redirects to https://h/"),
    ],
)
def test_a_refusal_without_a_reason_says_what_there_is(body: bytes, headers: dict[str, str], said: str) -> None:
    with (
        scripted_server([body], status=502, headers=headers) as server,
        pytest.raises(client.RequestRefused, match=said),
    ):
        list(client.stream(server.url, "m", "Hello"))


@pytest.mark.parametrize("garbage", [b"data: \xff\xfe\n\n", b"data: 5\n\n", b"data: {\n\n"])
def test_an_event_that_is_none_is_an_error_after_its_deltas(garbage: bytes) -> None:
    async def collect(url: str) -> None:
        async for delta in client.astream(url, "m", "Hello"):
            seen.append(delta.text)

    seen: list[str] = []
    with scripted_server([_EVENTS[0], garbage], [_EVENTS[0] + garbage]) as server:
        with pytest.raises(client.StreamBroken, match="cannot be read"):
            seen.extend(delta.text for delta in client.stream(server.url, "m", "Hello"))
        with pytest.raises(client.StreamBroken, match="cannot be read"):
            asyncio.run(collect(server.url))
    assert seen == ["Grü", "Grü"]


def test_an_error_in_the_stream_is_raised_with_its_reason() -> None:
    script = [_EVENTS[0], event("", finish="error", error="it burned")]
    with scripted_server(script) as server, pytest.raises(client.ClientError, match="it burned"):
        list(client.stream(server.url, "m", "Hello"))


def test_no_server_is_a_clear_error() -> None:
    with scripted_server() as server:
        url = server.url
    with pytest.raises(client.ClientError, match=f"no server at {url}"):
        list(client.stream(url, "m", "Hello"))


@pytest.mark.parametrize("prompts", [{}, {"prompt": "a", "messages": []}])
def test_exactly_one_prompt_source(prompts: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="exactly one"):
        list(client.stream("http://127.0.0.1:1", "m", **prompts))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"url": "localhost:8080"}, "url: must begin with"),
        ({"url": "http://"}, "url: must begin with"),
        ({"url": "grpc://h:1/v2"}, "url: over gRPC, must have only a host and a port"),
        ({"url": "grpc://me:secret@h:1"}, "url: over gRPC, must have only a host and a port"),
        ({"url": "http://h:port"}, "url: must consist of a scheme, a host, a port"),
        ({"url": "http://me:secret@h:99999"}, "url: must consist of a scheme, a host, a port"),
        ({"url": "grpc://h:99999"}, "url: must consist of a scheme, a host, a port"),
        ({"url": "http://[::1"}, "url: must consist of a scheme, a host, a port"),
        ({"url": " http://h"}, "url: must consist of a scheme, a host, a port"),
        ({"url": "http://h\n"}, "url: must consist of a scheme, a host, a port"),
        ({"url": "http://h?a=b"}, "url: must consist of a scheme, a host, a port"),
        ({"url": "http://xn--ü"}, "url: "),
        ({"url": "http://h", "api": "v3"}, "api: must be v2"),
        ({"url": "http://h", "api": "openai"}, "for OpenAI's API use the openai package"),
        ({"url": "http://h", "headers": {"a b": "x"}}, "is not a valid name of a header"),
        ({"url": "http://h", "headers": {"a": "secret\n"}}, "the value of a has characters"),
        ({"url": "http://h", "headers": {"a": "secret "}}, "the value of a has characters"),
        ({"url": "http://h", "headers": {"Content-Length": "5"}}, "headers: Content-Length cannot be set"),
        ({"url": "grpc://h:1", "headers": {"x-bin": "5"}}, "headers: x-bin cannot be set"),
        *(
            ({"url": url, "timeout": seconds}, "timeout: must be above 0")
            for url in ("http://h", "grpc://h:1")
            for seconds in (0, -1, math.nan, math.inf)
        ),
    ],
)
def test_what_a_client_cannot_be_made_of_is_a_value_error(arguments: dict[str, Any], said: str) -> None:
    for made in (client.Client, client.AsyncClient):
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
    for made in (client.Client, client.AsyncClient):
        with pytest.raises(ValueError, match="of the environment cannot be used"):
            made("http://127.0.0.1:1")


def test_a_password_in_the_url_is_not_shown() -> None:
    with scripted_server() as server:
        url = server.url.replace("//", "//me:secret@")
    with client.Client(url) as asked, pytest.raises(client.ClientError, match="no server at http://127") as failed:
        asked.models()
    assert "secret" not in str(failed.value)


@pytest.mark.parametrize("data", ["not JSON", "[]", '{"outputs": [{}]}'])
def test_an_event_that_is_no_response_is_an_error_of_the_stream(data: str) -> None:
    with scripted_server([f"data: {data}\n\n".encode()]) as server, client.Client(server.url) as asked:
        deltas = asked.stream("m", "Hello")
        with pytest.raises(client.StreamBroken, match="cannot be read"):
            list(deltas)


def test_a_list_of_models_that_is_none_is_an_error() -> None:
    names: Any = [["m"]]
    with (
        scripted_server(models=names) as server,
        client.Client(server.url) as asked,
        pytest.raises(client.ClientError, match="cannot be read"),
    ):
        asked.models()


def _outputs(**columns: list[Any]) -> list[dict[str, Any]]:
    return [{"name": name, "datatype": "", "shape": [len(data)], "data": data} for name, data in columns.items()]


def test_a_unary_reply_has_all_sequences_with_what_each_got() -> None:
    outputs = _outputs(text_output=["a", "b"], finish_reason=["stop", "length"], num_output_tokens=[3, 4], extra=[1])
    reply = read_reply({"outputs": outputs})
    assert reply.sequences == (
        SequenceReply(0, "a", "stop", num_output_tokens=3),
        SequenceReply(1, "b", "length", num_output_tokens=4),
    )
    assert not reply.final and reply.error is None


def test_an_event_says_its_sequence_also_without_text() -> None:
    parameters = {"index": 2, "triton_final_response": True}
    reply = read_reply({"outputs": _outputs(token_ids=[7]), "parameters": parameters})
    assert reply.sequences == (SequenceReply(2, token_ids=(7,)),) and reply.final


def test_the_ids_and_log_probabilities_of_several_sequences_are_told_apart() -> None:
    entries = ['[{"token_id": 5, "logprob": -0.5, "top": [[5, -0.5], [6, -1.5]]}]', "[]"]
    ids = {"name": "token_ids", "datatype": "INT64", "shape": [2, 3], "data": [5, 6, 7, 8, -1, -1]}
    first, second = read_reply({"outputs": [*_outputs(logprobs=entries), ids]}).sequences
    assert (first.token_ids, second.token_ids) == ((5, 6, 7), (8,))
    assert (first.logprobs, second.logprobs) == ((TokenLogprob(5, -0.5, ((5, -0.5), (6, -1.5))),), ())


def test_the_counts_of_the_whole_request_are_read() -> None:
    parameters = {"usage_prompt_tokens": 5, "usage_completion_tokens": 2, "triton_final_response": True}
    reply = read_reply({"outputs": _outputs(text_output=["a"]), "parameters": parameters})
    assert (reply.prompt_tokens, reply.completion_tokens) == (5, 2)


@pytest.mark.parametrize("body", [{"error": "broken"}, {"parameters": {"error": "broken"}, "outputs": []}])
def test_an_error_is_found_beside_the_outputs_and_in_the_parameters(body: dict[str, Any]) -> None:
    assert read_reply(body).error == "broken"


@pytest.mark.parametrize("body", [[], "text", {"outputs": [{"data": []}]}, {"outputs": 3}])
def test_what_is_no_reply_raises(body: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        read_reply(body)


def test_reasoning_and_calls_are_read_whole_and_in_parts() -> None:
    whole = '[{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}, {"id": "d", "function": '
    whole += '{"name": "g", "arguments": "1"}}]'
    outputs = _outputs(text_output=["", "x"], reasoning=["Hm.", ""], tool_calls=[whole, "[]"])
    first, second = read_reply({"outputs": outputs}).sequences
    assert first.reasoning == "Hm." and second.tool_calls == ()
    assert first.tool_calls == (ToolCallDelta(0, "c", "f", "{}"), ToolCallDelta(1, "d", "g", "1"))
    part = '[{"index": 1, "function": {"arguments": "23"}}]'
    (only,) = read_reply({"outputs": _outputs(tool_calls=[part])}).sequences
    assert only.tool_calls == (ToolCallDelta(1, None, None, "23"),)
