"""The figures of ``cache_layout`` as tables in Markdown, and the files that they are kept in.

Knows the shape of the JSON only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Table = list[list[str]]  # the first row is the head
Figures = Mapping[str, Any]


def step_bytes(found: Figures, model: Figures) -> dict[str, float]:
    """Bytes that a decode step reads and moves at least: of one case, in three ways to lay a cache out and to read it.

    Attention over slabs reads padding too, but for our kernels'. One forward takes all batches where nothing else is
    said.
    """
    weights, column = model["weights_read"], found["live"] * model["bytes_per_column"]
    return {
        "slabs": found.get("forwards", 1) * weights + (found["read"] + found["moved"]) * column,
        "live columns": weights + (1 + found["moved"]) * column,
        "pages": weights + column,
    }


def sizing_table(result: Figures) -> Table:
    """What docs/scaling.md quotes: of all numbers of streams, and how many of them fit the budget."""
    rows = [["lengths", "tokens in a row", "slabs hold", "at the defaults", "pages of 16 hold", "attention reads",
             "streams in slabs: `max_tokens` as needed / 1,024 / 4,096", "in pages"]]  # fmt: skip
    for name in result["traffic"]:
        held = [each for each in result["holding"] if each["traffic"] == name]
        fits = [each for each in result["fitting"] if each["traffic"] == name]
        usual = next(each for each in held if each["streams"] == result["streams"])
        default = next(each for each in result["default"] if each["traffic"] == name)
        rows.append([
            f"`{name}`", f"{usual['live'] / usual['rows']:,.0f}", _range([each["held"] for each in held]),
            _times(default["held"], 1), _range([each["pages"]["16"] for each in held], 2),
            _range([each["read"] for each in held]),
            " / ".join(f"{each['slabs']['rows']:.0f}" for each in fits),
            next(f"{each['pages']['16']['rows']:.0f}" for each in fits if each["asked"] == result["max_tokens"]),
        ])  # fmt: skip
    return rows


def holding_table(cases: Sequence[Figures], layers: int) -> Table:
    rows = [["lengths", "streams", "live columns", "slabs hold", "pages of 16", "of 64", "batches", "attention reads",
             "moved a step", "beside, in a move"]]  # fmt: skip
    for found in cases:
        rows.append([
            found["traffic"], str(found["streams"]), f"{found['live']:,.0f}", _times(found["held"]),
            *(_times(found["pages"][page], 3) for page in ("16", "64")), f"{found['batches']:.1f}",
            _times(found["read"]), _times(found["moved"]), _times(found["copy"] / layers),
        ])  # fmt: skip
    return rows


def asked_table(result: Figures) -> Table:
    usual = [each for each in result["holding"] if each["streams"] == result["streams"]]
    found = {(each["traffic"], each["asked"]): _times(each["held"]) for each in [*usual, *result["asked"]]}
    asked = list(dict.fromkeys(each["asked"] for each in result["fitting"]))
    head = ["lengths", *(_asked(most) for most in asked)]
    return [head, *([name, *(found[name, most] for most in asked)] for name in result["traffic"])]


def fitting_table(result: Figures) -> Table:
    rows = [["lengths", "`max_tokens`", "slabs", "pages of 16", "of 64", "pages / slabs", "live of slabs",
             "preempted", "recomputed"]]  # fmt: skip
    for each in result["fitting"]:
        slabs, pages = each["slabs"], each["pages"]["16"]
        rows.append([
            each["traffic"], _asked(each["asked"]), f"{slabs['rows']:.1f}", f"{pages['rows']:.1f}",
            f"{each['pages']['64']['rows']:.1f}", _times(pages["rows"] / slabs["rows"]), f"{slabs['live']:.0%}",
            f"{pages['preempted']:.2f}", f"{pages['recomputed']:.0%}",
        ])  # fmt: skip
    return rows


def step_table(result: Figures) -> Table:
    rows = [["lengths", "streams", "slabs", "live columns only", "pages", "slabs / pages"]]
    for found in result["holding"]:
        gigabytes = {name: size / 1e9 for name, size in step_bytes(found, result["model"]).items()}
        rows.append([
            found["traffic"], str(found["streams"]), *(f"{size:.0f}" for size in gigabytes.values()),
            _times(gigabytes["slabs"] / gigabytes["pages"]),
        ])  # fmt: skip
    return rows


def rules_table(result: Figures) -> Table:
    rows = [["lengths", "rules", "at the defaults", "slabs hold", "batches", "attention reads", "moved a step",
             "GB a step", "streams in the budget"]]  # fmt: skip
    for name in result["traffic"]:
        for found in (each for each in result["rules"] if each["traffic"] == name):
            step = step_bytes(found, result["model"])["slabs"]
            rows.append([
                name, found["rules"], _times(found["default"]), _times(found["held"]), f"{found['batches']:.1f}",
                _times(found["read"]), _times(found["moved"]), f"{step / 1e9:.0f}", f"{found['fit']:.1f}",
            ])  # fmt: skip
    return rows


def as_markdown(result: Figures) -> str:
    model, streams, most = result["model"], result["streams"], f"{result['max_tokens']:,}"
    column = model["bytes_per_column"] // 1024
    lines = [f"- `{name}`: {what}" for name, what in result["traffic"].items()]
    return "\n\n".join([
        "# What a cache of slabs holds, and what pages would",
        f"`python -m benchmarks.cache_layout`: counted, not timed; seed {result['seed']}, {result['answers']} answers "
        f"a case. A column is one token of one row: {column} KiB of keys and values in a Llama 3.1 8B in bf16. "
        f"Context {result['context']:,}, prompts by {result['prefill_tokens']:,} tokens a step, no kept prompts.",
        "\n".join(lines),
        "## In short",
        _markdown(sizing_table(result)),
        "## Memory for all",
        f"Every request allows {most} tokens. Per live column, but for the first three figures; `moved`: written and "
        "read by zeroing and copying; `beside`: a layer's new slab while the old one is still there.",
        _markdown(holding_table(result["holding"], model["layers"])),
        f"At the product's defaults, which are {result['default'][0]['streams']} streams (`max_batch_rows`) that allow "
        f"{result['default'][0]['asked']} tokens each:",
        _markdown(holding_table(result["default"], model["layers"])),
        f"What slabs hold for each live column at {streams} streams, by what requests allow:",
        _markdown(asked_table(result)),
        f"## A budget of {result['gib']:g} GiB",
        f"Rows that run at the same time; {result['users']} streams run or wait. Slabs reserve for `max_tokens`; pages "
        "reserve nothing, and preempt: rows per answer, and tokens computed again for each that has to be.",
        _markdown(fitting_table(result)),
        "## What a decode step reads",
        f"Gigabytes of weights ({model['weights_read'] / 1e9:.1f}, in one forward for all batches) and cache, and what "
        "is moved. Attention over slabs reads padding; our kernels on CPUs read live columns only.",
        _markdown(step_table(result)),
        "## Other rules",
        f"What slabs hold at the defaults; then {streams} streams, {most} tokens allowed; the last column within "
        f"{result['gib']:g} GiB.",
        _markdown(rules_table(result)),
    ]) + "\n"  # fmt: skip


def write(result: Figures, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cache_layout.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "cache_layout.md").write_text(as_markdown(result))


def _markdown(table: Table) -> str:
    head, *rows = [f"| {' | '.join(row)} |" for row in table]
    return "\n".join([head, f"|{'---|' * len(table[0])}", *rows])


def _range(values: Sequence[float], digits: int = 1) -> str:
    low, high = _times(min(values), digits), _times(max(values), digits)
    return low if low == high else f"{low} to {high}"


def _times(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}"


def _asked(most: int | None) -> str:
    return "what is needed" if most is None else f"{most:,}"
