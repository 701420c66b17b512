"""``make soak``: short requests over all endpoints in turn; what the server holds must stay, and its counts be exact.

Knows the server only as a process with ports. The first quarter of the requests is the warm-up.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks import machine
from benchmarks.endpoints import HOST
from benchmarks.process import rss_mib
from benchmarks.results import FOLDER, Recorder, commit
from benchmarks.servers import EMBEDDED, Live, Ours
from benchmarks.soak_requests import MODEL, SoakClient
from benchmarks.sweep import started

_CLIENTS = 16  # half of the rows that the engine decodes together
_SAMPLES = 40
_WHEN = ("after_warm_up", "at_the_end")
_WARM_UP = _SAMPLES // 4
# How much more of each the last quarter may hold than the one after the warm-up, however many requests there are.
_MOST = {"rss_mib": 32.0, "descriptors": 4, "threads": 4}  # the latter two: pools that fill late


@dataclass(frozen=True)
class Held:
    """What the server's process holds when no request is under way, after so many requests."""

    requests: int
    rss_mib: float
    descriptors: int
    threads: int


def soak(server: Live, requests: int) -> tuple[list[Held], int, int]:
    """Samples, the tokens that the answers had, and those that the server has counted."""
    clients = [SoakClient(server.http_port, server.grpc_port) for _ in range(_CLIENTS)]
    held, tokens, sent, began = [], 0, 0, time.monotonic()
    try:
        with ThreadPoolExecutor(_CLIENTS) as pool:
            for sample in range(_SAMPLES):
                until = requests * (sample + 1) // _SAMPLES
                numbers = iter(range(sent, until))
                tokens += sum(pool.map(_ask, clients, repeat(numbers)))
                sent = until
                held.append(held_by(server.pid, sent))
                rate = sent / (time.monotonic() - began)
                left = (requests - sent) / rate / 60
                print(f"  {held[-1]}, {rate:.0f} requests/s, {left:.0f} minutes left", file=sys.stderr, flush=True)
    finally:
        for client in clients:
            client.close()
    return held, tokens, counted_tokens(server.http_port)


def _ask(client: SoakClient, numbers: Iterator[int]) -> int:
    """Takes numbers that the other clients have not taken, until there are none."""
    return sum(client.requests[number % len(client.requests)]() for number in numbers)


def held_by(pid: int, requests: int) -> Held:
    process = psutil.Process(pid)
    return Held(requests, round(rss_mib([process]), 1), process.num_fds(), process.num_threads())


def counted_tokens(port: int) -> int:
    text = httpx.get(f"http://{HOST}:{port}/metrics", timeout=30).text
    series = f'torch_stream_generation_tokens_total{{model="{MODEL}"'
    return int(sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(series)))


def growth(held: Sequence[Held]) -> dict[str, tuple[float, float]]:
    """The most of each in the quarter after the warm-up, and in the last one."""
    quarter = len(held) // 4
    first, last = held[_WARM_UP : _WARM_UP + quarter], held[-quarter:]
    return {name: (max(getattr(x, name) for x in first), max(getattr(x, name) for x in last)) for name in _MOST}


def problems(held: Sequence[Held], tokens: int, counted: int) -> list[str]:
    """What grew after the warm-up, and counts that differ."""
    found = [] if tokens == counted else [f"{tokens} tokens answered, {counted} counted by the server"]
    grown = growth(held).items()
    return found + [f"{name} grew from {a:g} to {b:g}" for name, (a, b) in grown if b - a > _MOST[name]]


def summary(result: Mapping[str, Any], held: Sequence[Held]) -> str:
    """The figures as the row of docs/reliability.md has them."""
    pairs = {name: f"{first:g}, then {last:g}" for name, (first, last) in growth(held).items()}
    return (
        f"{result['requests']:,} requests in {result['seconds']:,.0f} s: MiB of RSS {pairs['rss_mib']}; "
        f"descriptors {pairs['descriptors']}; threads {pairs['threads']}; "
        f"{result['counted']:,} of {result['tokens']:,} tokens ({result['date'][:10]}, {result['cores']} cores, "
        f"{result['cpu']})"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Short requests over all endpoints in turn.")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--uri", default=EMBEDDED)
    parser.add_argument("--output", type=Path, default=FOLDER / f"{machine.chip()}.jsonl")
    arguments = parser.parse_args(argv)
    if arguments.requests < _SAMPLES:
        parser.error(f"--requests: at least {_SAMPLES}")
    described, began, ours = machine.describe(), time.monotonic(), Ours(arguments.uri)
    with started(ours) as server:
        held, tokens, counted = soak(server, arguments.requests)
    seconds = time.monotonic() - began
    figures = {"requests": arguments.requests, "seconds": seconds, "tokens": tokens, "counted": counted}
    head = {"run": described["date"], "name": "soak", "commit": commit(), "machine": described, "model": arguments.uri}
    recorder = Recorder(arguments.output, {**head, "servers": {ours.name: ours.versions()}}, again=True)
    grown = {
        f"{name}_{when}": most for name, pair in growth(held).items() for when, most in zip(_WHEN, pair, strict=True)
    }
    recorder.add((ours.name, "", "soak", 0), {**figures, **grown})
    print(summary({**described, **figures}, held))
    found = problems(held, tokens, counted)
    print(*(f"missed: {each}" for each in found), sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
