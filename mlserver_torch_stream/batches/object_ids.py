"""Makes and checks the ids of files and batches. Ids sort in the order in which they were made.

Knows nothing of what has an id. An id holds hexadecimal digits only, so it is safe as a part of a key or a path.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time

FILE = "file-"
BATCH = "batch_"
_TIME_DIGITS = 12  # of milliseconds since the epoch
_DIGITS = 32
_ID = re.compile(rf"(?:{FILE}|{BATCH})[0-9a-f]{{{_DIGITS}}}")


def is_id(prefix: str, text: object) -> bool:
    return isinstance(text, str) and text.startswith(prefix) and _ID.fullmatch(text) is not None


class IdMaker:
    """Makes ids, each larger than the one before."""

    def __init__(self) -> None:
        self._last = 0

    def make(self, prefix: str) -> str:
        self._last = max(self._last + 1, int(time.time() * 1000))
        return f"{prefix}{self._last:0{_TIME_DIGITS}x}{secrets.token_hex((_DIGITS - _TIME_DIGITS) // 2)}"


def output_file_id(batch_id: str, kind: str) -> str:
    """The id of a file that a batch writes: the same whenever it is written."""
    made = batch_id.removeprefix(BATCH)[:_TIME_DIGITS]
    rest = hashlib.sha256(f"{batch_id}/{kind}".encode()).hexdigest()[: _DIGITS - _TIME_DIGITS]
    return f"{FILE}{made}{rest}"
