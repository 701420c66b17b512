"""One handler, unchanged, on TorchServe 0.12 and on our server, in turn: tokens/s of a model, and requests/s.

``tokens``: a handler that generates with transformers, in cells of ``batchSize`` 1 and 16 and of 1, 4 and 16 clients,
streamed and whole; both servers run, and each cell is measured on one right after the other. The tokens of the cells
with one client are compared. ``requests``: a handler that answers at once, asked by 64 connections of ``wrk``, which
takes a small part of a core; one server runs at a time. Both servers get the same archive and config.properties, are
asked on ``/predictions/{model}`` by the same client, and take turns in each round. Cells are medians over the rounds.
Needs Java and, for ``requests``, Debian's ``wrk``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
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
from benchmarks.bench import EMBEDDED
from benchmarks.figures import percentile
from benchmarks.model_folder import model_folder
from benchmarks.peers.torchserve.peer import OurTorchServe, PredictionServer, TorchServe, serving
from benchmarks.process import cpu_seconds
from benchmarks.prompts import Prompts

_PROMPT_TOKENS = 32
_BATCH_DELAY_MS = 50
_CLIENTS, _BATCH_SIZES = (1, 4, 16), (1, 16)
_CONNECTIONS = 64
_WRK = 'wrk.method="POST"\nwrk.body="x"\nwrk.headers["Content-Type"]="application/octet-stream"\n'

Figures = dict[str, float]
Measured = dict[str, dict[str, list[Figures]]]  # by server and cell, one a round


async def _ask(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> tuple[list[str], float, float]:
    """The ids of the tokens, the seconds to the first one, and to the last."""
    began = time.perf_counter()
    first, text = 0.0, ""
    async with session.post(url, json=body) as response:
        async for data in response.content.iter_any():
            first = first or time.perf_counter() - began
            text += data.decode()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {text[:300]}")
    return text.split(), first, time.perf_counter() - began


async def _cell(session: aiohttp.ClientSession, url: str, asked: Sequence[Mapping[str, Any]]) -> tuple[Figures, Any]:
    """The figures of requests that come at once, and the tokens of the first answer."""
    began = time.perf_counter()
    answers = await asyncio.gather(*(_ask(session, url, body) for body in asked))
    seconds = time.perf_counter() - began
    got, wanted = sum(len(ids) for ids, _, _ in answers), sum(body["max_new_tokens"] for body in asked)
    if got != wanted:
        raise RuntimeError(f"{got} tokens instead of {wanted}")
    first = percentile([first for _, first, _ in answers], 0.5)
    whole = percentile([each for _, _, each in answers], 0.5)
    return {"tokens_per_s": got / seconds, "first_ms": first * 1000, "whole_ms": whole * 1000}, answers[0][0]


async def _rounds(urls: Mapping[str, str], batch_size: int, prompts: Prompts, options: argparse.Namespace) -> Measured:
    """Each cell is measured on one server right after the other, and again in the next round, the other way about."""
    found: Measured = {name: {} for name in urls}
    unlimited = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=unlimited, timeout=aiohttp.ClientTimeout(total=None)) as session:
        for url in urls.values():
            await _ask(session, url, {"prompt": "Warm up.", "max_new_tokens": 4, "stream": True})
        for number in range(options.rounds):
            for stream, clients in itertools.product((True, False), _CLIENTS):
                texts = [prompts.text(_PROMPT_TOKENS, clients, index)[0] for index in range(clients)]
                asked = [{"prompt": text, "max_new_tokens": options.tokens, "stream": stream} for text in texts]
                name = f"batch {batch_size}, {clients} clients, {'streamed' if stream else 'whole'}"
                ids = []
                for server in list(urls) if number % 2 == 0 else list(urls)[::-1]:
                    figures, tokens = await _cell(session, urls[server], asked)
                    found[server].setdefault(name, []).append(figures)
                    ids.append(tokens)
                    _say(server, name, figures)
                if clients == 1 and ids[0] != ids[1]:
                    raise RuntimeError(f"{name}: the servers' tokens differ")
    return found


def _generate(servers: Sequence[PredictionServer], model: Path, options: argparse.Namespace) -> Measured:
    """Both servers run at the same time, and one of them is asked."""
    prompts, found = Prompts(model, 1), _nothing(servers)
    for batch_size in _BATCH_SIZES:
        config = {"minWorkers": 1, "maxWorkers": 1, "batchSize": batch_size, "maxBatchDelay": _BATCH_DELAY_MS}
        config |= {"responseTimeout": 600}
        with ExitStack() as stack:
            urls = {}
            for server in servers:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                serves = serving(server, folder, "tokens", config, {"model_path": str(model)})
                urls[server.name], _ = stack.enter_context(serves)
            cells = asyncio.run(_rounds(urls, batch_size, prompts, options))
        for name, figures in cells.items():
            found[name] |= figures
    return found


def _answer_at_once(servers: Sequence[PredictionServer], model: Path, options: argparse.Namespace) -> Measured:
    """The servers run in turn."""
    found = _nothing(servers)
    for number in range(options.rounds):
        for server in servers if number % 2 == 0 else servers[::-1]:
            figures = _requests(server, options.seconds)
            found[server.name].setdefault("requests", []).append(figures)
            _say(server.name, "requests", figures)
    return found


def _nothing(servers: Sequence[PredictionServer]) -> Measured:
    return {server.name: {} for server in servers}


def _say(server: str, cell: str, figures: Figures) -> None:
    print(json.dumps({"server": server, "cell": cell, **figures}), file=sys.stderr)


def _requests(server: PredictionServer, seconds: int) -> Figures:
    """Requests/s, and the CPU seconds of the server for 1,000 requests."""
    config = {"minWorkers": 1, "maxWorkers": 1, "batchSize": 1, "maxBatchDelay": 100}
    with tempfile.TemporaryDirectory() as name:
        folder, script = Path(name) / "server", Path(name) / "post.lua"
        folder.mkdir()
        script.write_text(_WRK)
        with serving(server, folder, "echo", config, job_queue_size=1000) as (url, pid):
            wrk = ["wrk", "-t1", f"-c{_CONNECTIONS}", "--latency", "-s", str(script)]
            subprocess.run([*wrk, "-d3s", url], check=True, capture_output=True)
            before = cpu_seconds(pid)
            said = subprocess.run([*wrk, f"-d{seconds}s", url], check=True, capture_output=True, text=True)
            used = cpu_seconds(pid) - before
    if "Non-2xx" in said.stdout or "Socket errors" in said.stdout:
        raise RuntimeError(said.stdout)
    rate = float(re.search(r"Requests/sec:\s*([\d.]+)", said.stdout)[1])  # type: ignore[index]
    tails = {share: _ms(value) for share, value in re.findall(r"(50|99)%\s+([\d.]+\w+)", said.stdout)}
    return {
        "per_s": rate,
        "p50_ms": tails["50"],
        "p99_ms": tails["99"],
        "cpu_s_per_1000": used / (rate * seconds) * 1000,
    }


def _ms(value: str) -> float:
    number, unit = re.fullmatch(r"([\d.]+)(\w+)", value).groups()  # type: ignore[union-attr]
    return float(number) * {"us": 0.001, "ms": 1.0, "s": 1000.0}[unit]


_PARTS: dict[str, Callable[..., Measured]] = {"tokens": _generate, "requests": _answer_at_once}


def main(given: list[str] | None = None) -> int:
    """Prints the figures as one line of JSON. The status is 1 if a ratio is below 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beside_torchserve", description=__doc__)
    parser.add_argument("part", choices=tuple(_PARTS))
    parser.add_argument("--uri", default=EMBEDDED, help="the model (%(default)s)")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer (%(default)s)")
    parser.add_argument("--seconds", type=int, default=10, help="of requests (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser.add_argument("--folder", type=Path, default=cache / "mlserver-torch-stream" / "peers")
    options = parser.parse_args(given)
    model = model_folder(options.uri, {})
    peer = TorchServe(options.folder.resolve() / "torchserve", model, os.environ.get("TORCH_INDEX") or None)
    peer.install()
    described = machine.describe()
    servers: tuple[PredictionServer, ...] = (peer, OurTorchServe())
    found = _PARTS[options.part](servers, model, options)
    shown = {
        name: {
            cell: {figure: round(median(each[figure] for each in rounds), 2) for figure in rounds[0]}
            for cell, rounds in cells.items()
        }
        for name, cells in found.items()
    }
    theirs, mine = (shown[server.name] for server in servers)
    figure = {"tokens": "tokens_per_s", "requests": "per_s"}[options.part]
    ratios = {cell: round(mine[cell][figure] / theirs[cell][figure], 3) for cell in mine}
    print(json.dumps({**described, "part": options.part, "rounds": options.rounds, "ratios": ratios, "servers": shown}))
    if (warning := machine.warning(described)) is not None:
        print(warning, file=sys.stderr)
    return int(min(ratios.values()) < 1)


if __name__ == "__main__":
    sys.exit(main())
