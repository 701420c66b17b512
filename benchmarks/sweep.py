"""Runs cases against servers, one server at a time, in as many sweeps as wanted, each server anew in each sweep.

Knows neither what a case does nor how a server is started.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from benchmarks.answers import WrongCount
from benchmarks.cases import Case, Scale, warm_up
from benchmarks.figures import Figures, best_and_median
from benchmarks.http_endpoint import BadAnswer
from benchmarks.process import family, rss_mib
from benchmarks.prompts import Prompts
from benchmarks.servers import Contender, Live, StartFailed

Result = TypeVar("Result")
_WARM_STREAMS = 32


@dataclass
class Measured:
    """All that was measured of one server: endpoint, then case, then one entry per sweep."""

    name: str
    versions: dict[str, str]
    starts_s: list[float] = field(default_factory=list)
    idle_rss_mib: list[float] = field(default_factory=list)
    runs: dict[str, dict[str, list[Figures]]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, endpoint: str, case: str, figures: Figures) -> None:
        self.runs.setdefault(endpoint, {}).setdefault(case, []).append(figures)

    def as_json(self) -> dict[str, Any]:
        cases = {
            endpoint: {
                case: dict(zip(("best", "median", "runs"), (*best_and_median(runs), runs), strict=True))
                for case, runs in by_case.items()
            }
            for endpoint, by_case in self.runs.items()
        }
        return {
            "name": self.name,
            "versions": self.versions,
            "start_to_ready_s": self.starts_s,
            "idle_rss_mib": self.idle_rss_mib,
            "cases": cases,
            "failures": self.failures,
        }


@dataclass(frozen=True)
class Plan:
    """``lenient``: a server that answers wrongly, or does not start, is noted and passed over, not an error."""

    cases: Sequence[Case]
    scale: Scale
    prompts: Prompts
    sweeps: int
    endpoints: Sequence[str] = ("rest",)
    lenient: bool = False
    say: Callable[[str], None] = print


def run_sweeps(contenders: Sequence[Contender], plan: Plan) -> list[Measured]:
    """Interleaved: every server once, then every server again."""
    measured = [Measured(contender.name, contender.versions()) for contender in contenders]
    for sweep in range(plan.sweeps):
        for contender, one in zip(contenders, measured, strict=True):
            try:
                with started(contender) as live:
                    one.starts_s.append(live.ready_s)
                    one.idle_rss_mib.append(rss_mib(family(live.pid)))
                    plan.say(f"sweep {sweep + 1}, {contender.name}: ready after {live.ready_s:.1f} s")
                    run_quietly(_run_cases(contender, live, plan, sweep, one))
            except StartFailed as error:
                if not plan.lenient:
                    raise
                one.failures["start"] = str(error)
                plan.say(f"{contender.name}: {error}")
    return measured


@contextmanager
def started(contender: Contender) -> Iterator[Live]:
    with tempfile.TemporaryDirectory() as folder, contender.start(Path(folder)) as live:
        yield live


async def _run_cases(contender: Contender, live: Live, plan: Plan, sweep: int, measured: Measured) -> None:
    for endpoint_name in [name for name in plan.endpoints if name in live.endpoints]:
        endpoint = live.endpoints[endpoint_name]
        try:
            await warm_up(endpoint, plan.scale, plan.prompts, 2 if contender.one_at_a_time else _WARM_STREAMS)
            for case in plan.cases:
                if contender.one_at_a_time and case.needs_batching:
                    measured.failures[case.name] = "answers one request at a time"
                    continue
                label = (sweep, endpoint_name)  # else the second endpoint would find the first one's prompts cached
                figures = await _attempt(case, endpoint, live.pid, label, measured, plan.lenient)
                if figures is not None:
                    measured.add(endpoint_name, case.name, figures)
                    plan.say(f"  {endpoint_name} {case.name}: {_brief(figures)}")
        except (WrongCount, BadAnswer) as error:
            if not plan.lenient:
                raise
            measured.failures["warm-up"] = str(error)
            plan.say(f"  {contender.name}: {error}")
        finally:
            await endpoint.close()


async def _attempt(
    case: Case, endpoint: Any, pid: int, label: object, measured: Measured, lenient: bool
) -> Figures | None:
    try:
        return await case.run(endpoint, pid, label)
    except (WrongCount, BadAnswer, OSError, asyncio.TimeoutError) as error:
        if not lenient:
            raise type(error)(f"case {case.name}: {error}") from error
        measured.failures[case.name] = str(error) or type(error).__name__
        return None


def run_quietly(measuring: Coroutine[Any, Any, Result]) -> Result:
    """Without the garbage collector, whose pauses would be taken for the server's; on the loop that costs least."""
    gc.collect()
    gc.disable()
    try:
        return uvloop.run(measuring)
    finally:
        gc.enable()


def _brief(figures: Figures) -> str:
    known = {"tokens_per_s": "{:.0f} tokens/s", "ttft_p50_ms": "TTFT {:.0f} ms", "itl_p99_ms": "ITL p99 {:.0f} ms"}
    return ", ".join(spelling.format(figures[name]) for name, spelling in known.items() if name in figures)
