"""The soak finds growth and lost counts, and its requests, each checked, are answered by a real server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.breaking import started
from benchmarks.soak import Held, problems, soak, summary
from benchmarks.soak_requests import SoakClient, WrongAnswer

_FLAT = [Held(100 * number, 500.0, 40, 20) for number in range(1, 41)]


def test_what_stays_is_no_problem() -> None:
    assert problems(_FLAT, 80, 80) == []


def test_growth_during_the_warm_up_is_no_problem() -> None:
    assert problems([replace(each, rss_mib=10.0) for each in _FLAT[:10]] + _FLAT[10:], 80, 80) == []


@pytest.mark.parametrize(("name", "step"), [("rss_mib", 2.0), ("descriptors", 1), ("threads", 1)])
def test_growth_after_the_warm_up_is_found_by_name(name: str, step: float) -> None:
    grown = [replace(each, **{name: getattr(each, name) + step * number}) for number, each in enumerate(_FLAT)]
    (found,) = problems(grown, 80, 80)
    assert found.startswith(f"{name} grew")


def test_a_token_that_is_not_counted_is_a_problem() -> None:
    assert problems(_FLAT, 80, 79) == ["80 tokens answered, 79 counted by the server"]


def test_the_summary_compares_what_is_held_at_the_end_with_the_time_after_the_warm_up() -> None:
    held = [replace(each, rss_mib=400.0 + number) for number, each in enumerate(_FLAT)]
    result = {"requests": 4000, "seconds": 90.0, "tokens": 80, "counted": 79, "date": "2026-11-22T10:00:00+00:00"}
    text = summary({**result, "cores": 2, "cpu": "a chip"}, held)
    assert "4,000 requests" in text and "RSS 419, then 439" in text and "79 of 80 tokens (2026-11-22, 2 cores" in text


@pytest.mark.slow
def test_every_request_is_answered_and_its_tokens_are_counted(tiny_model: Path, tmp_path: Path) -> None:
    with started(str(tiny_model), {}, batch_store=str(tmp_path)) as server:
        client = SoakClient(server.port, server.grpc_port)
        count = len(client.requests)
        client.close()
        held, tokens, counted = soak(server, 4 * count)
        assert held[-1].requests == 4 * count > 100 and tokens == counted > 0


@pytest.mark.slow
def test_a_wrong_answer_ends_the_soak(tiny_model: Path) -> None:
    with started(str(tiny_model), {}) as server, pytest.raises(WrongAnswer, match="/v1/files"):  # there is no store
        soak(server, 100)
