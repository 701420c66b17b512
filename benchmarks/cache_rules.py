"""Other rules for the scheduler's slabs than those it has, to see what each would hold.

Knows the names of the scheduler's constants, and replaces them for as long as a measurement lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

from mlserver_torch_stream.engine import scheduler
from mlserver_torch_stream.engine.scheduler import Limits, joint_limits


def apart(limits: Limits) -> Limits:
    """Where each batch is a forward."""
    return limits


@dataclass(frozen=True, slots=True)
class Rules:
    """Those of our kernels on CPUs and of CUDA graphs, where nothing else is said.

    ``slack``: of columns, ``least_slack`` where that saves a move; ``shrink``: a cache is made smaller when rows or
    columns fall to this part of it; ``limits``: what it makes of the scheduler's, for its batches.
    """

    name: str
    row_step: Callable[[int], int] = scheduler.row_step
    slack: float = scheduler._SLACK
    least_slack: float = scheduler._LEAST_SLACK
    shrink: float = scheduler._SHRINK
    limits: Callable[[Limits], Limits] = joint_limits
    one_forward: bool = True  # takes all batches: no rule, but what a step reads depends on it

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A scheduler keeps to all but its ``limits`` only while this lasts."""
        with patch.multiple(
            scheduler,
            row_step=self.row_step,
            _SLACK=self.slack,
            _LEAST_SLACK=self.least_slack,
            _SHRINK=self.shrink,
        ):
            yield


def by_parts(parts: int) -> Callable[[int], int]:
    """A ``row_step`` of so many sizes from a power of two to the next."""

    def row_step(rows: int) -> int:
        step = max(1, (1 << max(0, rows - 1).bit_length()) // (2 * parts))
        return -(-rows // step) * step

    return row_step


def _grown(limits: Limits) -> Limits:
    return replace(joint_limits(limits), joint=False)


def _twelve(limits: Limits) -> Limits:
    return replace(joint_limits(limits), batches=12)


AS_IT_IS = Rules("as it is")
APART = Rules("a forward for each: 4 batches, lengths up to fourfold", limits=apart, one_forward=False)
BEFORE = Rules("the same, rows by powers of two, 1/4 to spare, smaller at 1/4 (until 2026-11-21)",
               by_parts(1), 1.25, 1.25, 1 / 4, apart, one_forward=False)  # fmt: skip
RULES = (
    AS_IT_IS,
    APART,
    BEFORE,
    Rules("batches grow: no new one instead, no room ahead", limits=_grown),
    Rules("12 batches", limits=_twelve),
    Rules("made smaller at 3/4", shrink=3 / 4),
    Rules("rows by eighths of a power of two", row_step=by_parts(8)),
    Rules("columns: 1/16 to spare", slack=1.0625),
)
