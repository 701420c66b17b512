"""Pictures of a result, where matplotlib is installed (the extra ``bench``).

Knows the shape of the JSON only.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_BURST = re.compile(r"c(\d+)")
_PANELS = (
    ("tokens_per_s", "tokens per second"),
    ("ttft_p50_ms", "time to first token, p50 (ms)"),
    ("itl_p99_ms", "time between tokens, p99 (ms)"),
)


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Over the number of streams: rate, first token, gaps between tokens; a line for each server and endpoint."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(_PANELS), figsize=(13, 4.2), layout="constrained")
    streams = sorted(
        {int(match[1]) for _, cases in _lines(result) for name in cases if (match := _BURST.fullmatch(name))}
    )
    for axis, (key, title) in zip(axes, _PANELS, strict=True):
        for label, cases in _lines(result):
            points = [(count, cases[f"c{count}"]["best"].get(key)) for count in streams if f"c{count}" in cases]
            known = [(count, value) for count, value in points if value]
            if known:
                axis.plot(*zip(*known, strict=True), marker="o", label=label)
        axis.set(title=title, xlabel="concurrent streams", xscale="log")
        if key == "tokens_per_s":
            axis.set_ylim(bottom=0)
        elif axis.lines:
            axis.set(yscale="log")
        axis.set_xticks(streams, [str(count) for count in streams])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    if axes[0].lines:
        axes[0].legend(fontsize=8)
    machine = result["machine"]
    figure.suptitle(
        f"{result['model']}, {machine['cpu']}, {machine['cores']} cores, {machine['date'][:10]}", fontsize=9
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _lines(result: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each server and endpoint: how it is called, and its cases."""
    for server in result["servers"]:
        for endpoint, cases in server["cases"].items():
            yield server["name"] + (f", {endpoint}" if len(server["cases"]) > 1 else ""), cases
