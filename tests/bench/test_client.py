"""The measuring client against a real server: what it counts is what the server counts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import load
from benchmarks.answers import Ask, WrongCount, check_all
from benchmarks.cases import QUICK, Case, UnknownCase, make_cases
from benchmarks.figures import Figures
from benchmarks.http_endpoint import BadAnswer
from benchmarks.prompts import Prompts
from benchmarks.servers import Live, Ours
from benchmarks.sweep import started


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


def test_a_refused_request_is_an_error(live: Live) -> None:
    endpoint = live.endpoints["rest"]
    recordings = asyncio.run(load.together(endpoint, [Ask("a", 1, 0)]))
    with pytest.raises(BadAnswer, match="4"):
        endpoint.read(recordings[0])


@pytest.mark.parametrize("name", ["c3", "p64", "p64-again", "mix", "copy", "prose", "prose-drawn"])
def test_every_case_gives_its_figures(live: Live, prompts: Prompts, name: str) -> None:
    figures = asyncio.run(Case(name, QUICK, prompts).run(live.endpoints["rest"], live.pid, 0))
    assert figures["tokens_per_s"] == pytest.approx(figures["new_tokens"] / figures["seconds"])
    _are_figures(figures)


def test_a_late_prompt_finds_the_others_running(live: Live, prompts: Prompts) -> None:
    """The tiny model may be done with them before a busy client has read their first chunks: then they run again."""
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


def test_streams_in_turn_do_not_overlap(live: Live, prompts: Prompts) -> None:
    recordings = asyncio.run(load.in_turn(live.endpoints["rest"], [Ask(*prompts.text(24, i), 4) for i in range(3)]))
    assert all(earlier.ended <= later.started for earlier, later in pairwise(recordings))


@pytest.mark.parametrize("name", ["c0", "x1", "c1+p10", "c4+", "p"])
def test_a_name_that_is_no_case(name: str) -> None:
    with pytest.raises(UnknownCase, match="cases are named like"):
        make_cases([name], QUICK, None)  # type: ignore[arg-type]
