"""Runs cases on servers, one server at a time or all beside each other, in sweeps. Each sweep starts each server again.

Cells that the recorder already has are not run again.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import uvloop

from benchmarks.answers import WrongCount
from benchmarks.cases import BatchTooShort, Case, Scale, warm_up
from benchmarks.endpoints import BadAnswer
from benchmarks.figures import Figures
from benchmarks.process import family, rss_mib
from benchmarks.prompts import Prompts
from benchmarks.results import NO_FIT, START, Cell, Recorder
from benchmarks.servers import Contender, Live, StartFailed

Result = TypeVar("Result")
_WARM_STREAMS = 32
_REST = "rest"
_KILLED = "ended with -9"  # killed by the kernel, because the machine has too little memory


@dataclass(frozen=True)
class Plan:
    """What is run. If ``lenient``, a wrong answer or a failed start is recorded as such, instead of raised.

    ``least_mib`` is the memory that each server needs at least.
    """

    cases: Sequence[Case]
    scale: Scale
    prompts: Prompts
    sweeps: int
    endpoints: Sequence[str] = ("rest",)
    lenient: bool = False
    least_mib: float = 0.0
    say: Callable[[str], None] = print


def run_sweeps(contenders: Mapping[str, Contender], plan: Plan, recorder: Recorder) -> None:
    """Runs the sweeps interleaved: every server once, then every server again."""
    for sweep in range(plan.sweeps):
        for name, contender in contenders.items():
            left = _left(name, plan, sweep, recorder)
            if not left:
                continue
            if plan.least_mib > (free := psutil.virtual_memory().available / 2**20):
                plan.say(f"{name}: {NO_FIT}: needs {plan.least_mib:.0f} MiB, {free:.0f} are available")
                _note(left, recorder, NO_FIT)
                continue
            try:
                with started(contender) as live:
                    figures = {"ready_s": live.ready_s, "idle_rss_mib": rss_mib(family(live.pid))}
                    recorder.add((name, "", START, sweep), figures)
                    plan.say(f"sweep {sweep + 1}, {name}: ready after {live.ready_s:.1f} s")
                    run_quietly(_run_cases(live, plan, left, recorder))
            except StartFailed as error:
                if not plan.lenient:
                    raise
                plan.say(f"{name}: {error}")
                _note(left, recorder, NO_FIT if _KILLED in str(error) else f"does not start: {str(error)[-200:]}")


def run_beside(contenders: Mapping[str, Contender], plan: Plan, recorder: Recorder) -> None:
    """Runs all servers at the same time, and each case on one right after the other; every second sweep in reverse
    order.

    A case that lacks a cell is run on all servers, because the machine may have another speed now.
    """
    for sweep in range(plan.sweeps):
        left = [case for case in plan.cases if not all(map(recorder.has, _cells(contenders, case, sweep)))]
        if not left:
            continue
        with ExitStack() as stack:
            lives = {name: stack.enter_context(started(contender)) for name, contender in contenders.items()}
            for name, live in lives.items():
                figures = {"ready_s": live.ready_s, "idle_rss_mib": rss_mib(family(live.pid))}
                recorder.add((name, "", START, sweep), figures)
            plan.say(f"sweep {sweep + 1}: {len(lives)} servers are ready")
            order = list(lives)[:: -1 if sweep % 2 else 1]
            run_quietly(_alternate({name: lives[name] for name in order}, left, sweep, plan, recorder))


def _cells(contenders: Iterable[str], case: Case, sweep: int) -> list[Cell]:
    return [(name, _REST, case.name, sweep) for name in contenders]


async def _alternate(
    lives: Mapping[str, Live], cases: Sequence[Case], sweep: int, plan: Plan, recorder: Recorder
) -> None:
    """Runs each case on all servers. If a single client gets other answers from one of them, no cell has figures."""
    for live in lives.values():
        if streams := max(case.streams for case in cases):
            await warm_up(live.endpoints[_REST], plan.scale, plan.prompts, min(_WARM_STREAMS, streams))
    for case in cases:
        cells, texts = _cells(lives, case, sweep), []
        for cell, live in zip(cells, lives.values(), strict=True):
            await _attempt(case, live.endpoints[_REST], live.pid, sweep, cell, plan, recorder)
            texts.append([answer.text for answer in case.answers])
        if case.streams == 1 and all(texts) and any(each != texts[0] for each in texts):
            _note(cells, recorder, "the servers' answers differ")


Left = dict[tuple[str, str, str, int], Case]


def _left(name: str, plan: Plan, sweep: int, recorder: Recorder) -> Left:
    """Returns the cells of a server that have no line yet."""
    cells = {(name, endpoint, case.name, sweep): case for endpoint in plan.endpoints for case in plan.cases}
    return {cell: case for cell, case in cells.items() if not recorder.has(cell)}


def _note(cells: Iterable[Cell], recorder: Recorder, value: str) -> None:
    for cell in cells:
        recorder.add(cell, value=value)


@contextmanager
def started(contender: Contender) -> Iterator[Live]:
    with tempfile.TemporaryDirectory() as folder, contender.start(Path(folder)) as live:
        yield live


async def _run_cases(live: Live, plan: Plan, left: Left, recorder: Recorder) -> None:
    for endpoint_name in [name for name in plan.endpoints if name in live.endpoints]:
        endpoint = live.endpoints[endpoint_name]
        if not (cells := {cell: case for cell, case in left.items() if cell[1] == endpoint_name}):
            continue
        try:
            streams = max(case.streams for case in cells.values())
            await warm_up(endpoint, plan.scale, plan.prompts, min(_WARM_STREAMS, streams))
            for cell, case in cells.items():
                label = (cell[3], endpoint_name)  # so that no endpoint finds another one's prompts in the cache
                await _attempt(case, endpoint, live.pid, label, cell, plan, recorder)
        except (WrongCount, BadAnswer) as error:
            if not plan.lenient:
                raise
            plan.say(f"  {next(iter(cells))[0]}: {error}")
            _note({cell: case for cell, case in cells.items() if not recorder.has(cell)}, recorder, f"warm-up: {error}")
        finally:
            await endpoint.close()


async def _attempt(
    case: Case, endpoint: Any, pid: int, label: object, cell: tuple[str, str, str, int], plan: Plan, recorder: Recorder
) -> None:
    try:
        figures = await case.run(endpoint, pid, label)
        recorder.add(cell, figures)
        plan.say(f"  {cell[1]} {case.name}: {_brief(figures)}")
    except (WrongCount, BadAnswer, BatchTooShort, OSError, asyncio.TimeoutError) as error:
        if not plan.lenient:
            raise type(error)(f"case {case.name}: {error}") from error
        recorder.add(cell, value=str(error) or type(error).__name__)


def run_quietly(measuring: Coroutine[Any, Any, Result]) -> Result:
    """Runs without the garbage collector, whose pauses would count as the server's, and on the fastest event loop."""
    gc.collect()
    gc.disable()
    try:
        return uvloop.run(measuring)
    finally:
        gc.enable()


def _brief(figures: Figures) -> str:
    known = {
        "tokens_per_s": "{:.1f} tokens/s",
        "requests_per_s": "{:.0f} requests/s",
        "ttft_p50_ms": "TTFT {:.0f} ms",
        "itl_p99_ms": "ITL p99 {:.0f} ms",
    }
    return ", ".join(spelling.format(figures[name]) for name, spelling in known.items() if name in figures)
