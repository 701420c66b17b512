"""Converts numbers for argparse, and reads API keys from the environment or a file.

No message holds a key.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

from mlserver_torch_stream.byte_size import parse_bytes


def positive(text: str) -> int:
    """Reads a whole number of at least 1. Raises ArgumentTypeError otherwise."""
    return _whole(text, 1)


def count(text: str) -> int:
    """Reads a whole number of at least 0. Raises ArgumentTypeError otherwise."""
    return _whole(text, 0)


def port_number(text: str) -> int:
    """Reads a port, 0 to 65535. Raises ArgumentTypeError otherwise."""
    number = _whole(text, 0)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"must be a port, 0 to 65535, got {text!r}")
    return number


def listen_address(text: str) -> tuple[str, int]:
    """``HOST:PORT``, ``[HOST]:PORT``, or a port of 127.0.0.1."""
    host, _, port = text.rpartition(":")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", port_number(port)


def above_zero(text: str) -> float:
    """Reads a number above 0. Raises ArgumentTypeError otherwise."""
    return _real(text, "a number")


def seconds(text: str) -> float:
    """Reads a number of seconds above 0. Raises ArgumentTypeError otherwise."""
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


KEY_VARIABLE = "OPENAI_API_KEY"
_SHORTEST_SECRET = 8  # characters


def openai_key() -> str | None:
    """None where none is set. Raises ValueError for one that a header cannot carry: HTTP libraries would quote it."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"{KEY_VARIABLE}: has characters that a header cannot carry")
    return key or None


def key_in_file(path: str, option: str = "--api-key-file") -> str:
    """The first key of the option's file as the server reads it: one a line, without comments. Raises ValueError."""
    try:
        lines = map(str.strip, Path(path).read_text(encoding="ascii").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{option}: {path} cannot be read: {error}") from None
    key = next((line for line in lines if line and not line.startswith("#")), None)
    if key is None:
        raise ValueError(f"{option}: {path} has no key")
    return key


def without_key(text: str, key: str | None = None) -> str:
    """The text without the key, by default the environment's, which a server may repeat in its error.

    A key too short to be a secret, such as EMPTY, stays.
    """
    key = key or os.environ.get(KEY_VARIABLE, "").strip()
    return text.replace(key, "***") if len(key) >= _SHORTEST_SECRET else text


def authorization(key: str | None) -> dict[str, str]:
    """The header that carries the key."""
    return {"Authorization": f"Bearer {key}"} if key else {}
