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
from benchmarks.cases import ALONE, BatchTooShort, Case, Scale, warm_up
from benchmarks.endpoints import BadAnswer
from benchmarks.figures import Figures
from benchmarks.process import anonymous_mib, family, forget, rss_mib
from benchmarks.prompts import Prompts
from benchmarks.results import NO_FIT, START, Cell, Recorder
from benchmarks.servers import Contender, Live, StartFailed

Result = TypeVar("Result")
_WARM_STREAMS = 32
STARTS = ("first", "later", "warm")  # the last one with the weights in the page cache
_REST = "rest"
_KILLED = "ended with -9"  # killed by the kernel, because the machine has too little memory


@dataclass(frozen=True)
class Plan:
    """What is run. If ``lenient``, a wrong answer or a failed start is recorded as such, instead of raised.

    ``least_mib`` is the memory that each server needs at least. If there is ``weights``, which returns all files and
    folders that servers have of a model, and no server has served the model before, their starts are measured first.
    """

    cases: Sequence[Case]
    scale: Scale
    prompts: Prompts
    sweeps: int
    endpoints: Sequence[str] = ("rest",)
    lenient: bool = False
    least_mib: float = 0.0
    weights: Callable[[], Iterable[Path]] | None = None
    alone_sweeps: int = 0  # further sweeps, with the case of one stream only
    say: Callable[[str], None] = print


def run_sweeps(contenders: Mapping[str, Contender], plan: Plan, recorder: Recorder) -> None:
    """Runs the sweeps interleaved: every server once, then every server again."""
    if plan.weights is not None:
        for name, contender in contenders.items():
            _measure_starts(name, contender, plan.weights, plan, recorder)
    for sweep in range(plan.sweeps + plan.alone_sweeps):
        for name, contender in contenders.items():
            if left := _left(name, plan, sweep, recorder):
                with _started(name, contender, list(left), plan, recorder) as live:
                    if live is not None:
                        _note_start(live, (name, "", START, sweep), plan, recorder)
                        run_quietly(_run_cases(live, plan, left, recorder))


def _measure_starts(
    name: str, contender: Contender, weights: Callable[[], Iterable[Path]], plan: Plan, recorder: Recorder
) -> None:
    """Starts a server with a model for the first time, again, and once more with the weights in the page cache."""
    cells = [(name, kind, START, 0) for kind in STARTS]
    if all(map(recorder.has, cells)):
        return
    for cell in cells:
        if cell[1] != "warm":
            forget(weights())
        with _started(name, contender, [cell], plan, recorder) as live:
            if live is not None:
                _note_start(live, cell, plan, recorder)


def _note_start(live: Live, cell: Cell, plan: Plan, recorder: Recorder) -> None:
    used = family(live.pid)
    figures = {"ready_s": live.ready_s, "idle_rss_mib": rss_mib(used), "idle_anonymous_mib": anonymous_mib(used)}
    recorder.add(cell, figures)
    plan.say(f"{cell[1] or f'sweep {cell[3] + 1}'}, {cell[0]}: ready after {live.ready_s:.1f} s")


@contextmanager
def _started(
    name: str, contender: Contender, cells: Sequence[Cell], plan: Plan, recorder: Recorder
) -> Iterator[Live | None]:
    """Yields the server, or None if it has too little memory or does not start, which its cells say then.

    Raises StartFailed unless the plan is lenient.
    """
    if plan.least_mib > (free := psutil.virtual_memory().available / 2**20):
        plan.say(f"{name}: {NO_FIT}: needs {plan.least_mib:.0f} MiB, {free:.0f} are available")
        _note(cells, recorder, NO_FIT)
        yield None
        return
    with ExitStack() as stack:
        try:
            live = stack.enter_context(started(contender))
        except StartFailed as error:
            if not plan.lenient:
                raise
            plan.say(f"{name}: {error}")
            _note(cells, recorder, NO_FIT if _KILLED in str(error) else f"does not start: {str(error)[-200:]}")
            yield None
            return
        yield live


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
                _note_start(live, (name, "", START, sweep), plan, recorder)
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


Left = dict[Cell, Case]


def _left(name: str, plan: Plan, sweep: int, recorder: Recorder) -> Left:
    """Returns the cells of a server that have no line yet."""
    cases = [case for case in plan.cases if sweep < plan.sweeps or case.name == ALONE]
    cells = {(name, endpoint, case.name, sweep): case for endpoint in plan.endpoints for case in cases}
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
    case: Case, endpoint: Any, pid: int, label: object, cell: Cell, plan: Plan, recorder: Recorder
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
