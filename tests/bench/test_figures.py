"""Percentiles, rates and steady spans of made-up answers, worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.answers import Answer, Ask, WrongCount, check
from benchmarks.figures import best_and_median, disturbance, percentile, spread, summarize


def _answer(started: float, *arrivals: float, tokens: int | None = None) -> Answer:
    return Answer(started, arrivals[-1], arrivals, 128, len(arrivals) if tokens is None else tokens)


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([5.0], 0.99, 5.0),
        ([1.0, 2.0], 0.5, 1.5),
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        ([*map(float, range(101))], 0.9, 90),
    ],
)
def test_percentiles_lie_between_the_nearest_ranks(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == pytest.approx(expected)


def test_no_values_have_no_percentile() -> None:
    assert spread("itl", []) == {}
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_waves_add_up_without_the_time_between_them() -> None:
    waves = [[_answer(0.0, 0.1, 0.2), _answer(0.0, 0.2, 0.5)], [_answer(10.0, 10.1, 10.5)]]
    figures = summarize(waves)
    assert figures["seconds"] == pytest.approx(1.0)
    assert figures["tokens_per_s"] == pytest.approx(6.0)
    assert figures["ttft_p50_ms"] == pytest.approx(100.0)
    assert figures["itl_max_ms"] == pytest.approx(400.0)


def test_steady_is_after_the_last_first_token_and_before_the_first_last_one() -> None:
    early = _answer(0.0, 1.0, 2.0, 2.1, 2.2)  # waits a second while the other is prefilled
    late = _answer(0.0, 2.0, 2.1, 2.2, 3.2)
    figures = summarize([[early, late]])
    assert figures["itl_max_ms"] == pytest.approx(1000.0)
    assert figures["itl_steady_max_ms"] == pytest.approx(100.0)
    assert figures["steady_tokens_per_s"] == pytest.approx(4 / 0.2)


def test_a_disturbance_is_seen_by_those_that_were_running() -> None:
    running = _answer(0.0, 1.0, 1.1, 1.9, 2.0, 5.0)  # 800 ms as the long prompt comes at 1.2
    over = _answer(0.0, 0.1, 1.0)
    figures = disturbance([running, over], [_answer(1.2, 1.95, 2.5)])
    assert figures["running_at_arrival"] == 1
    assert figures["ttft_p50_ms"] == pytest.approx(750.0)
    assert figures["itl_max_ms"] == pytest.approx(800.0)


def test_best_is_most_tokens_and_least_waiting() -> None:
    best, median = best_and_median(
        [{"tokens_per_s": 1.0, "ttft_p50_ms": 1.0}, {"tokens_per_s": 3.0, "ttft_p50_ms": 3.0}]
    )
    assert best == {"tokens_per_s": 3.0, "ttft_p50_ms": 1.0}
    assert median == {"tokens_per_s": 2.0, "ttft_p50_ms": 2.0}


def test_a_wrong_count_is_an_error() -> None:
    ask = Ask("text", 128, 3)
    check(ask, _answer(0.0, 0.1, 0.2, tokens=3))  # two tokens may come in one event
    with pytest.raises(WrongCount, match="2 new tokens"):
        check(ask, _answer(0.0, 0.1, 0.2))
    with pytest.raises(WrongCount, match="prompt tokens"):
        check(Ask("text", 100, 2), _answer(0.0, 0.1, 0.2))
