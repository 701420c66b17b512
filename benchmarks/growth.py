"""How cost grows: per token with the number of streams and with the context, memory per running and waiting stream.

Knows our server only: it is started with more rows, or with one, as the question needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import load
from benchmarks.answers import Ask, check_all
from benchmarks.cases import Case, Scale, warm_up
from benchmarks.figures import Figures
from benchmarks.process import Usage
from benchmarks.prompts import Prompts
from benchmarks.servers import Live, Ours
from benchmarks.sweep import run_quietly, started


@dataclass(frozen=True)
class Ladder:
    """Which sizes are tried; ``--quick`` tries less."""

    streams: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    stream_prompt: int = 32
    stream_tokens: int = 64
    contexts: Sequence[int] = (128, 512, 1024, 2048, 4096, 8000)
    context_tokens: int = 64
    waiting: int = 512
    chunks: Sequence[int] = (64, 128, 256, 512, 1024)


QUICK = Ladder(streams=(1, 4), stream_tokens=16, contexts=(128, 256), context_tokens=8, waiting=16, chunks=(64, 256))


def growth(ours: Ours, prompts: Prompts, ladder: Ladder, max_model_len: int) -> dict[str, Any]:
    rows = max(ladder.streams)
    many = replace(ours, extra={**ours.extra, "max_num_seqs": rows, "max_queued_requests": 2 * rows})
    contexts = [each for each in ladder.contexts if each + ladder.context_tokens < max_model_len]
    with started(many) as live:
        streams, lengths = run_quietly(_climb(live, prompts, ladder, contexts))
    one = replace(ours, extra={**ours.extra, "max_num_seqs": 1, "max_queued_requests": 2 * ladder.waiting})
    with started(one) as live:
        waiting = run_quietly(_waiting(live, prompts, ladder))
    return {"streams": streams, "contexts": lengths, "memory": {**_per_running(streams), **waiting}}


async def _climb(
    live: Live, prompts: Prompts, ladder: Ladder, contexts: Sequence[int]
) -> tuple[list[Figures], list[Figures]]:
    short = Scale(ladder.stream_prompt, ladder.stream_tokens, wave_streams=1)
    long = Scale(new_tokens=ladder.context_tokens, wave_streams=1)
    endpoint = live.endpoints["rest"]
    await warm_up(endpoint, short, prompts, 4)
    by_streams = [
        {"streams": count, **await Case(f"c{count}", short, prompts).run(endpoint, live.pid, 0)}
        for count in ladder.streams
    ]
    by_context = [
        {"context": length, **await Case(f"p{length}", long, prompts).run(endpoint, live.pid, 0)} for length in contexts
    ]
    return by_streams, by_context


def _per_running(streams: Sequence[Figures]) -> Figures:
    """All that a stream holds: its cache, its connection, its share of the step's buffers."""
    few, many = streams[0], streams[-1]
    more = many["streams"] - few["streams"]
    return {"running_stream_kib": 1024 * (many["rss_mib"] - few["rss_mib"]) / more} if more else {}


async def _waiting(live: Live, prompts: Prompts, ladder: Ladder) -> Figures:
    """The most memory with one stream running and many waiting, less that of one running alone."""
    endpoint = live.endpoints["rest"]

    def asks(label: str, count: int) -> list[Ask]:
        first = Ask(*prompts.text(128, "first", label), 4 * ladder.stream_tokens)
        rest = [Ask(*prompts.text(128, "waiting", label, index), 1) for index in range(count)]
        return [first, *rest]

    await load.together(endpoint, asks("warm", 4))
    async with Usage(live.pid) as alone:
        await load.together(endpoint, asks("alone", 0))
    queue = asks("queue", ladder.waiting)
    async with Usage(live.pid) as crowded:
        recordings = await load.together(endpoint, queue)
    check_all(queue, [endpoint.read(each) for each in recordings])
    more = crowded.figures["rss_mib"] - alone.figures["rss_mib"]
    return {"waiting": ladder.waiting, "waiting_stream_kib": 1024 * more / ladder.waiting}


def chunk_curve(ours: Ours, prompts: Prompts, scale: Scale, ladder: Ladder, case: str) -> list[Figures]:
    """For each size of prefill chunk: what running streams feel of a long prompt, and how long it waits itself."""
    points = []
    for chunk in ladder.chunks:
        with started(replace(ours, extra={**ours.extra, "chunked_prefill_size": chunk})) as live:
            points.append({"chunked_prefill_size": chunk, **run_quietly(_disturb(live, prompts, scale, case))})
    return points


async def _disturb(live: Live, prompts: Prompts, scale: Scale, name: str) -> Mapping[str, float]:
    endpoint = live.endpoints["rest"]
    await warm_up(endpoint, scale, prompts, 32)
    case = Case(name, scale, prompts)
    runs = [summary for sweep in range(2) if (summary := await case.run(endpoint, live.pid, sweep))]
    return min(runs, key=lambda run: run.get("itl_p99_ms", float("inf")))
