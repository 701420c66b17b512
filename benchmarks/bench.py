"""``make bench``: our server under load, over REST and gRPC.

Knows the server only as a process with ports: it is started as a user would start it.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import beside_batch, chart, gains, machine, report  # noqa: E402
from benchmarks.cases import DEFAULT, QUICK, Scale, make_cases  # noqa: E402
from benchmarks.growth import QUICK as QUICK_LADDER  # noqa: E402
from benchmarks.growth import Ladder, chunk_curve, growth  # noqa: E402
from benchmarks.model_folder import max_model_len, measure_roofline, model_folder  # noqa: E402
from benchmarks.prompts import Prompts  # noqa: E402
from benchmarks.servers import Ours  # noqa: E402
from benchmarks.sweep import Plan, run_quietly, run_sweeps, started  # noqa: E402

EMBEDDED = "embedded://smollm2-135m-instruct"
RESULTS = ROOT / "benchmarks" / "results"
_OTHER_WEIGHTS = {"weights", "dtype", "quantization_config"}  # settings with which a weight has not 2 bytes
_PARTS = ("load", "gains", "batches", "growth", "chunks")
_QUICK_CASES = "c1,c4,p200"


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    ours = Ours(options.uri, json.loads(options.extra))
    folder = model_folder(ours.uri, ours.extra)
    prompts = Prompts(folder, options.seed)
    result: dict[str, Any] = {
        "machine": machine.describe(),
        "model": options.uri,
        "extra": ours.extra,
        "sweeps": options.sweeps,
        "scale": asdict(options.scale),
        "servers": [],
    }
    if (busy := machine.warning(result["machine"])) is not None:
        print(f"warning: {busy}", file=sys.stderr)
    if "load" in options.parts:
        cases = make_cases(options.cases, options.scale, prompts)
        plan = Plan(cases, options.scale, prompts, options.sweeps, options.endpoints, say=say)
        if not _OTHER_WEIGHTS & ours.extra.keys():
            result |= limits(folder)
        before = [replace(ours, name="before", python=each / ".venv" / "bin" / "python") for each in options.before]
        result["servers"] = [measured.as_json() for measured in run_sweeps([ours, *before], plan)]
    if "gains" in options.parts:
        say("sixteen at once and in turn, liveness")
        with started(ours) as live:
            sizes = (4, 8, 16) if options.quick else (16, 64, 192)
            result["gains"] = run_quietly(gains.measure(live, prompts, *sizes))
    if "batches" in options.parts:
        say("clients beside a batch")
        with started(ours) as live:
            requests, rows = (3, 60) if options.quick else (24, 1000)
            result["batches"] = run_quietly(beside_batch.measure(live, prompts, ours.model, requests, rows))
    ladder = QUICK_LADDER if options.quick else Ladder()
    if "growth" in options.parts:
        say("growth")
        result["growth"] = growth(ours, prompts, ladder, max_model_len(folder))
    if "chunks" in options.parts:
        result["chunk_case"] = "c4+p200" if options.quick else "c32+p2000"
        say("prefill chunks")
        result["chunks"] = chunk_curve(ours, prompts, options.scale, ladder, result["chunk_case"])
    print(report.as_text(result))
    keep(result, options.output, "bench", "Our server under load")
    return 0


def limits(folder: Path, weights: Path | None = None) -> dict[str, Any]:
    """The machine's limits for this model, which a CPU with a compiler and a dense model have; else says why not."""
    say("the limits of this machine")
    found = measure_roofline(folder, weights)
    if isinstance(found, str):
        say(f"no shares of the limit: {found}")
        return {}
    return {"roofline": found}


def keep(result: dict[str, Any], folder: Path | None, name: str, title: str) -> None:
    """The JSON, the tables in Markdown, and beside the project's own results also the chart in ``docs``."""
    if folder is None:
        return
    report.write(result, folder, name, title)
    picture = (ROOT / "docs" if folder == RESULTS else folder) / f"{name}.png"
    if not result["servers"]:
        return
    if chart.available():
        chart.draw(result, picture)
    else:
        say("no chart: matplotlib is not installed (pip install -e '.[bench]')")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_common(parser)
    parser.add_argument("--endpoints", default="rest,grpc", help="of rest, grpc, openai (default: %(default)s)")
    parser.add_argument(
        "--before",
        action="append",
        default=[],
        type=lambda folder: Path(folder).absolute(),
        help="another checkout, installed: its server takes turns with ours",
    )
    parser.add_argument("--parts", default="load,gains,growth", help=f"of {', '.join(_PARTS)}, or all")
    options = parser.parse_args(arguments)
    finish(parser, options, DEFAULT)
    options.endpoints = tuple(options.endpoints.split(","))
    options.parts = _PARTS if options.parts == "all" else tuple(options.parts.split(","))
    for given, known in ((options.endpoints, ("rest", "grpc", "openai")), (options.parts, _PARTS)):
        for each in given:
            if each not in known:
                parser.error(f"{each!r} is none of {', '.join(known)}")
    return options


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--uri", default=EMBEDDED, help="model: embedded://, a folder, a .gguf file (%(default)s)")
    parser.add_argument("--extra", default="{}", help="our parameters.extra, as JSON")
    parser.add_argument("--cases", help="names as in cases.py, separated by commas")
    parser.add_argument("--sweeps", type=int, help="servers are started anew for each (default: 2; --quick: 1)")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts")
    parser.add_argument("--new-tokens", type=int, help="per stream (default: 128; --quick: 8)")
    parser.add_argument("--quick", action="store_true", help="a few tokens, a few cases: does it work at all?")
    parser.add_argument("--output", type=Path, help="folder (default: benchmarks/results, where nothing was left out)")


def finish(parser: argparse.ArgumentParser, options: argparse.Namespace, cases: tuple[str, ...]) -> None:
    """What follows from ``--quick``, and only a whole run is kept as the project's result."""
    left_out = any(getattr(options, name, None) for name in ("quick", "cases", "new_tokens", "peers", "before"))
    options.cases = tuple((options.cases or (_QUICK_CASES if options.quick else ",".join(cases))).split(","))
    options.sweeps = options.sweeps or (1 if options.quick else 2)
    options.scale = QUICK if options.quick else Scale()
    if options.new_tokens:
        options.scale = replace(options.scale, new_tokens=options.new_tokens)
    if options.output is None and not left_out and "load" in getattr(options, "parts", "load"):
        options.output = RESULTS
    try:
        json.loads(options.extra)
        make_cases(options.cases, options.scale, None)  # type: ignore[arg-type]
    except ValueError as error:
        parser.error(str(error))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
