"""Reads the JSON of a request, unless it has so many values that reading it would hold up all streams.

Knows nothing of what the JSON says. Python's garbage collector looks at each list that a parser makes again and again:
16 MiB of empty lists take seconds, and 16 MiB of different keys two.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

MOST_CONTAINERS = 250_000  # of both kinds; to read them takes some 40 ms
MAX_KEYS = 250_000  # of all objects; some 150 ms where all of them differ
MAX_STRINGS = 1_250_000  # beside the keys; some 150 ms
_AT_ONCE = 1 << 18  # characters, which fit into a processor's cache


def parse_bounded(raw: bytes) -> Any:
    """Raises ValueError: also for NaN, lone surrogates and bottomless nesting."""
    opened, keys, quotes = raw.count(b"[") + raw.count(b"{"), raw.count(b":"), raw.count(b'"')
    if opened > MOST_CONTAINERS or keys > MAX_KEYS or quotes > 2 * (MAX_STRINGS + MAX_KEYS):
        _check_counts(raw)
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"is not valid JSON ({error if _is_text(raw) else 'it is not UTF-8 text'})") from None


def _check_counts(raw: bytes) -> None:
    """Counts what stands outside of strings. A character in a string follows an odd number of quotes."""
    unescaped = np.frombuffer(raw.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    containers = keys = quotes = 0
    for start in range(0, len(unescaped), _AT_ONCE):
        characters = unescaped[start : start + _AT_ONCE]
        is_quote = characters == ord('"')
        outside = (np.cumsum(is_quote, dtype=np.uint8) + quotes % 2) & 1 == 0
        containers += np.count_nonzero(outside & ((characters == ord("[")) | (characters == ord("{"))))
        keys += np.count_nonzero(outside & (characters == ord(":")))
        quotes += np.count_nonzero(is_quote)
        _refuse_above(MOST_CONTAINERS, containers, "lists and objects")
        _refuse_above(MAX_KEYS, keys, "keys")
        _refuse_above(MAX_STRINGS + MAX_KEYS, quotes // 2, "strings and keys")


def _refuse_above(most: int, count: int, what: str) -> None:
    if count > most:
        raise ValueError(f"holds more than {most} {what}")


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True
