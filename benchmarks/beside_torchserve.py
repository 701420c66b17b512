"""Compares TorchServe 0.12 and our server with the same unchanged handler: tokens/s of a model, or requests/s.

``tokens``: a handler that generates with transformers, in cells with ``batchSize`` 1 and 16 and with 1, 4 and 16
clients, streamed and whole. Both servers run, and each cell is measured on one right after the other. The tokens of the
cells with one client are compared. ``requests``: a handler that answers at once, called over 64 connections of ``wrk``,
which uses a small part of a core, with bodies of each size. Only one server runs at a time. Both servers get the same
archive and config.properties, are called on ``/predictions/{model}`` by the same client, and take turns in each round.
Cells are medians over the rounds. Needs Java and, for ``requests``, Debian's ``wrk``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from benchmarks import machine
from benchmarks.figures import Figures, percentile
from benchmarks.model_folder import model_folder
from benchmarks.peers import FOLDER
from benchmarks.peers.torchserve.peer import OurTorchServe, PredictionServer, TorchServe, serving
from benchmarks.process import cpu_seconds
from benchmarks.prompts import Prompts
from benchmarks.servers import EMBEDDED

_PROMPT_TOKENS = 32
_CLIENTS, _BATCH_SIZES = (1, 4, 16), (1, 16)
_ANSWERS = 8  # of a cell, at least
_WRK = 'wrk.method="POST"\nwrk.body=string.rep("x", {})\nwrk.headers["Content-Type"]="application/octet-stream"\n'
_MS = {"us": 0.001, "ms": 1.0, "s": 1000.0}

Servers = Sequence[PredictionServer]


class Measured:
    """The figures of several rounds, by server and cell. Each one is printed as it is added."""

    def __init__(self) -> None:
        self._rounds: dict[str, dict[str, list[Figures]]] = {}

    def add(self, server: str, cell: str, figures: Figures) -> None:
        self._rounds.setdefault(server, {}).setdefault(cell, []).append(figures)
        print(json.dumps({"server": server, "cell": cell, **figures}), file=sys.stderr)

    def medians(self, server: str) -> dict[str, Figures]:
        cells = self._rounds[server].items()
        return {
            cell: {name: round(median(each[name] for each in rounds), 2) for name in rounds[0]}
            for cell, rounds in cells
        }


def _in_turn(servers: Servers, number: int) -> Servers:
    """Reverses the order in every second round."""
    return servers if number % 2 == 0 else servers[::-1]


async def _ask(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> tuple[list[str], float, float]:
    """Returns the ids of the tokens, and the seconds to the first and to the last token."""
    began = time.perf_counter()
    first, text = 0.0, ""
    async with session.post(url, json=body) as response:
        async for data in response.content.iter_any():
            first = first or time.perf_counter() - began
            text += data.decode()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {text[:300]}")
    return text.split(), first, time.perf_counter() - began


async def _cell(
    session: aiohttp.ClientSession, url: str, asked: Sequence[Mapping[str, Any]], clients: int
) -> tuple[Figures, Any]:
    """Sends as many requests at once as there are clients. Returns the figures, and the tokens of the first answer."""
    began, answers = time.perf_counter(), []
    for at in range(0, len(asked), clients):
        answers += await asyncio.gather(*(_ask(session, url, body) for body in asked[at : at + clients]))
    seconds = time.perf_counter() - began
    got, wanted = sum(len(ids) for ids, _, _ in answers), sum(body["max_new_tokens"] for body in asked)
    if got != wanted:
        raise RuntimeError(f"the answers have {got} tokens instead of {wanted}")
    _, firsts, wholes = zip(*answers, strict=True)
    first, whole = percentile(firsts, 0.5), percentile(wholes, 0.5)
    return {"tokens_per_s": got / seconds, "first_ms": first * 1000, "whole_ms": whole * 1000}, answers[0][0]


async def _cells(
    servers: Servers,
    urls: Mapping[str, str],
    batch: int,
    prompts: Prompts,
    options: argparse.Namespace,
    found: Measured,
) -> None:
    """Measures each cell on one server right after the other."""
    unlimited = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=unlimited, timeout=aiohttp.ClientTimeout(total=None)) as session:
        for url in urls.values():
            await _ask(session, url, {"prompt": "Warm up.", "max_new_tokens": 4, "stream": True})
        for number, stream, clients in itertools.product(range(options.rounds), (True, False), _CLIENTS):
            texts = [prompts.text(_PROMPT_TOKENS, clients, index)[0] for index in range(max(clients, _ANSWERS))]
            asked = [{"prompt": text, "max_new_tokens": options.tokens, "stream": stream} for text in texts]
            name = f"batch {batch}, {clients} clients, {'streamed' if stream else 'whole'}"
            ids = []
            for server in _in_turn(servers, number):
                figures, tokens = await _cell(session, urls[server.name], asked, clients)
                found.add(server.name, name, figures)
                ids.append(tokens)
            if clients == 1 and ids[0] != ids[1]:
                raise RuntimeError(f"{name}: the servers' tokens differ")


def _tokens(servers: Servers, options: argparse.Namespace, found: Measured) -> None:
    """Measures tokens; both servers run at the same time, but only one of them gets requests."""
    model = model_folder(EMBEDDED, {})
    for batch in _BATCH_SIZES:
        config = {"minWorkers": 1, "maxWorkers": 1, "batchSize": batch, "maxBatchDelay": 50, "responseTimeout": 600}
        with ExitStack() as stack:
            urls = {}
            for server in servers:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                serves = serving(server, folder, "tokens", config, {"model_path": str(model)})
                urls[server.name], _ = stack.enter_context(serves)
            asyncio.run(_cells(servers, urls, batch, Prompts(model), options, found))


def _requests(servers: Servers, options: argparse.Namespace, found: Measured) -> None:
    """Measures requests; the servers run in turn."""
    for number in range(options.rounds):
        for server in _in_turn(servers, number):
            config = {"minWorkers": 1, "maxWorkers": 1, "batchSize": 1, "maxBatchDelay": 100}
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                serves = serving(server, folder, "echo", config, job_queue_size=1000)
                url, pid = stack.enter_context(serves)
                for size in options.body_bytes:
                    found.add(server.name, f"bodies of {size} bytes", _by_wrk(url, pid, size, options.seconds))


def _by_wrk(url: str, pid: int, size: int, seconds: int) -> Figures:
    """Returns requests/s, the latencies, and the server's CPU seconds for 1,000 requests."""
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(_WRK.format(size))
        script.flush()
        wrk = ["wrk", "-t1", "-c64", "--latency", "-s", script.name]
        subprocess.run([*wrk, "-d3s", url], check=True, capture_output=True)
        before = cpu_seconds(pid)
        said = subprocess.run([*wrk, f"-d{seconds}s", url], check=True, capture_output=True, text=True).stdout
        used = cpu_seconds(pid) - before
    if "Non-2xx" in said or "Socket errors" in said:
        raise RuntimeError(said)
    rate = float(re.findall(r"Requests/sec:\s*([\d.]+)", said)[0])
    tails = {f"p{share}_ms": float(at) * _MS[unit] for share, at, unit in re.findall(r"(50|99)%\s+([\d.]+)(\w+)", said)}
    return {"per_s": rate, **tails, "cpu_s_per_1000": used / (rate * seconds) * 1000}


_PARTS: dict[str, tuple[Callable[..., None], str]] = {
    "tokens": (_tokens, "tokens_per_s"),
    "requests": (_requests, "per_s"),
}


def main(given: list[str] | None = None) -> int:
    """Prints the figures as one line of JSON. The status is 1 if a ratio is below 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beside_torchserve", description=__doc__)
    parser.add_argument("part", choices=tuple(_PARTS))
    parser.add_argument("--tokens", type=int, default=16, help="in each answer (%(default)s)")
    parser.add_argument("--seconds", type=int, default=10, help="for which requests are sent (%(default)s)")
    parser.add_argument("--body-bytes", type=int, nargs="+", default=(1, 20_000), help="of requests (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="in which each cell is measured (%(default)s)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for TorchServe's environment (%(default)s)")
    options = parser.parse_args(given)
    peer = TorchServe(options.folder.resolve() / "torchserve", model_folder(EMBEDDED, {}))
    peer.install()
    described, servers, found = machine.describe(), (peer, OurTorchServe()), Measured()
    measure, figure = _PARTS[options.part]
    measure(servers, options, found)
    shown = {server.name: found.medians(server.name) for server in servers}
    theirs, mine = shown.values()
    ratios = {cell: round(mine[cell][figure] / theirs[cell][figure], 3) for cell in mine}
    machine.show(described, part=options.part, rounds=options.rounds, ratios=ratios, servers=shown)
    return int(min(ratios.values()) < 1)


if __name__ == "__main__":
    sys.exit(main())
