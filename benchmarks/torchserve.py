"""``make bench-torchserve``: one handler, unchanged, on TorchServe and on our server, in turn; and ratios.

Knows no handler: both servers are given the same archive. Both stream pieces of one token each, whose ids are compared.
The same client reads ``/predictions/{model}`` of both, in chunks. Our server is asked for events of V2 as well
(``ours, V2``), whose client has more to read for each token; client and server share the machine. The servers take
turns; a figure is the median over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import httpx

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import bench, machine  # noqa: E402
from benchmarks.figures import percentile  # noqa: E402
from benchmarks.model_folder import model_folder  # noqa: E402
from benchmarks.peers.peer import PeerUnavailable  # noqa: E402
from benchmarks.peers.torchserve.peer import ECHO, MODEL, TOKENS, TorchServe, write_mar  # noqa: E402
from benchmarks.process import free_ports, running  # noqa: E402
from benchmarks.prompts import Prompts  # noqa: E402
from benchmarks.servers import clean_environment, wait_until_ready  # noqa: E402

_TIMEOUT_S = 600.0
_PROMPT_TOKENS = 32
_LEAVING_TOKENS = 256  # of the stream whose client leaves after its first token
_BATCH_DELAY_MS = 50
_CONCURRENCIES = (1, 4, 16)
_ECHO_CLIENTS, _ECHO_SECONDS = 64, 10.0
_PREDICTIONS = f"/predictions/{MODEL}"


@dataclass(frozen=True)
class Stream:
    """One answer. ``arrivals``: when each token came, in seconds since the request was sent."""

    ids: list[str]
    arrivals: list[float]
    seconds: float


@dataclass(frozen=True)
class Side:
    """A running server, by how it is asked."""

    url: str
    body: Callable[[Mapping[str, Any]], Any]
    pieces: Callable[[httpx.Response], AsyncIterator[str]]

    async def ask(self, client: httpx.AsyncClient, prompt: str, tokens: int, leave_after: int | None = None) -> Stream:
        body = self.body({"prompt": prompt, "max_new_tokens": tokens})
        ids: list[str] = []
        arrivals: list[float] = []
        began = time.perf_counter()
        async with client.stream("POST", self.url, json=body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"status {response.status_code}: {(await response.aread())[:300]!r}")
            async for text in self.pieces(response):
                fresh = text.split()
                ids += fresh
                arrivals += [time.perf_counter() - began] * len(fresh)
                if leave_after is not None and len(ids) >= leave_after:
                    break
        return Stream(ids, arrivals, time.perf_counter() - began)


@dataclass
class Measured:
    """Of one server with one ``batchSize``; ``rounds`` has the figures of each case, by round."""

    name: str
    batch_size: int
    rounds: list[dict[str, dict[str, float]]] = field(default_factory=list)
    after_leaving_s: list[float] = field(default_factory=list)  # until the next request has its answer
    ids: dict[str, list[str]] = field(default_factory=dict)

    @property
    def cases(self) -> dict[str, dict[str, float]]:
        """Medians over the rounds."""
        return {
            case: {name: median(each[case][name] for each in self.rounds) for name in figures}
            for case, figures in self.rounds[0].items()
        }

    def as_json(self) -> dict[str, Any]:
        return {
            "server": self.name,
            "batch_size": self.batch_size,
            "cases": self.cases,
            "after_leaving_s": median(self.after_leaving_s),
            "rounds": self.rounds,
        }


async def requests_per_second(url: str, seconds: float) -> float:
    """Of clients that each send their next request when the last one is answered, over connections that are kept."""
    end = time.perf_counter() + seconds
    answered = 0

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal answered
        while time.perf_counter() < end:
            async with session.post(url, data=b"x") as response:
                if (response.status, await response.read()) != (200, b"ok"):
                    raise RuntimeError(f"status {response.status}: {(await response.read())[:300]!r}")
            answered += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for count in (1, _ECHO_CLIENTS):
            answered, began = 0, time.perf_counter()
            end = began + (1.0 if count == 1 else seconds)
            await asyncio.gather(*(client(session) for _ in range(count)))
    return answered / (time.perf_counter() - began)


async def measure(side: Side, measured: Measured, prompts: Prompts, tokens: int, waves: int) -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    measured.rounds.append({})
    async with httpx.AsyncClient(timeout=_TIMEOUT_S, limits=limits) as client:
        await side.ask(client, "Warm up.", 4)
        for count in _CONCURRENCIES:
            streams: list[Stream] = []
            seconds = 0.0
            for wave in range(waves):
                texts = [prompts.text(_PROMPT_TOKENS, count, wave, index)[0] for index in range(count)]
                began = time.perf_counter()
                answers = await asyncio.gather(*(side.ask(client, text, tokens) for text in texts))
                seconds += time.perf_counter() - began
                streams += answers
                if count == 1:
                    measured.ids[texts[0]] = answers[0].ids
            got = sum(len(stream.ids) for stream in streams)
            if got != tokens * len(streams):
                raise RuntimeError(f"{measured.name}: {got} tokens instead of {tokens * len(streams)}")
            ttft = [stream.arrivals[0] for stream in streams]
            measured.rounds[-1][f"c{count}"] = {
                "tokens_per_s": got / seconds,
                "ttft_p50_ms": 1000 * percentile(ttft, 0.5),
                "ttft_max_ms": 1000 * max(ttft),
            }
        await side.ask(client, "Leave early.", _LEAVING_TOKENS, leave_after=1)
        measured.after_leaving_s.append((await side.ask(client, "And now?", 1)).seconds)


@contextmanager
def torchserve(peer: TorchServe, config: Mapping[str, object], handler: Path = TOKENS) -> Iterator[Side]:
    with tempfile.TemporaryDirectory() as folder, peer.serving(Path(folder), config, handler) as (port, _):
        yield Side(f"http://127.0.0.1:{port}{_PREDICTIONS}", lambda request: dict(request), _plain)


@contextmanager
def ours(config: Mapping[str, object], handler: Path = TOKENS, *, events: bool = False) -> Iterator[Side]:
    """``events``: asked for events of V2 instead of TorchServe's chunks."""
    http_port, grpc_port, metrics_port = free_ports(3)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_mar(folder / f"{MODEL}.mar", config, handler)
        settings = {
            "name": MODEL,
            "implementation": "mlserver_torch_stream.TorchServeRuntime",
            "parameters": {"uri": f"./{MODEL}.mar", "extra": {"ts": "shim"}},
        }
        (folder / "model-settings.json").write_text(json.dumps(settings))
        ports = {"http_port": http_port, "grpc_port": grpc_port, "metrics_port": metrics_port, "host": "127.0.0.1"}
        flags = {"debug": False, "parallel_workers": 0, "gzip_enabled": False}
        (folder / "settings.json").write_text(json.dumps({**ports, **flags}))
        log = folder / "server.log"
        command = [str(Path(sys.executable).with_name("mlserver")), "start", name]
        environment = {**clean_environment(), "HF_HUB_OFFLINE": "1"}
        with running(command, environment, log, folder) as process:
            wait_until_ready(process, http_port, "/v2/health/ready", log)
            path, pieces = (f"/v2/models/{MODEL}/generate_stream", _events) if events else (_PREDICTIONS, _plain)
            yield Side(f"http://127.0.0.1:{http_port}{path}", lambda request: dict(request), pieces)


async def _plain(response: httpx.Response) -> AsyncIterator[str]:
    async for text in response.aiter_text():
        yield text


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            event = json.loads(line[5:])
            if "error" in event:
                raise RuntimeError(event["error"])
            yield event["outputs"][0]["data"][0]


def as_text(rows: Sequence[Measured]) -> str:
    lines = [f"{'server':12} {'batch':>5}  " + "  ".join(f"{f'c{c} tok/s (ttft ms)':>22}" for c in _CONCURRENCIES)]
    for row in rows:
        shown = [f"{case['tokens_per_s']:.1f} ({case['ttft_p50_ms']:.0f})" for case in row.cases.values()]
        cases = "  ".join(f"{each:>22}" for each in shown)
        lines.append(f"{row.name:12} {row.batch_size:>5}  {cases}  after leaving: {median(row.after_leaving_s):.2f} s")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    folder = model_folder(options.uri, {})
    peer = TorchServe(options.folder.resolve() / "torchserve", folder, os.environ.get("TORCH_INDEX") or None)
    try:
        bench.say("torchserve: installing where it is not there yet")
        peer.install()
    except PeerUnavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    described = machine.describe()
    if (busy := machine.warning(described)) is not None:
        print(f"warning: {busy}", file=sys.stderr)
    prompts = Prompts(folder, 1)
    sides: dict[str, Callable[..., AbstractContextManager[Side]]] = {
        "torchserve": partial(torchserve, peer), "ours": ours, "ours, V2": partial(ours, events=True)
    }  # fmt: skip
    rows = [Measured(name, batch_size) for batch_size in (1, 16) for name in sides]
    for row in rows * options.rounds:
        config: dict[str, object] = {
            "minWorkers": 1, "maxWorkers": 1, "batchSize": row.batch_size, "maxBatchDelay": _BATCH_DELAY_MS,
            "responseTimeout": 600, "deviceType": "cpu", "handler": {"model_path": str(folder)},
        }  # fmt: skip
        bench.say(f"{row.name}, batchSize {row.batch_size}, round {len(row.rounds) + 1}")
        with sides[row.name](config) as side:
            asyncio.run(measure(side, row, prompts, options.tokens, options.waves))
    rates: dict[str, float] = {}
    for name in ("torchserve", "ours"):
        bench.say(f"{name}, a handler that answers at once, {_ECHO_CLIENTS} clients")
        with sides[name]({"minWorkers": 1, "maxWorkers": 1, "jobQueueSize": 1000, "deviceType": "cpu"}, ECHO) as side:
            rates[name] = asyncio.run(requests_per_second(side.url, _ECHO_SECONDS))
    theirs, mine = rows[0].ids, rows[1].ids
    equal = sum(theirs[text] == mine[text] for text in theirs)
    print(as_text(rows))
    shown = ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
    print(f"requests/s of a handler that answers at once, {_ECHO_CLIENTS} clients: {shown}")
    print(f"tokens alone, on both: equal in {equal} of {len(theirs)} answers")
    result = {
        "machine": described,
        "model": options.uri,
        "versions": peer.versions(),
        "tokens": options.tokens,
        "waves": options.waves,
        "rounds": options.rounds,
        "requests_per_s": rates,
        "equal": [equal, len(theirs)],
        "servers": [row.as_json() for row in rows],
    }
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if equal == len(theirs) else 1


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser.add_argument("--uri", default=bench.EMBEDDED, help="the model (%(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer (%(default)s)")
    parser.add_argument("--waves", type=int, default=3, help="of requests that come at once (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="in which each server is started once (%(default)s)")
    parser.add_argument("--folder", type=Path, default=cache / "mlserver-torch-stream" / "peers")
    parser.add_argument("--output", type=Path, help="where the result goes, as JSON")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
