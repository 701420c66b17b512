"""Reads the input of a batch before any row is answered: counts its rows, and finds its models and wrong ids of rows.

Knows nothing of what a model makes of a row: a row that cannot be answered fails alone, later.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from mlserver_torch_stream.batches.batch_record import BatchProblem
from mlserver_torch_stream.cloud.rows import Row

MOST_ROWS = 50_000  # OpenAI's bound
_MOST_PROBLEMS = 20
_ROWS_AT_A_TIME = 32
_EMPTY = BatchProblem("empty_file", "the input file holds no rows")
_TOO_MANY = BatchProblem("too_many_rows", f"the input file holds more than {MOST_ROWS} rows")


@dataclass(frozen=True, slots=True)
class InputSummary:
    """``problems``: why no row of it is answered; empty if they are."""

    rows: int
    models: tuple[str, ...]
    problems: tuple[BatchProblem, ...]


async def check_input(rows: AsyncGenerator[Row, None], is_loaded: Callable[[str], bool]) -> InputSummary:
    """Stops at the first row that is one too many, and where the file cannot be read."""
    count, models = 0, set[str]()
    seen = set[bytes]()
    problems: list[BatchProblem] = []
    async with aclosing(rows) as source:
        async for row in source:
            count += 1
            if count > MOST_ROWS:
                return InputSummary(count, (), (_TOO_MANY,))
            if row.failure is not None and row.line is None:
                return InputSummary(count, (), (BatchProblem(row.failure.code, "the input file cannot be read"),))
            model = None if row.body is None else row.body.get("model")
            if isinstance(model, str) and is_loaded(model):
                models.add(model)
            name = hashlib.blake2b(row.custom_id.encode("utf-8", "replace"), digest_size=16).digest()
            if name in seen and len(problems) < _MOST_PROBLEMS:
                problems.append(_duplicate(row))
            seen.add(name)
            if count % _ROWS_AT_A_TIME == 0:
                await asyncio.sleep(0)  # the rows of a block are parsed without a wait; streams of the server run here
    return InputSummary(count, tuple(sorted(models)), tuple(problems) if count else (_EMPTY,))


def _duplicate(row: Row) -> BatchProblem:
    message = (
        f"custom_id {row.custom_id[:100]!r} stands on an earlier line too, so that answers could not be told apart"
    )
    return BatchProblem("duplicate_custom_id", message, "custom_id", row.line)
