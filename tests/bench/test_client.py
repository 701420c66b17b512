"""The measuring client computes events and times from raw bytes, and counts as many tokens as a real server does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import load
from benchmarks.answers import Answer, Ask, Recording, WrongCount, check_all
from benchmarks.cases import QUICK, Case, UnknownCase, make_cases
from benchmarks.endpoints import BadAnswer, HttpEndpoint, OpenAISpelling, events
from benchmarks.figures import Figures
from benchmarks.prompts import Prompts
from benchmarks.servers import Live, Ours
from benchmarks.sweep import started

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def live(tiny_model: Path) -> Iterator[Live]:
    with started(Ours(str(tiny_model))) as running:
        yield running


@pytest.fixture(scope="module")
def prompts(tiny_model: Path) -> Prompts:
    return Prompts(tiny_model)


def test_prompts_have_their_length_and_no_common_beginning(prompts: Prompts) -> None:
    made = [prompts.text(128, "case", index) for index in range(40)]
    assert {count for _, count in made} <= {127, 128, 129}
    assert len({text[:40] for text, _ in made}) == 40
    assert made[0] == prompts.text(128, "case", 0)


@pytest.mark.long
@pytest.mark.parametrize("endpoint", ["rest", "grpc", "openai"])
def test_a_stream_has_the_tokens_it_was_asked_for(live: Live, prompts: Prompts, endpoint: str) -> None:
    asks = [Ask(*prompts.text(24, endpoint, index), 5 + index, 0.8 * (index % 2)) for index in range(4)]

    async def run() -> list[load.Recording]:
        try:
            return await load.together(live.endpoints[endpoint], asks)
        finally:
            await live.endpoints[endpoint].close()

    answers = [live.endpoints[endpoint].read(recording) for recording in asyncio.run(run())]
    check_all(asks, answers)
    for ask, answer in zip(asks, answers, strict=True):
        assert 0 < answer.ttft <= answer.ended - answer.started
        assert 1 <= len(answer.arrivals) <= ask.new_tokens
        assert list(answer.arrivals) == sorted(answer.arrivals)
    with pytest.raises(WrongCount):
        check_all(asks, answers[::-1])


def test_an_answer_ends_with_its_length_even_if_the_server_keeps_the_connection() -> None:
    """TorchServe does so, whatever the request asks for."""
    event = (
        b"data: "
        + json.dumps({"choices": [{"text": "a"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}).encode()
    )
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (len(event) + 2)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: asyncio.Event) -> None:
        await reader.readuntil(b"}")
        for piece in (head + event[:9], event[9:], b"\n\n"):
            writer.write(piece)
            await asyncio.sleep(0.05)
        await reader.read()
        writer.close()
        await writer.wait_closed()
        left.set()

    async def run() -> Answer:
        left = asyncio.Event()
        async with await asyncio.start_server(partial(answer, left=left), "127.0.0.1", 0) as server:
            endpoint = HttpEndpoint(server.sockets[0].getsockname()[1], OpenAISpelling("m"))
            (recording,) = await asyncio.wait_for(load.together(endpoint, [Ask("x", 1, 1)]), 20)
            await left.wait()
            return endpoint.read(recording)

    assert asyncio.run(run()).text == "a"


@pytest.mark.long
def test_a_refused_request_is_an_error(live: Live) -> None:
    endpoint = live.endpoints["rest"]
    recordings = asyncio.run(load.together(endpoint, [Ask("a", 1, 0)]))
    with pytest.raises(BadAnswer, match="4"):
        endpoint.read(recordings[0])


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["c3", "p64", "p64-again", "mix", "copy", "prose", "prose-drawn", "c3-free", "c3-list"]
)
def test_every_case_gives_its_figures(live: Live, prompts: Prompts, name: str) -> None:
    figures = asyncio.run(Case(name, QUICK, prompts).run(live.endpoints["rest"], live.pid, 0))
    assert figures["tokens_per_s"] == pytest.approx(figures["new_tokens"] / figures["seconds"])
    _are_figures(figures)


@pytest.mark.long
def test_turns_and_a_batch_have_figures_of_their_own(live: Live, prompts: Prompts) -> None:
    turns, batch = make_cases(["turns3", "batch2"], replace(QUICK, batch_rows=200), prompts)
    figures = asyncio.run(turns.run(live.endpoints["rest"], live.pid, 0))
    assert (
        figures["ratio"] == pytest.approx(figures["together_s"] / figures["in_turn_s"]) and figures["health_p99_ms"] > 0
    )
    figures = asyncio.run(batch.run(live.endpoints["rest"], live.pid, 0))
    assert (
        figures["ratio"] == pytest.approx(figures["beside_p50_ms"] / figures["alone_p50_ms"]) and figures["rows"] >= 2
    )


@pytest.mark.long
def test_a_late_prompt_finds_the_others_running(live: Live, prompts: Prompts) -> None:
    """The tiny model may finish the others before a busy client reads their first chunks; the case then runs again."""
    case = Case("c3+p100", replace(QUICK, running_new_tokens=800), prompts)
    found = []
    for sweep in range(10):
        figures = asyncio.run(case.run(live.endpoints["rest"], live.pid, sweep))
        _are_figures(figures)
        found.append(figures["running_at_arrival"])
        if found[-1] == 2:
            break
    assert found[-1] == 2, f"running at each arrival: {found}"


def _are_figures(figures: Figures) -> None:
    assert figures["new_tokens"] >= figures["requests"] >= 1
    assert figures["ttft_p50_ms"] > 0
    assert figures["cpu_s"] >= 0
    assert figures["rss_mib"] > 50


@pytest.mark.long
def test_streams_in_turn_do_not_overlap(live: Live, prompts: Prompts) -> None:
    recordings = asyncio.run(load.in_turn(live.endpoints["rest"], [Ask(*prompts.text(24, i), 4) for i in range(3)]))
    assert all(earlier.ended <= later.started for earlier, later in pairwise(recordings))


@pytest.mark.parametrize("name", ["c0", "x1", "c1+p10", "c4+", "p"])
def test_a_name_that_is_no_case(name: str) -> None:
    with pytest.raises(UnknownCase, match="cases have names like"):
        make_cases([name], QUICK, None)  # type: ignore[arg-type]


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
