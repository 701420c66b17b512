"""Other rules for the scheduler's slabs than those it has, to see what each would hold.

Knows the names of the scheduler's constants, and replaces them for as long as a measurement lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from mlserver_torch_stream.engine import scheduler
from mlserver_torch_stream.engine.scheduler import Group, Limits, Scheduler


@dataclass(frozen=True, slots=True)
class Rules:
    """``slack``: of columns; ``shrink``: a cache is made smaller when rows or columns fall to this part of it."""

    name: str
    row_step: Callable[[int], int] = scheduler.row_step
    slack: float = scheduler._SLACK
    shrink: float = 1 / 4
    spread: int = scheduler._SPREAD
    batches: int = scheduler.MAX_GROUPS

    @contextmanager
    def applied(self) -> Iterator[Callable[[Limits], Scheduler]]:
        """Yields what makes such a scheduler; it keeps to the rules only while this lasts."""
        constants: dict[str, Any] = {
            "row_step": self.row_step,
            "_SLACK": self.slack,
            "_SPREAD": self.spread,
            "MAX_GROUPS": self.batches,
        }
        with patch.multiple(scheduler, **constants):
            yield lambda limits: _Trimmed(limits, self.shrink)


class _Trimmed(Scheduler):
    def __init__(self, limits: Limits, shrink: float) -> None:
        super().__init__(limits)
        self._shrink = shrink

    def keep(self, group: Group, order: list[int]) -> bool:
        group.rows = [group.rows[row] for row in order]
        rows, columns = group.wanted()
        if rows > self._shrink * group.row_capacity and columns > self._shrink * group.column_capacity:
            return False
        group.row_capacity, group.column_capacity = max(1, rows), max(1, columns)
        return True


def by_quarters(rows: int) -> int:
    """Four sizes between a power of two and the next, where ``row_step`` has one."""
    step = max(1, (1 << max(0, rows - 1).bit_length()) // 8)
    return -(-rows // step) * step


AS_IT_IS = Rules("as it is")
RULES = (
    AS_IT_IS,
    Rules("columns: 1/8 to spare, not 1/4", slack=1.125),
    Rules("rows by quarters of a power of two", row_step=by_quarters),
    Rules("made smaller at 1/2, not 1/4", shrink=1 / 2),
    Rules("all three", by_quarters, 1.125, 1 / 2),
    Rules("all three, 8 batches", by_quarters, 1.125, 1 / 2, batches=8),
    Rules("all three, 8 batches, lengths up to twofold", by_quarters, 1.125, 1 / 2, 2, 8),
)
