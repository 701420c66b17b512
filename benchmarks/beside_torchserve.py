"""One handler, unchanged, on TorchServe 0.12 and on our server, in turn: tokens/s of a model, and requests/s.

``tokens``: a handler that generates with transformers, in cells of ``batchSize`` 1 and 16 and of 1, 4 and 16 clients,
streamed and whole. The tokens of the cells with one client are compared. ``requests``: a handler that answers at once,
asked by 64 connections of ``wrk``, which takes a small part of a core. Both servers get the same archive and
config.properties, are asked on ``/predictions/{model}`` by the same client, and take turns in each round. Cells are
medians over the rounds. Needs Java and, for ``requests``, Debian's ``wrk``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
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


async def _cells(
    url: str, batch_size: int, prompts: Prompts, tokens: int
) -> tuple[dict[str, Figures], dict[str, list[str]]]:
    """The figures by cell, and the tokens of the answers to single clients by prompt."""
    cells: dict[str, Figures] = {}
    alone: dict[str, list[str]] = {}
    unlimited = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=unlimited, timeout=aiohttp.ClientTimeout(total=None)) as session:
        await _ask(session, url, {"prompt": "Warm up.", "max_new_tokens": 4, "stream": True})
        for stream in (True, False):
            for clients in _CLIENTS:
                texts = [prompts.text(_PROMPT_TOKENS, clients, index)[0] for index in range(clients)]
                asked = [{"prompt": text, "max_new_tokens": tokens, "stream": stream} for text in texts]
                began = time.perf_counter()
                answers = await asyncio.gather(*(_ask(session, url, body) for body in asked))
                seconds = time.perf_counter() - began
                got = sum(len(ids) for ids, _, _ in answers)
                if got != tokens * clients:
                    raise RuntimeError(f"{got} tokens instead of {tokens * clients}")
                if clients == 1:
                    alone[texts[0]] = answers[0][0]
                name = f"batch {batch_size}, {clients} clients, {'streamed' if stream else 'whole'}"
                first = percentile([first for _, first, _ in answers], 0.5)
                whole = percentile([each for _, _, each in answers], 0.5)
                cells[name] = {"tokens_per_s": got / seconds, "first_ms": first * 1000, "whole_ms": whole * 1000}
    return cells, alone


def _generate(server: PredictionServer, model: Path, options: argparse.Namespace) -> tuple[dict[str, Figures], Any]:
    cells: dict[str, Figures] = {}
    alone: dict[str, list[str]] = {}
    prompts = Prompts(model, 1)
    for batch_size in _BATCH_SIZES:
        config = {"minWorkers": 1, "maxWorkers": 1, "batchSize": batch_size, "maxBatchDelay": _BATCH_DELAY_MS}
        config |= {"responseTimeout": 600}
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(server, Path(folder), "tokens", config, {"model_path": str(model)}) as (url, _),
        ):
            found, ids = asyncio.run(_cells(url, batch_size, prompts, options.tokens))
            cells |= found
            alone |= {f"{batch_size} {text}": each for text, each in ids.items()}
    return cells, alone


def _answer_at_once(
    server: PredictionServer, model: Path, options: argparse.Namespace
) -> tuple[dict[str, Figures], Any]:
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
            said = subprocess.run([*wrk, f"-d{options.seconds}s", url], check=True, capture_output=True, text=True)
            used = cpu_seconds(pid) - before
    if "Non-2xx" in said.stdout or "Socket errors" in said.stdout:
        raise RuntimeError(said.stdout)
    rate = float(re.search(r"Requests/sec:\s*([\d.]+)", said.stdout)[1])  # type: ignore[index]
    tails = {share: _ms(value) for share, value in re.findall(r"(50|99)%\s+([\d.]+\w+)", said.stdout)}
    cpu = used / (rate * options.seconds) * 1000
    return {"requests": {"per_s": rate, "p50_ms": tails["50"], "p99_ms": tails["99"], "cpu_s_per_1000": cpu}}, {}


def _ms(value: str) -> float:
    number, unit = re.fullmatch(r"([\d.]+)(\w+)", value).groups()  # type: ignore[union-attr]
    return float(number) * {"us": 0.001, "ms": 1.0, "s": 1000.0}[unit]


_PARTS: dict[str, Callable[..., tuple[dict[str, Figures], Any]]] = {"tokens": _generate, "requests": _answer_at_once}


def main(given: list[str] | None = None) -> int:
    """Prints the figures as one line of JSON. The status is 1 if the servers' tokens differ."""
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
    rounds: dict[str, list[dict[str, Figures]]] = {}
    tokens: dict[str, Any] = {}
    servers: tuple[PredictionServer, ...] = (peer, OurTorchServe())
    for number in range(options.rounds):
        for server in servers if number % 2 == 0 else servers[::-1]:
            cells, tokens[server.name] = _PARTS[options.part](server, model, options)
            rounds.setdefault(server.name, []).append(cells)
            print(json.dumps({"server": server.name, **cells}), file=sys.stderr)
    shown = {
        name: {
            cell: {figure: round(median(each[cell][figure] for each in found), 2) for figure in found[0][cell]}
            for cell in found[0]
        }
        for name, found in rounds.items()
    }
    theirs, mine = (shown[server.name] for server in servers)
    main_figure = {"tokens": "tokens_per_s", "requests": "per_s"}[options.part]
    ratios = {cell: round(mine[cell][main_figure] / theirs[cell][main_figure], 3) for cell in mine}
    equal = tokens[servers[0].name] == tokens[servers[1].name]
    print(json.dumps({**described, "part": options.part, "ratios": ratios, "servers": shown, "equal_tokens": equal}))
    if (warning := machine.warning(described)) is not None:
        print(warning, file=sys.stderr)
    return int(not equal)


if __name__ == "__main__":
    sys.exit(main())
