"""The messages of rank 0 to the other ranks: each operation and batch is decoded as it was encoded, and is short."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlserver_torch_stream.engine.cache.pages import Batch, BatchSequence
from mlserver_torch_stream.engine.tensor_parallel.leader import (
    Operation,
    batch_numbers,
    batch_of,
    decode_operations,
    encode_operations,
)

numbers = st.integers(-1, 2**31 - 1)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    groups = draw(st.integers(0, 3))
    lists = st.lists(numbers, max_size=5)
    sequence = st.builds(BatchSequence, lists, numbers, st.tuples(*[lists] * groups), numbers, numbers)
    copies = st.lists(st.tuples(numbers, numbers, numbers), max_size=3).map(tuple)
    state_copies = st.lists(st.tuples(numbers, numbers), max_size=3).map(tuple)
    sequences = draw(st.lists(sequence, max_size=4))
    return Batch(tuple(sequences), draw(copies), draw(state_copies))


@given(batches())
def test_a_batch_comes_back_as_it_was(batch: Batch) -> None:
    message = encode_operations([(Operation.PULSE, ()), (Operation.FORWARD, (7, *batch_numbers(batch)))])
    pulse, (operation, (name, *rest)) = decode_operations(message)
    assert pulse == (Operation.PULSE, [])
    assert (operation, name) == (Operation.FORWARD, 7)
    assert batch_of(rest) == batch


def test_a_step_of_32_sequences_is_one_frame() -> None:
    """Each sequence has 1,024 tokens, in pages of 16."""
    each = BatchSequence([49_151], 1023, (range(30_000, 30_064),))
    message = encode_operations([(Operation.FORWARD, (1, *batch_numbers(Batch((each,) * 32))))])
    assert len(message) == 8988


def test_an_operation_of_another_version_is_named() -> None:
    with pytest.raises(RuntimeError, match="unknown operation 99: the ranks run different versions"):
        decode_operations(array("i", (99, 0)).tobytes())
