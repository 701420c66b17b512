"""``make bench-reliability``: what takes time when things go wrong, against the figures to hold.

Knows the server only as a process with ports. Counts are held by the tests; they stand here so that a time that was
had by dropping requests is seen as such.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import machine  # noqa: E402
from benchmarks.breaking import drain, fault, liveness, overload, started  # noqa: E402
from benchmarks.oversized_requests import ENDLESS_TEMPLATE, oversized_requests  # noqa: E402

EMBEDDED = "embedded://smollm2-135m-instruct"
OUTPUT = ROOT / "benchmarks" / "results" / "reliability.json"
_ROWS, _QUEUE, _TOKENS = 4, 8, 16
_STREAMS, _GRACE_S = 32, 2.0
_STEP = 20  # of the faults
_GAP_MS = 1000.0
_SMALL_GAP_MS = 250.0  # beside what is about text
_KEPT_PERCENT = 10.0
# What is printed; the seconds until the refusal and the MiB of memory to hold.
_OVERSIZED = {
    "stop": ("1,000,000 stop strings", 2.0, 256.0),
    "long_stop": ("16 stop strings of 0.6 MB, n of 16", 2.0, 256.0),
    "inputs": ("60,000 input tensors", 1.0, 256.0),
    "n": ("n of 1,000,000,000", 1.0, 64.0),
    "prompts": ("6 prompts of 15 MB at a time", 15.0, 512.0),
    "prompts_left": ("6 prompts of 15 MB, clients leave after 3 s", 5.0, 512.0),
    "template": ("6 chats, template without end", 20.0, 64.0),
    "file_announced": ("10 GB file, size announced", 1.0, 64.0),
    "file_unannounced": ("10 GB file, size unannounced", 20.0, 64.0),
}


class Figure(NamedTuple):
    what: str
    measured: float
    most: float
    unit: str
    counted: str

    @property
    def held(self) -> bool:
        return self.measured <= self.most


def measure(uri: str, seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    _say(f"overload, {seconds:g} s")
    with started(uri, {"max_num_seqs": _ROWS, "max_queued_requests": _QUEUE}) as server:
        found["overload"] = asyncio.run(overload(server, _ROWS, _TOKENS, seconds))
    for kind in ("raise", "death"):
        _say(f"fault: {kind}")
        with started(uri, {}, faults=f"decode:{_STEP}:{kind}") as server:
            found[kind] = asyncio.run(fault(server, 8, 4 * _STEP))
    _say("liveness, drain")
    with started(uri, {}, drain_grace=str(_GRACE_S)) as server:
        found["liveness"] = asyncio.run(liveness(server, 16, 64))
        found["drain"] = asyncio.run(drain(server, _STREAMS, 1500, _GRACE_S))
    _say("requests that ask for too much")
    with (
        TemporaryDirectory() as folder,
        started(uri, {"chat_template": ENDLESS_TEMPLATE}, batch_store=folder) as server,
    ):
        found["oversized"] = asyncio.run(oversized_requests(server))
    return found


def figures(found: dict[str, Any]) -> list[Figure]:
    flood, end, live = found["overload"], found["drain"], found["liveness"]
    excess = f"{flood['refused']} refused, {flood['refused_with_retry_after']} with Retry-After, {flood['other']} other"
    served = f"{flood['served_whole']} of {flood['served']} served whole"
    at_full = f"{flood['per_second']:.0f} requests/s for {flood['seconds']:g} s"
    rows = [
        Figure("10x overload: 429 p99", flood["refusal_p99_ms"], 50, "ms", f"{at_full}: {excess}"),
        Figure("10x overload: RSS drift", flood["rss_drift_percent"], 2, "%", f"{served}; {flood['rss_mib']:.0f} MiB"),
        Figure("10x overload: liveness p99", flood["health_p99_ms"], 100, "ms", "GET /v2/health/live"),
    ]
    for kind, name in (("raise", "exception at a step"), ("death", "engine death")):
        one = found[kind]
        counted = f"{one['told']} of {one['streams']} told once, {one['refused_before_recovery']} refused before"
        rows.append(Figure(f"{name}: next request served", one["recovery_ms"], 1000, "ms", counted))
    proper = f"{end['ended']} of {end['streams']} proper ends, {end['orphans']} orphans"
    return [
        *rows,
        Figure("SIGTERM: readiness is 503", end["not_ready_ms"], 1000, "ms", f"under {end['streams']} streams"),
        Figure("SIGTERM: exit", end["exit_s"], end["grace_s"] + 5, "s", f"grace {end['grace_s']:g} s; {proper}"),
        Figure(f"liveness p99, {live['streams']} streams", live["p99_ms"], 100, "ms", f"{live['probes']} probes"),
        *_oversized_figures(found["oversized"]),
    ]


def _oversized_figures(found: dict[str, Any]) -> list[Figure]:
    rows = []
    alone = f"{found['none']['longest_gap_ms']:.0f} ms in a stream alone"
    live = f"{found['none']['longest_live_ms']:.0f} ms beside a stream alone"
    for name, (what, seconds, mib) in _OVERSIZED.items():
        one = found[name]
        named = ", the field named" if one.get("named") else ""
        counted = f"status {one['status']} after {one['sent_mib']:.0f} MiB{named}"
        rows.append(Figure(f"{what}: refused", one["seconds"], seconds, "s", counted))
        rows.append(Figure(f"{what}: RSS growth", one["rss_grown_mib"], mib, "MiB", counted))
        most = _GAP_MS if name.startswith("file") else _SMALL_GAP_MS
        rows.append(Figure(f"{what}: longest gap of a stream beside", one["longest_gap_ms"], most, "ms", alone))
        rows.append(Figure(f"{what}: longest answer of liveness", one["longest_live_ms"], most, "ms", live))
        kept = 100 * one["rss_kept_mib"] / one["rss_before_mib"]
        rows.append(Figure(f"{what}: RSS kept", kept, _KEPT_PERCENT, "%", f"of {one['rss_before_mib']:.0f} MiB"))
    return rows


def table(rows: list[Figure]) -> str:
    lines = ["| figure | measured | to hold | counted |", "|---|---|---|---|"]
    for row in rows:
        verdict = "" if row.held else " **missed**"
        lines.append(
            f"| {row.what} | {row.measured:.1f} {row.unit}{verdict} | ≤ {row.most:g} {row.unit} | {row.counted} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uri", default=EMBEDDED, help="model: embedded://, a folder, a .gguf file (%(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload (%(default)s)")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="(%(default)s)")
    options = parser.parse_args(arguments)
    described = machine.describe()
    if (busy := machine.warning(described)) is not None:
        _say(f"warning: {busy}")
    found = measure(options.uri, options.seconds)
    rows = figures(found)
    print(table(rows))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    result = {"machine": described, "model": options.uri, **found, "held": {row.what: row.held for row in rows}}
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(row.held for row in rows) else 1


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
