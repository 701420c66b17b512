"""Reads and writes amounts of memory with units: ``4GiB``, ``1.5 KiB``."""

from __future__ import annotations

import re
from typing import Any

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}


def parse_bytes(value: Any) -> Any:
    """Parses ``"4GiB"``, ``"512MB"`` or ``"1024"`` into a number of bytes. Values that are not strings are returned
    unchanged.

    Raises ValueError for any other string.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", value.lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(
            f"{value!r} is not an amount of memory; write bytes, or a number with KiB, MiB, GiB, KB, MB or GB"
        )
    return int(float(match[1]) * _UNITS[match[2]])


def format_bytes(count: int) -> str:
    """Returns the number of bytes in the largest unit of 1,024 that it reaches, such as ``1.5 GiB``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"
