"""``make soak``: short requests over all endpoints in turn; what the server holds must stay, and its counts be exact.

Knows the server only as a process with ports. The first quarter of the requests is the warm-up.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import httpx  # noqa: E402

from benchmarks import machine  # noqa: E402
from benchmarks.breaking import MODEL, Broken, started  # noqa: E402
from benchmarks.http_endpoint import HOST  # noqa: E402
from benchmarks.process import rss_mib  # noqa: E402
from benchmarks.soak_requests import SoakClient  # noqa: E402

EMBEDDED = "embedded://smollm2-135m-instruct"
OUTPUT = ROOT / "benchmarks" / "results" / "soak.json"
_CLIENTS = 4
_SAMPLES = 40
_WARM_UP = _SAMPLES // 4
_RSS_MIB = 32.0  # of all requests after the warm-up, however many they are
_COUNT = 4  # descriptors and threads: pools that fill late


@dataclass(frozen=True)
class Held:
    """What the server's process holds when no request is under way, after so many requests."""

    requests: int
    rss_mib: float
    descriptors: int
    threads: int


def soak(server: Broken, requests: int) -> tuple[list[Held], int, int]:
    """Samples, the tokens that the answers had, and those that the server has counted."""
    clients = [SoakClient(server.port, server.grpc_port) for _ in range(_CLIENTS)]
    held, tokens, sent = [], 0, 0
    try:
        with ThreadPoolExecutor(_CLIENTS) as pool:
            for sample in range(_SAMPLES):
                until = requests * (sample + 1) // _SAMPLES
                shares = [range(sent + number, until, _CLIENTS) for number in range(_CLIENTS)]
                tokens += sum(pool.map(_ask, clients, shares))
                sent = until
                held.append(held_by(server.pid, sent))
                print(f"  {sent:,} requests: {held[-1]}", file=sys.stderr, flush=True)
    finally:
        for client in clients:
            client.close()
    return held, tokens, counted_tokens(server.port)


def _ask(client: SoakClient, numbers: Sequence[int]) -> int:
    return sum(client.requests[number % len(client.requests)]() for number in numbers)


def held_by(pid: int, requests: int) -> Held:
    process = Path(f"/proc/{pid}")
    descriptors, threads = (len(list((process / name).iterdir())) for name in ("fd", "task"))
    return Held(requests, rss_mib([pid]), descriptors, threads)


def counted_tokens(port: int) -> int:
    text = httpx.get(f"http://{HOST}:{port}/metrics", timeout=30).text
    series = f'torch_stream_generation_tokens_total{{model="{MODEL}"'
    return int(sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(series)))


def problems(held: Sequence[Held], tokens: int, counted: int) -> list[str]:
    """What grew after the warm-up, and counts that differ."""
    found = [] if tokens == counted else [f"{tokens} tokens answered, {counted} counted by the server"]
    before, after = held[_WARM_UP:][: len(held) // 4], held[-(len(held) // 4) :]
    for name, most in (("rss_mib", _RSS_MIB), ("descriptors", _COUNT), ("threads", _COUNT)):
        first, last = (max(float(getattr(each, name)) for each in part) for part in (before, after))
        if last - first > most:
            found.append(f"{name} grew from {first:g} to {last:g}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Short requests over all endpoints in turn.")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--uri", default=EMBEDDED)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args(argv)
    if arguments.requests < _SAMPLES:
        parser.error(f"--requests: at least {_SAMPLES}")
    began = time.monotonic()
    with TemporaryDirectory() as folder, started(arguments.uri, {}, batch_store=folder) as server:
        held, tokens, counted = soak(server, arguments.requests)
    seconds, found = time.monotonic() - began, problems(held, tokens, counted)
    figures = {"requests": arguments.requests, "seconds": seconds, "tokens": tokens, "counted": counted}
    result = {**machine.describe(), **figures, "problems": found, "held": [asdict(each) for each in held]}
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{arguments.requests:,} requests in {seconds:.0f} s; {counted} of {tokens} tokens counted")
    print(f"after the warm-up: {held[_WARM_UP]}\nat the end: {held[-1]}")
    print(*(f"missed: {each}" for each in found), sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
