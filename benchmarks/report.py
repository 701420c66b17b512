"""Makes tables of the results from the lines of ``benchmarks/results``.

python -m benchmarks.report [--check]   writes the tables of benchmarks/results/*.md again, or only compares them
python -m benchmarks.report zen5        prints every run of a chip, in full
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import roofline
from benchmarks.cases import describe
from benchmarks.results import FOLDER, START, read_runs
from benchmarks.servers import OURS
from benchmarks.sweep import STARTS

_NONE = "-"
_OF_SINGLE_RUNS = ("memory when idle", "start, s")  # rows that are left out of tables of several shapes
Table = list[list[str]]  # the first row is the head


@dataclass(frozen=True)
class Column:
    """One endpoint of one server, with its cases."""

    server: Mapping[str, Any]
    endpoint: str
    label: str

    @property
    def cases(self) -> Mapping[str, Any]:
        return dict(self.server["cases"].get(self.endpoint, {}))


Row = tuple[str, Callable[[Column], str]]


def as_markdown(result: Mapping[str, Any]) -> str:
    """Returns a whole result: the machine, a table with a column for each server, other cases, and missing cells."""
    machine = result["machine"]
    where = f"{machine['cpu']}, {machine['cores']} cores" + (f", {machine['gpu']}" if machine.get("gpu") else "")
    where += f", load before {machine['load_before']:.1f}"
    parts = [f"{machine['date']}, {where}; {result['model']}, sweeps: {result['sweeps']}"]
    if "roofline" in result:
        limits = result["roofline"]["limits"]
        peaks = ", ".join(f"{unit} {peak / 1e9:.0f}" for unit, peak in limits["peaks"].items() if peak)
        parts.append(f"Limits of the machine: memory {limits['read'] / 1e9:.1f} GB/s; GFLOP/s of its units: {peaks}")
    parts.append(markdown(comparison([result], every=True)))
    for column in _columns(result):
        for name, found in column.cases.items():
            if not re.fullmatch(r"[cp]\d+", name):
                figures = (f"{key} {_plain(value, 0 if value >= 100 else 2)}" for key, value in found["best"].items())
                parts.append(f"{column.label}, {name}, {describe(name)}: {', '.join(figures)}")
    parts += [f"{name}: not installed: {reason}" for name, reason in result.get("not_installed", {}).items()]
    for server in result["servers"]:
        parts += [f"{server['name']}, {case}: {reason}" for case, reason in server["failures"].items()]
    return "\n\n".join(parts) + "\n"


def comparison(results: Sequence[Mapping[str, Any]], every: bool = False) -> Table:
    """Returns a column for each server, and for each endpoint of a server with several.

    A single run is shown in full; of several runs, each with its model and format, only the most important rows are,
    and of runs with random weights still fewer. ``every`` adds the rows that the pages leave out.
    """
    names = {column.label: None for result in results for column in _columns(result)}
    rows: Table = [["", *names]]
    for result in results:
        columns = {column.label: column for column in _columns(result)}
        prefix = f"{result['name'].partition('-')[2]}: " if len(results) > 1 else ""
        if len({each["model"] for each in results}) == len(results) > 1 and "shape" in result:
            prefix = f"{result['shape']} {prefix}"
        for label, cell in _rows(result, full=len(results) == 1, every=every):
            cells = [cell(columns[name]) if name in columns else _NONE for name in names]
            if any(each != _NONE for each in cells):
                rows.append([prefix + label, *cells])
    return rows


def _columns(result: Mapping[str, Any]) -> Iterator[Column]:
    for server in result["servers"]:
        version = ".".join(next(iter(server["versions"].values()), "").split(".")[:3])
        name = f"{server['name'].removesuffix(' server')} {version}".strip()
        name = "this package" if server["name"] == OURS else name
        endpoints = list(server["cases"]) or ["rest"]
        for endpoint in endpoints:
            yield Column(server, endpoint, name if len(endpoints) == 1 else f"{name}, {endpoint}")


def _rows(result: Mapping[str, Any], full: bool, every: bool) -> list[Row]:
    found = {name for column in _columns(result) for name in (*column.cases, *column.server["failures"])}
    bursts, prompts, bodies = (
        sorted((each for each in found if re.fullmatch(kind, each)), key=lambda name: int(name[1:]))
        for kind in (r"c\d+", r"p\d+", r"r\d+")
    )
    streams, sizes = " / ".join(name[1:] for name in bursts), " / ".join(f"{int(name[1:]):,}" for name in prompts)
    usual = "median" if "shape" in result else "best"
    tenths = int(re.match(r"peers-h\d", result["name"]) is not None)  # a handler makes only tens of tokens a second
    ours = next(_columns(result)).cases

    def over(names: Sequence[str], key: str, which: str = usual, digits: int = 0) -> Callable[[Column], str]:
        return lambda column: _cell(column, names, which, lambda _, figures: _plain(figures.get(key), digits))

    def shares(names: Sequence[str]) -> Callable[[Column], str]:
        return lambda column: _cell(column, names, "best", lambda case, best: _share(case, best, result))

    def ratio(case: str, theirs: Mapping[str, float]) -> str:
        return _plain(ours[case]["best"]["tokens_per_s"] / theirs["tokens_per_s"] if case in ours else None, 2)

    def at_start(key: str) -> Callable[[Column], str]:
        def cell(column: Column) -> str:
            values = [each[key] for each in column.server[START]]
            return _plain(median(values) if values else None)

        return cell

    best = (f"tokens/s at {streams} streams, best", over(bursts, "tokens_per_s", "best", tenths))
    medians = over(bursts, "tokens_per_s", "median", tenths)
    if "shape" in result and not full:
        rows: list[Row] = [(f"tokens/s at {streams} streams, median", medians)]
    else:
        rows = [best, ("tokens/s, median", medians)]
    if every:
        rows.append(("tokens/s of the first column ÷ this", lambda column: _cell(column, bursts, "best", ratio)))
    if full:
        rows += [
            ("share of the machine's limit", shares(bursts)),
            ("first token, p50, ms", over(bursts, "ttft_p50_ms")),
            ("between tokens, p99, ms", over(bursts, "itl_p99_ms")),
        ]
    if every:
        rows += [
            ("first token, p99, ms", over(bursts, "ttft_p99_ms")),
            ("between tokens, p50, ms", over(bursts, "itl_p50_ms")),
            ("between tokens while all decode, p99, ms", over(bursts, "itl_steady_p99_ms")),
            ("CPU of the server, s", over(bursts, "cpu_s", digits=1)),
            ("CPU of the client, s", over(bursts, "client_cpu_s", digits=1)),
        ]
    rows.append((f"first token of {sizes} tokens, ms", over(prompts, "ttft_p50_ms")))
    if full:
        rows.append((f"share of the machine's limit, first token of {sizes}", shares(prompts)))
    rows += [
        (
            f"requests/s with bodies of {' / '.join(name[1:] for name in bodies)} bytes, median",
            over(bodies, "requests_per_s", "median"),
        ),
        ("longest pause, ms", over(bursts, "itl_max_ms")),
        ("most memory, MiB", lambda column: _most(column, "rss_mib")),
        ("of it not pages of files", lambda column: _most(column, "anonymous_mib")),
        ("memory when idle, MiB, median", at_start("idle_rss_mib")),
        ("start, s, median", at_start("ready_s")),
        ("first start / later / with the weights in the page cache, s", _starts),
    ]
    return [row for row in rows if full or "shape" not in result or not row[0].startswith(_OF_SINGLE_RUNS)]


def _share(case: str, figures: Mapping[str, float], result: Mapping[str, Any]) -> str:
    if "roofline" not in result:
        return _NONE
    scale = result["scale"]
    return _plain(roofline.share(case, figures, scale["prompt_tokens"], scale["new_tokens"], result["roofline"]), 2)


def _most(column: Column, key: str) -> str:
    found = [run for cases in column.server["cases"].values() for case in cases.values() for run in case["runs"]]
    return _plain(max((run[key] for run in found if key in run), default=0.0) or None)


def _starts(column: Column) -> str:
    """Returns the seconds of the three starts; nothing if they were not measured."""
    found, failures = column.server["starts"], column.server["failures"]
    cells = [
        _plain(found[kind]["ready_s"], 1) if kind in found else failures.get(f"{kind} {START}", _NONE)
        for kind in STARTS
    ]
    return cells[0] if len(set(cells)) == 1 else " / ".join(cells)


def _cell(column: Column, names: Sequence[str], which: str, show: Callable[[str, Mapping[str, float]], str]) -> str:
    """Returns one cell for several cases. If all of them are missing for the same reason, the cell has it once."""
    cases, failures = column.cases, column.server["failures"]
    cells = [show(name, cases[name][which]) if name in cases else failures.get(name, _NONE) for name in names]
    same = len(set(cells)) == 1 and not cells[0][:1].isdigit()
    return cells[0] if same else " / ".join(cells) or _NONE


def _plain(value: float | None, digits: int = 0) -> str:
    return _NONE if value is None else f"{value:,.{digits}f}"


def markdown(table: Table) -> str:
    """Returns a table in Markdown."""
    head, *rows = [f"| {' | '.join(row)} |" for row in table]
    return "\n".join([head, f"|{'---|' * len(table[0])}", *rows])


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
    """Returns a table that compares the servers of the runs of these dates. Raises KeyError for an unknown date."""
    runs = {run.head["run"][:19]: run for run in read_runs(folder / f"{chip}.jsonl")}
    results = [runs[date].as_result() for date in dates]
    measured = "; ".join(f"{result['run'][:16].replace('T', ' ')} UTC, commit {result['commit']}" for result in results)
    return f"\n{markdown(comparison(results))}\n\n{measured}\n\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chip", nargs="?", help="print the runs in this chip's file of results")
    parser.add_argument("--check", action="store_true", help="write nothing; end with status 1 if a page is stale")
    options = parser.parse_args(arguments)
    if options.chip is None:
        stale = write_pages(check=options.check)
        print("\n".join(stale))
        return 1 if stale and options.check else 0
    results = [run.as_result() for run in read_runs(FOLDER / f"{options.chip}.jsonl") if "sweeps" in run.head]
    print("\n\n".join(map(as_markdown, results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
