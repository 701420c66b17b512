"""Measures goodput: the tokens per second of requests whose first token and longest pause stay within limits.

python -m benchmarks.goodput --peers llama.cpp   measures our server and peers in turn, at 1 to 32 streams
python -m benchmarks.goodput zen3                writes docs/images/goodput.svg from the lines of that chip

Each request becomes a line of ``benchmarks/proofs/goodput-CHIP.jsonl``, so other limits need no new measurement. All
servers run at the same time, but only one of them gets requests at any time; an idle server uses no CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from benchmarks import load, machine
from benchmarks.answers import Answer
from benchmarks.figures import span
from benchmarks.model_folder import model_folder
from benchmarks.peers import FOLDER, PEERS, installed
from benchmarks.prompts import Prompts
from benchmarks.results import ROOT, commit
from benchmarks.servers import EMBEDDED, Contender, Live, Ours
from benchmarks.sweep import run_quietly, started

PROMPT_TOKENS, NEW_TOKENS = 128, 64
STREAMS = (1, 2, 4, 8, 16, 32)
_LEAST_REQUESTS = 6  # at a level; if it has more streams, two for each stream
_PICTURE = ROOT / "docs" / "images" / "goodput.svg"


@dataclass(frozen=True)
class Bounds:
    """The bounds within which a request counts as good, in milliseconds."""

    ttft_ms: float
    pause_ms: float


BOUNDS = (Bounds(500.0, 100.0), Bounds(1000.0, 200.0), Bounds(2000.0, 400.0))


@dataclass(frozen=True)
class Line:
    """One request of a level at which ``streams`` requests were in flight at any time.

    ``level_s`` is the level's duration.
    """

    server: str
    streams: int
    ttft_ms: float
    pause_ms: float
    new_tokens: int
    level_s: float


def as_lines(server: str, streams: int, answers: Sequence[Answer]) -> list[Line]:
    """Returns one line for each answer of a level."""
    seconds = span(answers)
    return [
        Line(server, streams, 1000 * each.ttft, 1000 * max(each.gaps, default=0.0), each.new_tokens, seconds)
        for each in answers
    ]


def goodput(lines: Sequence[Line], bounds: Bounds | None = None) -> dict[str, dict[int, float]]:
    """Returns tokens per second by server and number of streams: of the requests within the bounds, or of all."""
    found: dict[str, dict[int, float]] = {}
    for line in lines:
        level = found.setdefault(line.server, {})
        good = bounds is None or (line.ttft_ms <= bounds.ttft_ms and line.pause_ms <= bounds.pause_ms)
        level[line.streams] = level.get(line.streams, 0.0) + good * line.new_tokens / line.level_s
    return found


# --- measuring ---


def measure(options: argparse.Namespace, path: Path) -> None:
    """Measures all levels and appends a line for each request to ``path``."""
    folder = model_folder(options.uri, {})
    peers = installed(options.peers, options.folder, folder)
    contenders: list[Contender] = [Ours(options.uri), *peers]
    described = machine.describe()
    head = {"run": described["date"], "commit": commit(), "machine": described, "model": options.uri,
            "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS,
            "versions": {each.name: each.versions() for each in contenders}}  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack, path.open("a") as file:
        servers = {each.name: stack.enter_context(started(each)) for each in contenders}
        file.write(json.dumps(head) + "\n")
        run_quietly(_levels(servers, options.streams, Prompts(folder), file))


async def _levels(servers: Mapping[str, Live], levels: Sequence[int], prompts: Prompts, file: Any) -> None:
    async with AsyncExitStack() as stack:
        for name, live in servers.items():
            stack.push_async_callback(live.endpoints["rest"].close)
            await load.together(live.endpoints["rest"], prompts.asks(max(levels), PROMPT_TOKENS, NEW_TOKENS, name))
        for streams in levels:
            asks = prompts.asks(max(_LEAST_REQUESTS, 2 * streams), PROMPT_TOKENS, NEW_TOKENS, streams)
            for name, live in servers.items():
                recordings = await load.always(live.endpoints["rest"], asks, streams)
                lines = as_lines(name, streams, load.read(live.endpoints["rest"], asks, recordings))
                file.writelines(json.dumps(asdict(line)) + "\n" for line in lines)
                file.flush()
                print(name, streams, f"{goodput(lines)[name][streams]:.0f} tokens/s", flush=True)
                await asyncio.sleep(1.0)


def read_lines(path: Path) -> tuple[dict[str, Any], list[Line]]:
    """Returns the head of the latest run in a file, and the requests of the latest run of each server and level."""
    head: dict[str, Any] = {}
    levels: dict[tuple[str, int], list[Line]] = {}
    fresh: set[tuple[str, int]] = set()
    for text in path.read_text().splitlines():
        value = json.loads(text)
        if "run" in value:
            head, fresh = value, set()
            continue
        line = Line(**value)
        level = (line.server, line.streams)
        if level not in fresh:
            fresh.add(level)
            levels[level] = []
        levels[level].append(line)
    return head, [line for lines in levels.values() for line in lines]


# --- the picture ---

_WIDTH, _HEIGHT, _LEFT, _TOP, _PLOT_H, _GAP = 1000, 390, 56, 74, 210, 34
_COLOURS = ("a", "b", "c", "d")
_STYLE = """
  .bg { fill: #ffffff } .grid { stroke: #dfe4ea } text { fill: #1c2733; font-size: 13px }
  .m { text-anchor: middle } .e { text-anchor: end; font-size: 12px } .h { font-size: 14px; font-weight: 600 }
  .l { fill: none; stroke-width: 2.2 } .all { stroke-dasharray: 5 4; stroke-width: 1.4; opacity: 0.75 }
  .a { stroke: #2f6fc4 } .b { stroke: #b9770e } .c { stroke: #2e7d46 } .d { stroke: #8a3fa0 }
  @media (prefers-color-scheme: dark) {
    .bg { fill: #14181d } .grid { stroke: #3a4553 } text { fill: #e8edf3 }
    .a { stroke: #78b0f5 } .b { stroke: #e5a94b } .c { stroke: #6cc48a } .d { stroke: #cf8fe0 }
  }
"""


def picture(head: Mapping[str, Any], lines: Sequence[Line], bounds: Sequence[Bounds] = BOUNDS) -> str:
    """Returns an SVG with a plot of goodput for each of ``bounds``; dashed lines show the rate of all requests."""
    streams = sorted({line.streams for line in lines})
    whole, good = goodput(lines), [goodput(lines, limit) for limit in bounds]
    colours = dict(zip(whole, _COLOURS, strict=False))  # by server
    top = max(rate for rates in whole.values() for rate in rates.values())
    step = next(size for size in (10, 20, 50, 100, 200, 500) if top / size <= 6)
    highest = (int(top / step) + 1) * step
    width = (_WIDTH - _LEFT - 16 - _GAP * (len(bounds) - 1)) / len(bounds)
    where = f"{head['machine']['cpu']}, {head['machine']['cores']} cores, {head['machine']['date'][:10]}"
    numbers = " ".join(map(_described, bounds, good))  # for readers who do not see the picture

    def y(rate: float) -> float:
        return _TOP + _PLOT_H * (1 - rate / highest)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        'aria-labelledby="title desc" font-family="system-ui, sans-serif">',
        f'<title id="title">{escape(f"Goodput over load, {where}")}</title><desc id="desc">{escape(numbers)}</desc>',
        f'<style>{_STYLE}</style><rect class="bg" width="{_WIDTH}" height="{_HEIGHT}" rx="14"/>',
        _text(_LEFT, 26, "tokens/s of requests within the bounds, by streams in flight", "h"),
    ]
    for index, limit in enumerate(bounds):
        left = _LEFT + index * (width + _GAP)
        out.append(_text(left, 58, f"TTFT ≤ {limit.ttft_ms / 1000:g} s, pauses ≤ {limit.pause_ms:g} ms"))
        for value in range(0, highest + 1, step):
            out.append(f'<path class="grid" d="M{left:.0f} {y(value):.1f}h{width:.0f}"/>')
            out += [] if index else [_text(left - 8, y(value) + 4, str(value), "e")]
        xs = {count: left + width * (place + 0.5) / len(streams) for place, count in enumerate(streams)}
        out += [_text(x, _TOP + _PLOT_H + 20, str(count), "m") for count, x in xs.items()]
        for rates, dashed in ((whole, " all"), (good[index], "")):
            for server, colour in colours.items():
                points = " ".join(f"{xs[count]:.1f},{y(rate):.1f}" for count, rate in sorted(rates[server].items()))
                out.append(f'<polyline class="l {colour}{dashed}" points="{points}"/>')
    x = _LEFT
    for name, colour in (*colours.items(), ("all requests", "all a")):
        out.append(f'<path class="l {colour}" d="M{x} 334h28"/>{_text(x + 36, 338, name)}')
        x += 64 + 8 * len(name)
    model = head["model"].rpartition("/")[2]
    sizes = f"prompts of {head['prompt_tokens']} tokens, answers of {head['new_tokens']}"
    out.append(f"{_text(_LEFT, 368, f'{where}; {model}, {sizes}')}</svg>")
    return "\n".join(out) + "\n"


def _text(x: float, y: float, content: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.1f}">{escape(content)}</text>'


def _described(limit: Bounds, rates: Mapping[str, Mapping[int, float]]) -> str:
    shown = "; ".join(
        f"{server}: " + ", ".join(f"{rate:.0f} at {count}" for count, rate in sorted(levels.items()))
        for server, levels in rates.items()
    )
    return f"TTFT up to {limit.ttft_ms:g} ms and pauses up to {limit.pause_ms:g} ms: {shown}."


def _lines_of(chip: str) -> Path:
    return ROOT / "benchmarks" / "proofs" / f"goodput-{chip}.jsonl"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures this machine, or draws the picture of a chip that was measured before."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chip", nargs="?", help="draw the picture from this chip's lines and measure nothing")
    parser.add_argument("--uri", default=EMBEDDED, help="the model (%(default)s)")
    parser.add_argument("--peers", default="", help=f"some of {', '.join(PEERS)}; default: none")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for the peers' environments (%(default)s)")
    parser.add_argument("--streams", default=",".join(map(str, STREAMS)), help="in flight (%(default)s)")
    parser.add_argument("--output", type=Path, help="default: benchmarks/proofs/goodput-CHIP.jsonl")
    options = parser.parse_args(arguments)
    options.streams = [int(count) for count in options.streams.split(",")]
    if options.chip is None:
        measure(options, options.output or _lines_of(machine.chip()))
    else:
        _PICTURE.write_text(picture(*read_lines(_lines_of(options.chip))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
