"""Amounts of memory are written and read in the same units."""

from __future__ import annotations

import pytest

from mlserver_torch_stream.byte_size import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 bytes"), (1536, "1.5 KiB"), (5 * 2**20, "5.0 MiB"), (3 * 2**29, "1.5 GiB")]
)
def test_bytes_in_words(count: int, words: str) -> None:
    assert format_bytes(count) == words
    assert parse_bytes(words.removesuffix(" bytes")) == count
