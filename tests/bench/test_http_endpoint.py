"""Events and their times out of raw bytes, however the network cut them."""

from __future__ import annotations

import json

import pytest

from benchmarks.http_endpoint import BadAnswer, HttpEndpoint, events
from benchmarks.recording import Recording
from benchmarks.spellings import OpenAISpelling

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def _chunk(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)


def test_an_event_has_the_time_of_its_last_byte() -> None:
    first, second = _chunk(b"data: one\n\n"), _chunk(b"data: two\n\n")
    received = [(1.0, _HEAD + first[:5]), (2.0, first[5:]), (3.0, second + b"0\r\n\r\n")]
    assert list(events(received)) == [(2.0, "one"), (3.0, "two")]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_cuts_change_no_event(size: int) -> None:
    raw = (
        _HEAD
        + _chunk(b"data: a\r\n\r\ndata: b\n\n: a comment\n\n")
        + _chunk(b"data: c")
        + _chunk(b"\n\n")
        + b"0\r\n\r\n"
    )
    received = [(float(at), raw[at : at + size]) for at in range(0, len(raw), size)]
    found = list(events(received))
    assert [data for _, data in found] == ["a", "b", "c"]
    assert [at for at, _ in found] == sorted(at for at, _ in found)


def test_a_body_that_ends_with_the_connection() -> None:
    assert list(events([(1.0, b"HTTP/1.1 200 OK\r\n\r\ndata: one\n"), (2.0, b"\n")])) == [(2.0, "one")]


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 503 Service Unavailable\r\n\r\n{}",
        b"",
        _HEAD + _chunk(b"data: one\n\n"),
        _HEAD + b"ff",
        b"HTTP/1.1 200 OK\r\n\r\ndata: half",
    ],
)
def test_what_is_no_whole_stream_is_an_error(raw: bytes) -> None:
    with pytest.raises(BadAnswer):
        list(events([(1.0, raw)]))


def test_openai_events_bring_text_and_at_last_the_usage() -> None:
    texts = [{"choices": [{"text": ""}]}, {"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}], "usage": None}]
    sent = [*texts, {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}]
    recording = Recording(started=0.5, ended=9.0, chunks=[(1.0, b"HTTP/1.1 200 OK\r\n\r\n")])
    for at, event in enumerate(sent, start=2):
        recording.add(float(at), b"data: " + json.dumps(event).encode() + b"\n\n")
    recording.add(8.0, b"data: [DONE]\n\n")
    answer = HttpEndpoint(1, OpenAISpelling("m")).read(recording)
    assert (answer.arrivals, answer.prompt_tokens, answer.new_tokens) == ((3.0, 4.0), 3, 2)
    assert answer.ttft == 2.5


def test_an_error_inside_a_stream_is_an_error() -> None:
    recording = Recording(chunks=[(1.0, b'HTTP/1.1 200 OK\r\n\r\ndata: {"error": "out of memory"}\n\n')])
    with pytest.raises(BadAnswer, match="out of memory"):
        HttpEndpoint(1, OpenAISpelling("m")).read(recording)
