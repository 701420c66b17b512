"""Results as tables and pictures, made from the lines of ``benchmarks/results``.

python -m benchmarks.report [--check]           the tables of benchmarks/results/*.md, written again or compared
python -m benchmarks.report zen5                every run of a chip, in full
python -m benchmarks.report zen5 --plot a.png   rates and latencies of its latest run, drawn with matplotlib
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import roofline
from benchmarks.cases import describe
from benchmarks.results import FOLDER, START, read_runs

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
        if "rss_mib" not in best:
            continue
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


def _other_cases(server: Mapping[str, Any]) -> list[str]:
    """Cases that have figures of their own, best of the sweeps."""
    cases = [each for by_case in server["cases"].values() for each in by_case.items()]
    return [
        f"{server['name']}, {name}, {describe(name)}: "
        + ", ".join(
            f"{key} {value:.3g}" if value < 100 else f"{key} {value:.0f}" for key, value in case["best"].items()
        )
        for name, case in cases
        if "rss_mib" not in case["best"]
    ]


def legend(server: Mapping[str, Any]) -> list[str]:
    by_name = [each for by_case in server["cases"].values() for each in by_case.items()]
    names = dict.fromkeys(name for name, found in by_name if "rss_mib" in found["best"])
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
        most = _memory(server)
        versions = ", ".join(f"{name} {version}" for name, version in server["versions"].items())
        rows.append([
            server["name"],
            f"{min(each['ready_s'] for each in server[START]):.1f}" if server[START] else _NONE,
            f"{min(each['idle_rss_mib'] for each in server[START]):.0f}" if server[START] else _NONE,
            f"{most:.0f}" if most else _NONE,
            versions,
        ])  # fmt: skip
    return rows


def failures(result: Mapping[str, Any]) -> list[str]:
    """Every server and case that is missing from the tables, and why."""
    said = [f"{name}: not installed: {reason}" for name, reason in result.get("not_installed", {}).items()]
    for server in result["servers"]:
        said += [f"{server['name']}, {case}: {reason}" for case, reason in server["failures"].items()]
    return said


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
    if more := [line for server in servers for line in _other_cases(server)]:
        found.append(("Further cases", more))
    if missing := failures(result) if servers else []:
        found.append(("Missing", missing))
    return found


def as_text(result: Mapping[str, Any]) -> str:
    parts = []
    for title, content in sections(result):
        body = "\n".join(aligned(content) if _is_table(content) else content)  # type: ignore[arg-type]
        parts.append(f"{title}\n{body}" if title else body)
    return "\n\n".join(parts)


def as_markdown(result: Mapping[str, Any]) -> str:
    parts = []
    last = ""
    for heading, content in sections(result):
        if heading and heading != last:
            parts.append(f"## {heading}")
        last = heading
        parts.append("\n".join(_markdown(content)) if _is_table(content) else "\n\n".join(content))  # type: ignore[arg-type]
    return "\n\n".join(parts) + "\n"


def _memory(server: Mapping[str, Any]) -> float:
    found = [run for cases in server["cases"].values() for case in cases.values() for run in case["runs"]]
    return max((run["rss_mib"] for run in found if "rss_mib" in run), default=0.0)


# --- the tables of the pages: a column for each server ---


def comparison(results: Sequence[Mapping[str, Any]]) -> Table:
    """One run in full, or of several runs, each of a model and a format, what is compared first."""
    names = {server["name"]: _label(server) for result in results for server in result["servers"]}
    rows: Table = [["", *names.values()]]
    for result in results:
        by_name = {server["name"]: server for server in result["servers"]}
        prefix = f"{result['name'].partition('-')[2]}: " if len(results) > 1 else ""
        if len({each["model"] for each in results}) == len(results) > 1 and "shape" in result:
            prefix = f"{result['shape']} {prefix}"
        for label, cell in _comparison_rows(result, full=len(results) == 1):
            cells = [cell(by_name[name]) if name in by_name else _NONE for name in names]
            if any(each != _NONE for each in cells):
                rows.append([prefix + label, *cells])
    return rows


def _label(server: Mapping[str, Any]) -> str:
    if server["name"] == "mlserver-torch-stream":
        return "this package"
    version = next(iter(server["versions"].values()), "")
    return f"{server['name'].removesuffix(' server')} {'.'.join(version.split('.')[:3])}".strip()


def _comparison_rows(result: Mapping[str, Any], full: bool) -> list[tuple[str, Callable[[Mapping[str, Any]], str]]]:
    found = {name for server in result["servers"] for name in (*server["cases"].get("rest", {}), *server["failures"])}
    bursts, prompts = (
        sorted((each for each in found if re.fullmatch(kind, each)), key=lambda name: int(name[1:]))
        for kind in (r"c\d+", r"p\d+")
    )
    streams, sizes = " / ".join(name[1:] for name in bursts), " / ".join(f"{int(name[1:]):,}" for name in prompts)

    usual = "median" if "shape" in result else "best"

    def over(names: Sequence[str], key: str, which: str = "") -> Callable[[Mapping[str, Any]], str]:
        def cell(server: Mapping[str, Any]) -> str:
            return _joined(
                [_cell(server, name, which or usual, lambda _, figures: _plain(figures.get(key))) for name in names]
            )

        return cell

    def shares(names: Sequence[str]) -> Callable[[Mapping[str, Any]], str]:
        def cell(server: Mapping[str, Any]) -> str:
            return _joined(
                [_cell(server, name, "best", lambda case, best: _share(case, best, result)) for name in names]
            )

        return cell

    def memory(server: Mapping[str, Any]) -> str:
        return _plain(_memory(server) or None)

    def start(server: Mapping[str, Any]) -> str:
        return _plain(median(each["ready_s"] for each in server[START]) if server[START] else None)

    rows = [
        (f"tokens/s at {streams} streams, best", over(bursts, "tokens_per_s", "best")),
        ("tokens/s, median", over(bursts, "tokens_per_s", "median")),
        (f"first token of {sizes} tokens, ms", over(prompts, "ttft_p50_ms")),
    ]
    if full:
        rows[2:2] = [
            ("share of the machine's limit", shares(bursts)),
            ("first token, p50, ms", over(bursts, "ttft_p50_ms")),
            ("between tokens, p99, ms", over(bursts, "itl_p99_ms")),
        ]
        rows.append((f"share of the machine's limit, first token of {sizes}", shares(prompts)))
    pause = ("longest pause, ms", over(bursts, "itl_max_ms"))
    return [*rows, pause, ("most memory, MiB", memory), ("start, s, median", start)]


def _cell(server: Mapping[str, Any], case: str, which: str, show: Callable[[str, Mapping[str, float]], str]) -> str:
    found = server["cases"].get("rest", {}).get(case)
    return show(case, found[which]) if found else server["failures"].get(case, _NONE)


def _joined(cells: Sequence[str]) -> str:
    """One cell for several cases; the reason that all of them share is said once."""
    same = len(set(cells)) == 1 and not cells[0][:1].isdigit()
    return cells[0] if same else " / ".join(cells) or _NONE


def _plain(value: float | None) -> str:
    return _NONE if value is None else f"{value:,.0f}"


_TABLE = re.compile(r"(<!-- table: (\S+) (.+?) -->\n).*?(?=<!-- end -->)", re.S)


def write_pages(folder: Path = FOLDER, check: bool = False) -> list[str]:
    """Returns the pages whose tables do not agree with the results. Unless ``check`` is set, writes them again."""
    stale = []
    for page in sorted(folder.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        made = _TABLE.sub(lambda match: match[1] + _page_table(folder, match[2], match[3].split()), text)
        if made != text:
            stale.append(page.name)
            if not check:
                page.write_text(made, encoding="utf-8")
    return stale


def _page_table(folder: Path, chip: str, dates: Sequence[str]) -> str:
    """``full DATE``: all tables of a run; DATE …: one table that compares the servers. Raises KeyError."""
    runs = {run.head["run"][:19]: run for run in read_runs(folder / f"{chip}.jsonl")}
    if dates[0] == "full":
        return f"\n{as_markdown(runs[dates[1]].as_result())}\n"
    results = [runs[date].as_result() for date in dates]
    measured = "; ".join(f"{result['run'][:16].replace('T', ' ')} UTC, commit {result['commit']}" for result in results)
    return "\n" + "\n".join(_markdown(comparison(results))) + f"\n\n{measured}\n\n"


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Over the number of streams: rate, first token, gaps between tokens; a line for each server and endpoint."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(_RATIOS), figsize=(13, 4.2), layout="constrained")
    for server in result["servers"]:
        for endpoint, cases in server["cases"].items():
            for axis, (key, title) in zip(axes, _RATIOS, strict=True):
                points = [
                    (int(name[1:]), cases[name]["best"].get(key)) for name in cases if re.fullmatch(r"c\d+", name)
                ]
                if known := sorted(point for point in points if point[1]):
                    axis.plot(*zip(*known, strict=True), marker="o", label=f"{server['name']}, {endpoint}")
                axis.set(title=title, xlabel="streams at once", xscale="log")
                axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.suptitle(headline(result)[0], fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chip", nargs="?", help="the name of a file of results")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page is stale")
    parser.add_argument("--plot", type=Path, help="draw the chip's latest run that has cases")
    options = parser.parse_args(arguments)
    if options.chip is None:
        stale = write_pages(check=options.check)
        print("\n".join(stale))
        return 1 if stale and options.check else 0
    results = [run.as_result() for run in read_runs(FOLDER / f"{options.chip}.jsonl") if "sweeps" in run.head]
    if options.plot:
        plot(results[-1], options.plot)
    else:
        print("\n\n".join(map(as_text, results)))
    return 0


def _is_table(content: list[str] | Table) -> bool:
    return bool(content) and isinstance(content[0], list)


def aligned(table: Table) -> list[str]:
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


if __name__ == "__main__":
    sys.exit(main())
