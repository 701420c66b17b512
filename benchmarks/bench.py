"""``make bench``: measures our server under load, over REST and gRPC; with ``--before`` also another checkout's.

It also prints which share of this machine's memory speed and peak arithmetic a case reaches.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import machine, report
from benchmarks.cases import DEFAULT, QUICK, Scale, make_cases
from benchmarks.model_folder import model_folder
from benchmarks.prompts import Prompts
from benchmarks.results import FOLDER, ROOT, Recorder, commit
from benchmarks.servers import EMBEDDED, Contender, Ours
from benchmarks.sweep import Plan, run_sweeps

_OTHER_WEIGHTS = {"weights", "dtype", "quantization_config"}  # settings with which a weight may not have 2 bytes
_LIMITS_S = 300.0
_ENDPOINTS = ("rest", "grpc", "openai")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    ours = Ours(options.uri, json.loads(options.extra))
    folder = model_folder(ours.uri, ours.extra)
    prompts = Prompts(folder)
    cases = make_cases(options.cases, options.scale, prompts)
    plan = Plan(cases, options.scale, prompts, options.sweeps, options.endpoints, say=say)
    contenders: dict[str, Contender] = {ours.name: ours}
    for before in options.before:
        contenders[before.name] = replace(ours, name=before.name, python=before / ".venv" / "bin" / "python")
    more = {} if _OTHER_WEIGHTS & ours.extra.keys() else roofline(folder)
    result = measure(options, "bench", plan, contenders, {"extra": ours.extra, **more})
    print(report.as_markdown(result))
    return 0


def measure(
    options: argparse.Namespace,
    name: str,
    plan: Plan,
    contenders: Mapping[str, Contender],
    more: Mapping[str, Any],
    run: Callable[[Mapping[str, Contender], Plan, Recorder], None] = run_sweeps,
) -> dict[str, Any]:
    """Measures the cells that have no line yet in this chip's file of results, and returns the whole run."""
    described = machine.describe()
    if (busy := machine.warning(described)) is not None:
        say(f"warning: {busy}")
    head = {"run": described["date"], "name": name, "commit": commit(), "machine": described, "model": options.uri,
            "sweeps": plan.sweeps, "scale": asdict(plan.scale), **more,
            "servers": {each: contender.versions() for each, contender in contenders.items()}}  # fmt: skip
    with tempfile.TemporaryDirectory() as nowhere:
        path = options.output or (
            Path(nowhere) / "quick.jsonl" if options.quick else FOLDER / f"{machine.chip()}.jsonl"
        )
        recorder = Recorder(path, head, options.again)
        run(contenders, plan, recorder)
        return recorder.run.as_result()


def roofline(folder: Path, weights: Path | None = None) -> dict[str, Any]:
    """Returns the machine's limits for this model; without a compiler or a dense model, says why there are none."""
    say("measuring the limits of this machine")
    more = ["--weights", str(weights)] if weights else []
    command = [sys.executable, "-m", "benchmarks.limits", str(folder), *more]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=_LIMITS_S, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        say(f"the share of the limit is not known: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
        return {}
    return {"roofline": json.loads(done.stdout.splitlines()[-1])}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_common(parser)
    parser.add_argument("--endpoints", default="rest,grpc", help="some of rest, grpc, openai (default: %(default)s)")
    parser.add_argument(
        "--before",
        action="append",
        default=[],
        type=lambda folder: Path(folder).absolute(),
        help="another checkout with its .venv; its server is measured in turn with ours",
    )
    options = parser.parse_args(arguments)
    finish(parser, options, DEFAULT)
    options.endpoints = listed(parser, "endpoints", options.endpoints, _ENDPOINTS)
    return options


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--uri", default=EMBEDDED, help="model: embedded://, a folder, a .gguf file (%(default)s)")
    parser.add_argument("--extra", default="{}", help="our parameters.extra, as JSON")
    parser.add_argument("--cases", help="names as in cases.py, separated by commas")
    parser.add_argument("--sweeps", type=int, help="rounds, each with freshly started servers (default: 2; --quick: 1)")
    parser.add_argument("--new-tokens", type=int, help="per stream (default: 128; --quick: 8)")
    parser.add_argument("--quick", action="store_true", help="a trial with few tokens and cases; results are not kept")
    parser.add_argument("--output", type=Path, help="file of results (default: benchmarks/results/CHIP.jsonl)")
    parser.add_argument("--again", action="store_true", help="measure again what this commit has measured before")


def finish(parser: argparse.ArgumentParser, options: argparse.Namespace, cases: tuple[str, ...]) -> None:
    """Sets the options that depend on ``--quick``, and ends the program if a case or ``--extra`` is invalid."""
    options.cases = tuple((options.cases or ("c1,c4,p200" if options.quick else ",".join(cases))).split(","))
    options.sweeps = options.sweeps or (1 if options.quick else 2)
    options.scale = QUICK if options.quick else Scale()
    if options.new_tokens:
        options.scale = replace(options.scale, new_tokens=options.new_tokens)
    try:
        json.loads(options.extra)
        make_cases(options.cases, options.scale, None)  # type: ignore[arg-type]
    except ValueError as error:
        parser.error(str(error))


def listed(parser: argparse.ArgumentParser, what: str, said: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names in an option, which commas separate. Ends the program if a name is not known."""
    names = tuple(said.split(","))
    for name in names:
        if name not in known:
            parser.error(f"--{what}: {name!r} is not one of {', '.join(known)}")
    return names


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
