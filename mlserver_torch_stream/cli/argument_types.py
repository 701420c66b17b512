"""Converts numbers for argparse, with errors that say which values are allowed.

Knows no command.
"""

from __future__ import annotations

import argparse
import math

from mlserver_torch_stream.byte_size import parse_bytes


def positive(text: str) -> int:
    return _whole(text, 1)


def count(text: str) -> int:
    return _whole(text, 0)


def port_number(text: str) -> int:
    number = _whole(text, 0)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"must be a port, 0 to 65535, got {text!r}")
    return number


def above_zero(text: str) -> float:
    return _real(text, "a number")


def seconds(text: str) -> float:
    return _real(text, "a number of seconds")


def nbytes(text: str) -> int:
    """A number of bytes, plain or as ``4GiB``."""
    try:
        number = int(parse_bytes(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return positive(str(number))


def _real(text: str, what: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be {what} above 0, got {text!r}")
    return number


def _whole(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least {least}, got {text!r}")
    return number
