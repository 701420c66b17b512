"""``make bench``: how much sixteen streams at once gain over sixteen in turn, and how responsive the server stays.

Knows the server only as a process with a port: it is started as a user would start it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks import load
from tests.server.harness import Model, Server, serve

_MODEL = "bench"
_SUBJECTS = (
    "rivers", "bridges", "tea", "glaciers", "violins", "bees", "maps", "bread",
    "comets", "harbours", "chess", "deserts", "clocks", "whales", "paper", "wind",
)  # fmt: skip
_RATIO_GOAL = 0.25
_HEALTH_GOAL_MS = 100.0


def main() -> int:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        extra = json.loads(arguments.extra)
        models = [Model(_MODEL, arguments.uri, extra=extra)]
        settings = {"debug": False, "parallel_workers": 0, "gzip_enabled": False}
        with serve(Path(folder) / "models", models, settings=settings) as server:
            measured = asyncio.run(_measure(server, arguments.streams, arguments.tokens, arguments.health_tokens))
    result = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": _machine(),
        "versions": {name: version(name) for name in ("torch", "transformers", "mlserver")},
        "model": arguments.uri,
        "extra": extra,
        "streams": arguments.streams,
        "tokens": arguments.tokens,
        **measured,
    }
    _print_table(result)
    if arguments.output:
        Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
        Path(arguments.output).write_text(json.dumps(result, indent=2) + "\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--uri", default="embedded://smollm2-135m-instruct", help="model to serve (default: %(default)s)"
    )
    parser.add_argument("--extra", default="{}", help="its parameters.extra, as JSON")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per stream")
    parser.add_argument("--health-tokens", type=int, default=192, help="new tokens per stream beside the health probe")
    parser.add_argument("--output", help="JSON file for the result")
    return parser.parse_args()


async def _measure(server: Server, streams: int, tokens: int, health_tokens: int) -> dict[str, Any]:
    port = server.http_port
    requests = _requests(port, streams, tokens)
    await load.record(port, requests[0])
    await load.record_together(port, requests)
    together = await load.record_together(port, requests)
    in_turn = await load.record_in_turn(port, requests)
    for recording in (*together, *in_turn):
        if recording.tokens() != tokens:
            raise RuntimeError(f"a stream has {recording.tokens()} tokens instead of {tokens}")
    latencies = await _health_beside_streams(port, _requests(port, streams, health_tokens))
    return {
        "together": _summary(together, tokens),
        "in_turn": _summary(in_turn, tokens),
        "ratio": _span(together) / _span(in_turn),
        "health_live": {
            "probes": len(latencies),
            "p50_ms": 1000 * statistics.median(latencies),
            "p99_ms": 1000 * _quantile(latencies, 0.99),
            "max_ms": 1000 * max(latencies),
        },
    }


def _requests(port: int, streams: int, tokens: int) -> list[bytes]:
    prompts = [f"Here is a short text about {_SUBJECTS[i % len(_SUBJECTS)]}." for i in range(streams)]
    fixed = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    return [load.request_bytes(port, _MODEL, prompt, **fixed) for prompt in prompts]


async def _health_beside_streams(port: int, requests: Sequence[bytes]) -> list[float]:
    streams = asyncio.create_task(load.record_together(port, requests))
    latencies = await load.probe_health(port, streams)
    await streams
    return latencies


def _summary(recordings: Sequence[load.Recording], tokens: int) -> dict[str, float]:
    firsts = [recording.time_to_first_token for recording in recordings]
    return {
        "seconds": _span(recordings),
        "tokens_per_s": len(recordings) * tokens / _span(recordings),
        "ttft_p50_ms": 1000 * statistics.median(firsts),
        "ttft_max_ms": 1000 * max(firsts),
    }


def _span(recordings: Sequence[load.Recording]) -> float:
    return max(each.ended for each in recordings) - min(each.started for each in recordings)


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _machine() -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": _cpu_name(), "cores": cores, "system": platform.platform(), "python": platform.python_version()}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _print_table(result: dict[str, Any]) -> None:
    machine, health = result["machine"], result["health_live"]
    print(f"{result['date']}  {machine['cpu']}, {machine['cores']} cores  {result['model']}")
    print(f"{result['streams']} streams of {result['tokens']} tokens   seconds  tokens/s  first token p50 / max (ms)")
    for name in ("together", "in_turn"):
        row = result[name]
        times = f"{row['ttft_p50_ms']:.0f} / {row['ttft_max_ms']:.0f}"
        print(f"  {name.replace('_', ' '):<26}{row['seconds']:>9.2f}{row['tokens_per_s']:>10.0f}  {times}")
    print(f"ratio {result['ratio']:.3f} ({_verdict(result['ratio'] < _RATIO_GOAL)}: goal < {_RATIO_GOAL})")
    print(
        f"GET /v2/health/live beside {result['streams']} streams, {health['probes']} probes:"
        f" p50 {health['p50_ms']:.1f} ms, p99 {health['p99_ms']:.1f} ms, max {health['max_ms']:.1f} ms"
        f" ({_verdict(health['p99_ms'] <= _HEALTH_GOAL_MS)}: goal p99 <= {_HEALTH_GOAL_MS:.0f} ms)"
    )


def _verdict(met: bool) -> str:
    return "met" if met else "missed"


if __name__ == "__main__":
    sys.exit(main())
