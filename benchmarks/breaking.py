"""Our server while things go wrong: overload, a step that fails, an engine that dies, an end under streams.

Knows our server only; every figure is a dictionary that says what was counted beside what was timed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.flood import HOST, Answered, ask, flood, percentile
from benchmarks.load import probe_health
from benchmarks.process import family, free_ports, rss_mib, running
from benchmarks.servers import clean_environment, wait_until_ready, write_mlserver_folder

MODEL = "bench"
_PREFIX = "MLSERVER_TORCH_STREAM_"
_FINAL = b'"triton_final_response":true'
_SAMPLE_S = 0.25
_EXIT_S = 60.0


@dataclass(frozen=True)
class Broken:
    """A running server that is to meet its trouble."""

    pid: int
    port: int
    grpc_port: int

    def request(self, tokens: int) -> bytes:
        tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["Once upon a time"]}
        parameters = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        body = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
        head = f"POST /v2/models/{MODEL}/infer_stream HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n"
        return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


@contextmanager
def started(uri: str, extra: Mapping[str, Any], **environment: str) -> Iterator[Broken]:
    """``environment``: our variables, in lower case and without their prefix."""
    http_port, grpc_port, metrics_port = free_ports(3)
    ports = {"http_port": http_port, "grpc_port": grpc_port, "metrics_port": metrics_port, "host": HOST}
    with TemporaryDirectory() as name:
        folder, log = Path(name), Path(name) / "server.log"
        parameters = {"uri": uri, "extra": dict(extra)}
        write_mlserver_folder(folder, MODEL, "mlserver_torch_stream.TorchStreamRuntime", parameters, ports)
        variables = {_PREFIX + key.upper(): value for key, value in environment.items()}
        command = [str(Path(sys.executable).with_name("mlserver")), "start", str(folder)]
        with running(command, {**clean_environment(), **variables}, log, folder) as process:
            wait_until_ready(process, http_port, f"/v2/models/{MODEL}/ready", log)
            yield Broken(process.pid, http_port, grpc_port)


async def overload(server: Broken, rows: int, tokens: int, seconds: float) -> dict[str, Any]:
    """Ten times what the server does with full rows, after a warm-up at full rows, and a health check beside."""
    request = server.request(tokens)
    await _together(server, tokens, rows)
    began = time.perf_counter()
    await _together(server, tokens, rows)
    per_second = 10 * rows / (time.perf_counter() - began)
    await flood(server.port, request, per_second, seconds / 6)
    flooding = asyncio.ensure_future(flood(server.port, request, per_second, seconds))
    probing = asyncio.ensure_future(probe_health(server.port, flooding))
    idle_rss, samples = rss_mib([server.pid]), []
    while not flooding.done():
        samples.append(rss_mib([server.pid]))
        await asyncio.wait([flooding], timeout=_SAMPLE_S)
    answers, health = await flooding, await probing
    refused = [each for each in answers if each.status == 429]
    served = [each for each in answers if each.status == 200]
    return {
        "requests": len(answers),
        "per_second": per_second,
        "seconds": seconds,
        "served": len(served),
        "served_whole": sum(_is_whole(each, tokens) for each in served),
        "refused": len(refused),
        "refused_with_retry_after": sum("retry-after" in each.headers for each in refused),
        "other": len(answers) - len(refused) - len(served),
        "refusal_p50_ms": 1000 * percentile([each.head_s for each in refused], 0.5),
        "refusal_p99_ms": 1000 * percentile([each.head_s for each in refused], 0.99),
        "health_p99_ms": 1000 * percentile(health, 0.99),
        "rss_mib": idle_rss,
        "rss_drift_percent": 100 * max(abs(sample - idle_rss) for sample in samples) / idle_rss,
    }


async def fault(server: Broken, streams: int, tokens: int) -> dict[str, Any]:
    """All streams of a batch meet a fault; from then on one request after another, until one is served."""
    answers = [asyncio.ensure_future(ask(server.port, server.request(tokens))) for _ in range(streams)]
    await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
    hit = time.perf_counter()
    tries = 0
    while not _is_whole(await ask(server.port, server.request(1)), 1):
        tries += 1
        if tries == 1000:
            break
    recovered = time.perf_counter() - hit
    ended = await asyncio.gather(*answers)
    return {
        "streams": streams,
        "told": sum(each.whole and sum("error" in event for event in _events(each)) == 1 for each in ended),
        "ended": sum(each.body.count(_FINAL) == 1 for each in ended),
        "refused_before_recovery": tries,
        "recovery_ms": 1000 * recovered,
    }


async def drain(server: Broken, streams: int, tokens: int, grace: float) -> dict[str, Any]:
    """SIGTERM under streams that are longer than the grace."""
    relatives = family(server.pid)
    answers = [asyncio.ensure_future(ask(server.port, server.request(tokens))) for _ in range(streams)]
    await asyncio.sleep(1.0)  # all have arrived; how far each has come does not matter
    health = f"GET /v2/health/ready HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode()
    began = time.perf_counter()
    os.kill(server.pid, signal.SIGTERM)
    while (await ask(server.port, health)).status != 503 and time.perf_counter() - began < grace + _EXIT_S:
        await asyncio.sleep(0.001)
    not_ready = time.perf_counter() - began
    ended = await asyncio.gather(*answers)
    while _lives(server.pid) and time.perf_counter() - began < grace + _EXIT_S:
        await asyncio.sleep(0.01)
    gone = time.perf_counter() - began
    return {
        "streams": streams,
        "grace_s": grace,
        "ended": sum(each.whole and each.body.count(_FINAL) == 1 for each in ended),
        "not_ready_ms": 1000 * not_ready,
        "exit_s": gone,
        "orphans": sum(_lives(pid) for pid in relatives[1:]),
    }


async def liveness(server: Broken, streams: int, tokens: int) -> dict[str, Any]:
    busy = asyncio.ensure_future(_together(server, tokens, streams))
    latencies = await probe_health(server.port, busy)
    await busy
    return {
        "streams": streams,
        "probes": len(latencies),
        "p50_ms": 1000 * percentile(latencies, 0.5),
        "p99_ms": 1000 * percentile(latencies, 0.99),
    }


async def _together(server: Broken, tokens: int, count: int) -> None:
    answers = await asyncio.gather(*(ask(server.port, server.request(tokens)) for _ in range(count)))
    assert all(_is_whole(each, tokens) for each in answers), [each.status for each in answers]


def _events(answered: Answered) -> list[dict[str, Any]]:
    """An event is one line, and one chunk."""
    return [json.loads(line[6:]) for line in answered.body.splitlines() if line.startswith(b"data: ")]


def _is_whole(answered: Answered, tokens: int) -> bool:
    """A stream that ended as it should, by its own count."""
    ended = answered.body.count(_FINAL) == 1 and b'"error":' not in answered.body
    return answered.whole and ended and b'"usage_completion_tokens":%d' % tokens in answered.body


def _lives(pid: int) -> bool:
    """A zombie is at its end: only its parent has not looked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
