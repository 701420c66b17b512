"""Computes figures from the answers of one run: percentiles, rates, and the best and the median of several runs.

Times are in milliseconds, and the keys say so.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.answers import Answer

Figures = dict[str, float]

_MORE_IS_BETTER = frozenset({"tokens_per_s", "steady_tokens_per_s", "burst_tokens_per_s", "requests_per_s"})


def percentile(values: Sequence[float], share: float) -> float:
    """Returns a percentile; interpolates linearly between the two nearest ranks, as numpy does by default."""
    if not values:
        raise ValueError("a percentile needs at least one value")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(name: str, seconds: Sequence[float]) -> Figures:
    """Returns p50, p90, p99 and maximum in milliseconds; nothing if there are no values."""
    if not seconds:
        return {}
    found = {f"{name}_p{share}_ms": 1000 * percentile(seconds, share / 100) for share in (50, 90, 99)}
    return {**found, f"{name}_max_ms": 1000 * max(seconds)}


def summarize(waves: Sequence[Sequence[Answer]]) -> Figures:
    """Returns the figures of requests that came in waves, one wave after another; time between waves does not count."""
    answers = [answer for wave in waves for answer in wave]
    seconds = sum(span(wave) for wave in waves)
    tokens = sum(answer.new_tokens for answer in answers)
    return {
        "requests": len(answers),
        "new_tokens": tokens,
        "events": sum(len(answer.arrivals) for answer in answers),
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        **spread("ttft", [answer.ttft for answer in answers]),
        **spread("itl", [gap for answer in answers for gap in answer.gaps]),
        **_steady(waves),
    }


def span(answers: Sequence[Answer]) -> float:
    return max(answer.ended for answer in answers) - min(answer.started for answer in answers)


def _steady(waves: Sequence[Sequence[Answer]]) -> Figures:
    """Counts only the time when every stream of a wave decodes: from the last first token to the first last one."""
    gaps: list[float] = []
    events, seconds = 0, 0.0
    for wave in waves:
        begin, end = steady_span(wave)
        if end > begin:
            gaps += [gap for answer in wave for gap in answer.gaps_within(begin, end)]
            events += sum(begin < at <= end for answer in wave for at in answer.arrivals)
            seconds += end - begin
    if not gaps or not seconds:
        return {}
    return {**spread("itl_steady", gaps), "steady_tokens_per_s": events / seconds}


def steady_span(wave: Sequence[Answer]) -> tuple[float, float]:
    return max(answer.arrivals[0] for answer in wave), min(answer.arrivals[-1] for answer in wave)


def disturbance(answers: Sequence[Answer], intruders: Sequence[Answer]) -> Figures:
    """Returns how long late prompts waited, and the running streams' gaps until all late prompts had a token."""
    begin = min(each.started for each in intruders)
    end = max(each.arrivals[0] for each in intruders)
    running = [answer for answer in answers if answer.arrivals[0] < begin < answer.arrivals[-1]]
    gaps = [gap for answer in running for gap in answer.gaps_within(begin, end)]
    tokens = sum(each.prompt_tokens for each in intruders) + len(gaps)
    return {
        "requests": len(answers) + len(intruders),
        "new_tokens": sum(answer.new_tokens for answer in (*answers, *intruders)),
        "running_at_arrival": len(running),
        "burst_tokens_per_s": tokens / (end - begin),  # of the prompts and of the running streams
        **spread("ttft", [each.ttft for each in intruders]),
        **spread("itl", gaps),
    }


def best_and_median(runs: Sequence[Mapping[str, float]]) -> tuple[Figures, Figures]:
    """For each figure, returns the best value and the median over the runs that have it."""
    names = dict.fromkeys(name for run in runs for name in run)
    values = {name: [run[name] for run in runs if name in run] for name in names}
    best = {name: max(found) if name in _MORE_IS_BETTER else min(found) for name, found in values.items()}
    return best, {name: statistics.median(found) for name, found in values.items()}
