"""Reads and writes results: files with a line of JSON for each measured cell, one file for each chip.

A run of a command begins with a line that has its name, date, commit, machine and model. A line for each measured cell
follows: the server, the endpoint, the case, the sweep, and its figures, or in ``value`` the reason why it has none.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.figures import Figures, best_and_median

ROOT = Path(__file__).parent.parent
FOLDER = Path(__file__).parent / "results"
START = "start"  # the case whose figures are ``ready_s``, ``idle_rss_mib`` and ``idle_anonymous_mib``
NO_FIT = "does not fit"
_SAME = ("name", "commit", "model", "extra", "scale", "sweeps")  # keys that must be equal to continue a run
_DIGITS = 9
Cell = tuple[str, str, str, int]  # server, endpoint, case, sweep


@dataclass
class Run:
    """A run of one command: its head, and the lines of its cells so far."""

    head: dict[str, Any]
    cells: dict[Cell, dict[str, Any]] = field(default_factory=dict)

    def as_result(self) -> dict[str, Any]:
        """Returns the head and all cells by server, endpoint and case: best, median and all values of the sweeps."""
        servers: dict[str, dict[str, Any]] = {}
        for name, versions in self.head.get("servers", {}).items():
            servers[name] = {"name": name, "versions": versions, "cases": {}, "failures": {}, START: [], "starts": {}}
        for (name, endpoint, case, _), line in self.cells.items():
            server = servers[name]
            if "value" in line:
                server["failures"][f"{endpoint} {case}".strip() if case == START else case] = line["value"]
            elif case == START and endpoint:
                server["starts"][endpoint] = line["figures"]
            elif case == START:
                server[START].append(line["figures"])
            else:
                server["cases"].setdefault(endpoint, {}).setdefault(case, {"runs": []})["runs"].append(line["figures"])
        for server in servers.values():
            for cases in server["cases"].values():
                for found in cases.values():
                    found["best"], found["median"] = best_and_median(found["runs"])
        return {**self.head, "servers": list(servers.values())}


def read_runs(path: Path) -> list[Run]:
    """Returns a file's runs. Raises ValueError for an invalid line, except the last, which may have been cut off."""
    runs: dict[str, Run] = {}
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
    for number, text in enumerate(filter(None, lines), 1):
        try:
            line = json.loads(text)
        except ValueError:
            if text == lines[-1]:
                break
            raise ValueError(f"{path}:{number}: is not JSON") from None
        if "name" in line:
            runs[line["run"]] = Run(line)
        else:
            cell = line["server"], line["endpoint"], line["case"], line["sweep"]
            runs[line["run"]].cells[cell] = line
    return list(runs.values())


class Recorder:
    """Appends the lines of one run to a file, and continues a run that was stopped."""

    def __init__(self, path: Path, head: Mapping[str, Any], again: bool = False) -> None:
        """Continues the latest run with the same name, commit, model and settings, unless ``again`` is set."""
        self.path = path
        asked = json.loads(json.dumps(dict(head)))
        runs = read_runs(path)
        same = [run for run in runs if all(run.head.get(name) == asked.get(name) for name in _SAME)]
        self.run = same[-1] if same and not again else Run(asked)
        _drop_cut_line(path)
        if self.run.head is asked or self.run.head["servers"] != {**self.run.head["servers"], **asked["servers"]}:
            self.run.head["servers"] = {**self.run.head["servers"], **asked["servers"]}
            self._append(self.run.head)

    def has(self, cell: Cell) -> bool:
        return cell in self.run.cells

    def add(self, cell: Cell, figures: Figures | None = None, value: str | None = None) -> None:
        names = dict(zip(("server", "endpoint", "case", "sweep"), cell, strict=True))
        what = {"value": value} if figures is None else {"figures": short(figures)}
        self.run.cells[cell] = {"run": self.run.head["run"], **names, **what}
        self._append(self.run.cells[cell])

    def _append(self, line: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def _drop_cut_line(path: Path) -> None:
    whole = path.read_text(encoding="utf-8") if path.exists() else ""
    if whole and not whole.endswith("\n"):
        path.write_text(whole[: whole.rfind("\n") + 1], encoding="utf-8")


def short(figures: Figures) -> Figures:
    """Rounds figures to the significant digits of a measurement."""
    return {name: float(f"{value:.{_DIGITS}g}") if value % 1 else int(value) for name, value in figures.items()}


def commit() -> str:
    """Returns the commit of this checkout, with a plus sign if files differ from it; empty outside a checkout."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
