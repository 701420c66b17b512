"""Results as tables, for a terminal and for Markdown, and the files that they are kept in.

Knows the shape of the JSON only: it can be printed anew from the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import beside_batch, gains, roofline
from benchmarks.cases import describe

_NONE = "-"
Table = list[list[str]]  # the first row is the head

_CASE_HEAD = [
    "case", "tokens/s best (median)", "TTFT p50", "TTFT p99", "ITL p50", "ITL p90", "ITL p99", "steady ITL p99",
    "share of limit", "RSS MiB", "server CPU s", "client CPU s",
]  # fmt: skip
# Figures where a larger number is the better one; of all others the smaller.
_RATIOS = (("tokens_per_s", "tokens/s"), ("ttft_p50_ms", "TTFT p50"), ("itl_p99_ms", "ITL p99"))


def headline(result: Mapping[str, Any]) -> list[str]:
    machine = result["machine"]
    where = f"{machine['cpu']}, {machine['cores']} cores" + (f", {machine['gpu']}" if machine.get("gpu") else "")
    load = "" if machine["load_before"] is None else f", load before {machine['load_before']:.1f}"
    return [f"{machine['date']}, {where}{load}; {result['model']}, sweeps: {result['sweeps']}"]


def limits_line(found: Mapping[str, Any]) -> list[str]:
    limits = found["limits"]
    peaks = ", ".join(f"{unit} {peak / 1e9:.0f}" for unit, peak in limits["peaks"].items() if peak)
    return [
        f"Limits of the machine: memory {limits['read'] / 1e9:.1f} GB/s; GFLOP/s of its units: {peaks}. A share of the"
        f" limit is of a decode step (c1, c16, ...) or of the first token (p2000); the unit is {found['unit']}."
    ]


def case_table(server: Mapping[str, Any], endpoint: str, result: Mapping[str, Any]) -> Table:
    rows = [_CASE_HEAD]
    for name, found in server["cases"].get(endpoint, {}).items():
        best, median = found["best"], found["median"]
        rate = f"{best['tokens_per_s']:.0f} ({median['tokens_per_s']:.0f})" if "tokens_per_s" in best else _NONE
        times = [_ms(best, key) for key in (
            "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p90_ms", "itl_p99_ms", "itl_steady_p99_ms",
        )]  # fmt: skip
        used = [f"{best['rss_mib']:.0f}", f"{best['cpu_s']:.1f}", f"{best['client_cpu_s']:.2f}"]
        rows.append([name, rate, *times, _share(name, best, result), *used])
    return rows


def _share(case: str, figures: Mapping[str, float], result: Mapping[str, Any]) -> str:
    if "roofline" not in result:
        return _NONE
    scale = result["scale"]
    share = roofline.share(case, figures, scale["prompt_tokens"], scale["new_tokens"], result["roofline"])
    return _NONE if share is None else f"{share:.2f}"


def legend(server: Mapping[str, Any]) -> list[str]:
    names = dict.fromkeys(name for by_case in server["cases"].values() for name in by_case)
    return ["; ".join(f"{name}: {describe(name)}" for name in names) + ". Times in milliseconds, best of the sweeps."]


def ratio_table(result: Mapping[str, Any]) -> Table:
    """Ours over each peer's, best against best in one run: above 1 is more tokens, below 1 is less waiting."""
    ours, *peers = result["servers"]
    rows = [["case", "", ours["name"], *(peer["name"] for peer in peers)]]
    for name, found in ours["cases"].get("rest", {}).items():
        for key, label in _RATIOS:
            if key not in found["best"]:
                continue
            mine = found["best"][key]
            cells = [_against(mine, peer["cases"].get("rest", {}).get(name), key) for peer in peers]
            rows.append([name if label == _first_label(found["best"]) else "", label, _figure(mine), *cells])
    return rows


def server_table(result: Mapping[str, Any]) -> Table:
    rows = [["server", "start s", "RSS MiB idle", "RSS MiB most", "versions"]]
    for server in result["servers"]:
        most = [
            run["rss_mib"] for cases in server["cases"].values() for found in cases.values() for run in found["runs"]
        ]
        versions = ", ".join(f"{name} {version}" for name, version in server["versions"].items())
        rows.append([
            server["name"],
            f"{min(server['start_to_ready_s']):.1f}" if server["start_to_ready_s"] else _NONE,
            f"{min(server['idle_rss_mib']):.0f}" if server["idle_rss_mib"] else _NONE,
            f"{max(most):.0f}" if most else _NONE,
            versions,
        ])  # fmt: skip
    return rows


def failures(result: Mapping[str, Any]) -> list[str]:
    """Every server and case that is missing from the tables, and why."""
    said = [f"{name}: not installed: {reason}" for name, reason in result.get("not_installed", {}).items()]
    for server in result["servers"]:
        said += [f"{server['name']}, {case}: {reason}" for case, reason in server["failures"].items()]
    return said


def growth_tables(growth: Mapping[str, Any]) -> list[Table]:
    streams: Table = [["streams", "tokens/s", "µs per token", "step ms (ITL p50)", "ITL p99", "RSS MiB"]]
    for point in growth["streams"]:
        rate = point.get("steady_tokens_per_s", point["tokens_per_s"])
        step = _ms(point, "itl_steady_p50_ms")
        streams.append([
            f"{point['streams']:.0f}", f"{rate:.0f}", f"{1e6 / rate:.0f}", step, _ms(point, "itl_steady_p99_ms"),
            f"{point['rss_mib']:.0f}",
        ])  # fmt: skip
    contexts: Table = [["context", "TTFT ms", "prompt tokens/s", "ms per new token (ITL p50)", "RSS MiB"]]
    for point in growth["contexts"]:
        rate = 1000 * point["context"] / point["ttft_p50_ms"]
        contexts.append([
            f"{point['context']:.0f}", _ms(point, "ttft_p50_ms"), f"{rate:.0f}", _ms(point, "itl_p50_ms"),
            f"{point['rss_mib']:.0f}",
        ])  # fmt: skip
    memory: Table = [["memory", "KiB"], *([name.replace("_", " ").removesuffix(" kib"), f"{value:.0f}"]
                     for name, value in growth["memory"].items() if name.endswith("_kib"))]  # fmt: skip
    return [streams, contexts, memory]


def chunk_table(points: Sequence[Mapping[str, float]]) -> Table:
    rows: Table = [["chunked_prefill_size", "ITL p50 of the others", "ITL p99", "TTFT of the long prompt"]]
    for point in points:
        times = [_ms(point, key) for key in ("itl_p50_ms", "itl_p99_ms", "ttft_p50_ms")]
        rows.append([f"{point['chunked_prefill_size']:.0f}", *times])
    return rows


def sections(result: Mapping[str, Any]) -> list[tuple[str, list[str] | Table]]:
    """Title and content of all there is in a result; a content is lines or a table."""
    found: list[tuple[str, list[str] | Table]] = [("", headline(result))]
    servers = result.get("servers", [])
    if "roofline" in result:
        found.append(("", limits_line(result["roofline"])))
    if len(servers) > 1:
        found.append(("Ratios, ours / theirs", ratio_table(result)))
    for server in servers:
        name = server["name"]
        found += [(f"{name}, {endpoint}", case_table(server, endpoint, result)) for endpoint in server["cases"]]
    if servers:
        found += [("", legend(servers[0])), ("Servers", server_table(result))]
    if "gains" in result:
        found.append(("Batching and liveness", gains.lines(result["gains"])))
    if "batches" in result:
        found.append(("Beside a batch", beside_batch.lines(result["batches"])))
    if "growth" in result:
        found += [("Growth", table) for table in growth_tables(result["growth"])]
    if "chunks" in result:
        found.append((f"Prefill chunks, {result['chunk_case']}", chunk_table(result["chunks"])))
    if missing := failures(result) if servers else []:
        found.append(("Missing", missing))
    return found


def as_text(result: Mapping[str, Any]) -> str:
    parts = []
    for title, content in sections(result):
        body = "\n".join(_aligned(content) if _is_table(content) else content)  # type: ignore[arg-type]
        parts.append(f"{title}\n{body}" if title else body)
    return "\n\n".join(parts)


def as_markdown(result: Mapping[str, Any], title: str) -> str:
    parts = [f"# {title}"]
    last = ""
    for heading, content in sections(result):
        if heading and heading != last:
            parts.append(f"## {heading}")
        last = heading
        parts.append("\n".join(_markdown(content)) if _is_table(content) else "\n\n".join(content))  # type: ignore[arg-type]
    return "\n\n".join(parts) + "\n"


def write(result: Mapping[str, Any], folder: Path, name: str, title: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / f"{name}.md").write_text(as_markdown(result, title))


def _is_table(content: list[str] | Table) -> bool:
    return bool(content) and isinstance(content[0], list)


def _aligned(table: Table) -> list[str]:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def _markdown(table: Table) -> list[str]:
    head, *rows = [f"| {' | '.join(row)} |" for row in table]
    return [head, f"|{'---|' * len(table[0])}", *rows]


def _ms(figures: Mapping[str, float], key: str) -> str:
    return _figure(figures[key]) if key in figures else _NONE


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _first_label(figures: Mapping[str, float]) -> str:
    return next(label for key, label in _RATIOS if key in figures)


def _against(mine: float, theirs: Mapping[str, Any] | None, key: str) -> str:
    if theirs is None or not theirs["best"].get(key):
        return _NONE
    return f"{mine / theirs['best'][key]:.2f} ({_figure(theirs['best'][key])})"
