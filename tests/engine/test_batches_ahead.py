"""Tests which batches in flight a batch has to wait for: those that still write pages or states that it reads."""

import pytest

from mlserver_torch_stream.engine.cache.pages import Batch, BatchSequence
from mlserver_torch_stream.engine.pipeline.in_flight import BatchesAhead

PAGE = 4
# Tokens 6 to 9 of a sequence with pages 10 to 12 in one group of layers and the last two of 20 to 22 in another.
AHEAD = Batch(
    (BatchSequence([1, 2, 3, 4], 6, ((10, 11, 12), (-1, 21, 22)), state_slot=3),),
    copies=((0, 9, 11),),
    state_copies=((2, 4),),
)


def sequence(*tables: tuple[int, ...], start: int = 0, slot: int = -1) -> BatchSequence:
    return BatchSequence([5] * (PAGE * len(tables[0]) - start), start, tables, state_slot=slot)


@pytest.mark.parametrize(
    ("batch", "waits"),
    [
        (Batch((sequence((30, 31), (40, 41)),)), False),
        (Batch((sequence((10, 31), (20, 41), start=4),)), False),  # what it reads was there before
        (Batch((sequence((11, 31), (40, 41), start=4),)), True),
        (Batch((sequence((31, 32), (21, 41), start=4),)), True),
        (Batch((sequence((21, 22), (11, 12), start=4),)), False),  # pages of the other group
        (Batch((sequence((-1, 31), (-1, 41), start=4),)), False),  # pages behind a window
        (Batch((sequence((30,), (40,)),), copies=((0, 12, 30),)), True),
        (Batch((sequence((30,), (40,)),), copies=((1, 12, 40),)), False),
        (Batch((sequence((30,), (40,), slot=4),)), True),
        (Batch((sequence((30,), (40,), slot=5),), state_copies=((3, 5),)), True),
        (Batch((sequence((30,), (40,), slot=5),), state_copies=((6, 5),)), False),
        (Batch((sequence((9,), (40,)),)), True),  # it would write what is not copied yet
        (Batch((sequence((30,), (9,)),)), False),
        (Batch((sequence((30,), (40,), slot=2),)), True),
    ],
)
def test_a_batch_waits_for_what_it_reads_and_for_nothing_else(batch: Batch, waits: bool) -> None:
    ahead: BatchesAhead[str] = BatchesAhead(PAGE)
    assert ahead.add("first", AHEAD) == []
    assert ahead.add("second", batch) == (["first"] if waits else [])
    ahead.remove("second")
    ahead.remove("first")
    assert ahead.add("third", batch) == []
