"""Reads the JSON of a request, unless it has so many lists and objects that reading it would hold up all streams.

Knows nothing of what the JSON says. Python's garbage collector looks at each list that a parser makes again and again:
16 MiB of empty lists take seconds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

MOST_CONTAINERS = 250_000  # of both kinds; to read them takes some 40 ms


def parse_bounded(raw: bytes) -> Any:
    """Raises ValueError: also for NaN, lone surrogates and bottomless nesting."""
    if raw.count(b"[") + raw.count(b"{") > MOST_CONTAINERS and _containers(raw) > MOST_CONTAINERS:
        raise ValueError(f"holds more than {MOST_CONTAINERS} lists and objects")
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"is not valid JSON ({error if _is_text(raw) else 'it is not UTF-8 text'})") from None


def _containers(raw: bytes) -> int:
    """The number of brackets that open lists and objects. A bracket in a string follows an odd number of quotes."""
    unescaped = np.frombuffer(raw.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    in_string = np.cumsum(unescaped == ord('"'), dtype=np.uint8) & 1
    opening = (unescaped == ord("[")) | (unescaped == ord("{"))
    return int(np.count_nonzero(opening & (in_string == 0)))


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True
