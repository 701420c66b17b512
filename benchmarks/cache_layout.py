"""What a cache of slabs wastes, and what one of pages would: memory held, columns read, streams that fit a budget.

    python -m benchmarks.cache_layout [--streams 64 128 256] [--gib 8] [--answers 400] [--traffic azure-conv ...]
                                      [--output FOLDER]

No model and no clock: a step is a step. The scheduler and the slabs are the product's (``cache_slabs.py``), the pages
follow vLLM's rules (``cache_pages.py``), the lengths public traces (``cache_traffic.py``). Everything is drawn from
one seed, so a second run prints the same. A whole run is kept in ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count, starmap
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import torch

from benchmarks import cache_report
from benchmarks.cache_pages import PagedEngine
from benchmarks.cache_rules import AS_IT_IS, RULES, Rules
from benchmarks.cache_slabs import Moment, SlabEngine, job_of
from benchmarks.cache_traffic import TRAFFIC, Traffic
from mlserver_torch_stream.engine.build import DEFAULT_MAX_TOKENS
from mlserver_torch_stream.settings import EngineSettings

RESULTS = Path(__file__).parent / "results"
# Llama 3.1 8B in bf16: 32 layers x 2 x 8 key-value heads x 128 x 2 bytes; 8.03 billion parameters, of which a step
# reads all but the input embedding's 128,256 x 4,096.
LAYERS = 32
BYTES_PER_COLUMN = 131072
WEIGHTS_READ = 15_010_000_000
CONTEXT = 16384
# So many prompt tokens a step that prompts are never what streams wait for.
PREFILL = 32768
ASKED = (None, 1024, 4096)
USUAL = 1024
DEFAULT_STREAMS: int = EngineSettings.model_fields["max_batch_rows"].default
PAGES = (16, 64)
USERS = 256  # who share the budget
AMPLE = 1 << 40  # columns
SEED = 20261121
STREAMS = (64, 128, 256)
GIB = 8.0
ANSWERS = 400
BY_NAME = {each.name: each for each in TRAFFIC}
UNRULED = ("alike", "uniform")  # other rules are tried on the rest
_MOST_STEPS = 100_000


@dataclass(frozen=True, slots=True)
class Case:
    traffic: Traffic
    asked: int | None  # max_tokens of every request; None: exactly what the answer takes
    users: int  # each asks again as soon as it has its answer


@dataclass(frozen=True, slots=True)
class Holding:
    """Of one case with memory for all: means over its steps, from ``held`` to ``copy`` for each live column."""

    rows: float
    live: float  # columns
    batches: float
    held: float
    pages: dict[str, float]
    read: float
    moved: float  # written and read a step, by zeroing and copying
    copy: float  # the largest cache that was made anew: of each layer in turn, beside the old one


@dataclass(frozen=True, slots=True)
class Fitting:
    """Of one case within a budget: rows that run at the same time, and what part of the budget is live."""

    rows: float
    live: float
    preempted: float  # rows, for each answer
    recomputed: float  # tokens, for each that has to be computed anyway


class Users:
    """A closed loop: so many requests run or wait at every moment."""

    def __init__(self, case: Case, engine: SlabEngine | PagedEngine) -> None:
        self.answers = self.tokens = 0
        self._case = case
        self._engine = engine
        self._random = Random(SEED)
        self._order = count()
        self._ask(case.users)

    def _ask(self, times: int) -> None:
        for _ in range(times):
            prompt = min(self._case.traffic.prompt(self._random), CONTEXT - 1)
            answer = min(self._case.traffic.answer(self._random), CONTEXT - prompt, self._case.asked or CONTEXT)
            self._engine.add(job_of(prompt, self._case.asked or answer, next(self._order), CONTEXT), answer)
            self.tokens += prompt + answer

    def until(self, answers: int) -> Iterator[None]:
        """Steps until so many more answers have ended."""
        last = self.answers + answers
        for _ in range(_MOST_STEPS):
            if self.answers >= last:
                return
            ended = self._engine.step()
            self.answers += ended
            self._ask(ended)
            yield
        raise RuntimeError(f"{answers} answers take more than {_MOST_STEPS} steps")


def warmed_up(case: Case, engine: SlabEngine | PagedEngine) -> Users:
    """Until the rows are of all ages: twice as many answers have ended as rows began together."""
    users = Users(case, engine)
    next(users.until(1))
    for _ in users.until(2 * len(engine.moment().lengths)):
        pass
    return users


def hold(case: Case, answers: int, rules: Rules = AS_IT_IS) -> Holding:
    with rules.applied():
        engine = SlabEngine(case.users, PREFILL, AMPLE, rules.limits)
        users = warmed_up(case, engine)
        engine.ledger.moved = engine.ledger.largest = 0
        moments = [engine.moment() for _ in users.until(answers)]
    live = fmean(each.live for each in moments)
    return Holding(
        rows=fmean(len(each.lengths) for each in moments),
        live=live,
        batches=fmean(each.batches for each in moments),
        held=fmean(each.held for each in moments) / live,
        pages={str(page): fmean(in_pages(each, page) for each in moments) / live for page in PAGES},
        read=fmean(each.read for each in moments) / live,
        moved=engine.ledger.moved / len(moments) / live,
        copy=engine.ledger.largest / live,
    )


def in_pages(moment: Moment, page: int) -> int:
    """Columns that pages of this size would hold for the same rows."""
    return sum(-(-length // page) * page for length in moment.lengths)


def fit_slabs(case: Case, columns: int, answers: int, rules: Rules = AS_IT_IS) -> Fitting:
    with rules.applied():
        engine = SlabEngine(case.users, PREFILL, columns, rules.limits)
        users = warmed_up(case, engine)
        moments = [engine.moment() for _ in users.until(answers)]
    return _fitting(moments, columns)


def fit_pages(case: Case, columns: int, page: int, answers: int) -> Fitting:
    engine = PagedEngine(case.users, PREFILL, columns, page)
    users = warmed_up(case, engine)
    tokens, preempted, recomputed = users.tokens, engine.preempted, engine.recomputed
    moments = [engine.moment() for _ in users.until(answers)]
    return _fitting(
        moments,
        columns,
        preempted=(engine.preempted - preempted) / answers,
        recomputed=(engine.recomputed - recomputed) / (users.tokens - tokens),
    )


def _fitting(moments: Sequence[Moment], columns: int, preempted: float = 0, recomputed: float = 0) -> Fitting:
    rows = fmean(len(each.lengths) for each in moments)
    return Fitting(rows, fmean(each.live for each in moments) / columns, preempted, recomputed)


def measure(
    traffic: Sequence[str],
    streams: Sequence[int],
    gib: float,
    answers: int,
    users: int = USERS,
    processes: int = 1,
) -> dict[str, Any]:
    """By names of ``TRAFFIC``; the cases are spread over so many processes."""
    usual = streams[len(streams) // 2]
    columns = int(gib * 2**30) // BYTES_PER_COLUMN
    few = max(1, answers // 3)  # those who wait are tried at every step, which takes most of the time
    ruled = [name for name in traffic if name not in UNRULED]
    with _spread(processes) as run:
        default = run(_holds, [(name, DEFAULT_MAX_TOKENS, DEFAULT_STREAMS, answers) for name in traffic])
        holding = run(_holds, [(name, USUAL, number, answers) for name in traffic for number in streams])
        asked = run(_holds, [(name, most, usual, answers) for name in traffic for most in ASKED if most != USUAL])
        fitting = run(_fits, [(name, most, users, columns, few) for name in traffic for most in ASKED])
        rules = run(
            _under, [(each.name, name, usual, users, columns, answers, few) for each in RULES for name in ruled]
        )
    return {
        "model": {"bytes_per_column": BYTES_PER_COLUMN, "layers": LAYERS, "weights_read": WEIGHTS_READ},
        "context": CONTEXT,
        "prefill_tokens": PREFILL,
        "max_tokens": USUAL,
        "users": users,
        "seed": SEED,
        "answers": answers,
        "gib": gib,
        "streams": usual,
        "traffic": {each.name: each.what for each in TRAFFIC if each.name in traffic},
        "default": default,
        "holding": holding,
        "asked": asked,
        "fitting": fitting,
        "rules": rules,
    }


Result = dict[str, Any]


@contextmanager
def _spread(processes: int) -> Iterator[Callable[[Callable[..., Result], Sequence[tuple[Any, ...]]], list[Result]]]:
    if processes == 1:
        yield lambda work, cases: list(starmap(work, cases))
        return
    with get_context("spawn").Pool(processes, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield lambda work, cases: pool.starmap(work, cases, chunksize=1)


def _holds(name: str, asked: int | None, streams: int, answers: int) -> Result:
    found = hold(Case(BY_NAME[name], asked, streams), answers)
    return {"traffic": name, "asked": asked, "streams": streams, **asdict(found)}


def _fits(name: str, asked: int | None, users: int, columns: int, answers: int) -> Result:
    case = Case(BY_NAME[name], asked, users)
    pages = {str(page): asdict(fit_pages(case, columns, page, answers)) for page in PAGES}
    slabs = asdict(fit_slabs(case, columns, answers))
    return {"traffic": name, "asked": asked, "slabs": slabs, "pages": pages}


def _under(rules: str, name: str, streams: int, users: int, columns: int, answers: int, few: int) -> Result:
    chosen = next(each for each in RULES if each.name == rules)
    found = hold(Case(BY_NAME[name], USUAL, streams), answers, chosen)
    fits = fit_slabs(Case(BY_NAME[name], USUAL, users), columns, few, chosen)
    default = hold(Case(BY_NAME[name], DEFAULT_MAX_TOKENS, DEFAULT_STREAMS), answers, chosen)
    return {
        "rules": rules,
        "traffic": name,
        **asdict(found),
        "default": default.held,
        "forwards": 1 if chosen.one_forward else found.batches,
        "fit": fits.rows,
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [each.name for each in TRAFFIC]
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--gib", type=float, default=GIB, help="the cache's budget")
    parser.add_argument("--answers", type=int, default=ANSWERS, help="that end while one case is measured")
    parser.add_argument("--traffic", nargs="+", default=names, choices=names)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, help="a folder for the result; a whole run goes to benchmarks/results")
    options = parser.parse_args(arguments)
    whole = (options.streams, options.gib, options.answers, options.traffic) == (list(STREAMS), GIB, ANSWERS, names)
    if whole and options.output is None:
        options.output = RESULTS
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(1)
    result = measure(options.traffic, options.streams, options.gib, options.answers, processes=options.processes)
    print(cache_report.as_markdown(result))
    if options.output is not None:
        cache_report.write(result, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
