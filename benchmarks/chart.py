"""Pictures of a result, where matplotlib is installed (the extra ``bench``).

Knows the shape of the JSON only.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_BURST = re.compile(r"c(\d+)")
_PANELS = (("tokens_per_s", "tokens per second"), ("ttft_p50_ms", "time to first token, p50 (ms)"))


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Over the number of concurrent streams: rate, first token, gaps between tokens; each server and door a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    for panel, (key, title) in enumerate((*_PANELS, ("itl_p99_ms", "time between tokens, p99 (ms)"))):
        for server in result["servers"]:
            for door, cases in server["cases"].items():
                points = sorted(
                    (int(match[1]), found["best"][key])
                    for name, found in cases.items()
                    if (match := _BURST.fullmatch(name)) and key in found["best"]
                )
                label = server["name"] + (f", {door}" if len(server["cases"]) > 1 else "")
                axes[panel].plot(*zip(*points, strict=True), marker="o", label=label) if points else None
        axes[panel].set(title=title, xlabel="concurrent streams", xscale="log", ylim=(0, None))
        if key != "tokens_per_s":
            axes[panel].set(yscale="log", ylim=(None, None))
        axes[panel].grid(alpha=0.3)
        ticks = sorted({int(m[1]) for s in result["servers"] for c in s["cases"].values() for n in c
                        if (m := _BURST.fullmatch(n))})  # fmt: skip
        axes[panel].set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
        axes[panel].minorticks_off()
    axes[0].legend(fontsize=8)
    machine = result["machine"]
    figure.suptitle(
        f"{result['model']}, {machine['cpu']}, {machine['cores']} cores, {machine['date'][:10]}", fontsize=9
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
