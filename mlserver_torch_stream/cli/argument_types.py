"""Parses numbers for argparse, and reads API keys from the environment or a file.

No error message contains a key.
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
    """Reads a port from 0 to 65535. Raises ArgumentTypeError otherwise."""
    number = _whole(text, 0)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"must be a port from 0 to 65535, got {text!r}")
    return number


def listen_address(text: str) -> tuple[str, int]:
    """Reads ``HOST:PORT``, ``[HOST]:PORT``, or only a port; the host is then 127.0.0.1."""
    host, _, port = text.rpartition(":")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", port_number(port)


def above_zero(text: str) -> float:
    """Reads a number above 0. Raises ArgumentTypeError otherwise."""
    return _real(text, "a number")


def seconds(text: str) -> float:
    """Reads a number of seconds above 0. Raises ArgumentTypeError otherwise."""
    return _real(text, "a number of seconds")


def nbytes(text: str) -> int:
    """Reads a number of bytes, plain or with a unit, such as ``4GiB``. Raises ArgumentTypeError otherwise."""
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
_SHORTEST_SECRET = 8  # characters; shorter keys, such as EMPTY, are placeholders


def openai_key() -> str | None:
    """Returns the API key in the environment, or None.

    Raises ValueError for a key that a header cannot contain, because an HTTP library's error would quote the key.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"{KEY_VARIABLE}: has characters that a header cannot contain")
    return key or None


def key_in_file(path: str, option: str = "--api-key-file") -> str:
    """Returns the first key in a file with one key per line; comments are skipped. Raises ValueError if the file cannot
    be read or has no key.
    """
    try:
        lines = map(str.strip, Path(path).read_text(encoding="ascii").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{option}: {path} cannot be read: {error}") from None
    key = next((line for line in lines if line and not line.startswith("#")), None)
    if key is None:
        raise ValueError(f"{option}: {path} has no key")
    return key


def without_key(text: str, key: str | None = None) -> str:
    """Returns the text without the key, which a server may repeat in an error. The default is the environment's key.

    A key that is too short to be a secret is left in the text.
    """
    key = key or os.environ.get(KEY_VARIABLE, "").strip()
    return text.replace(key, "***") if len(key) >= _SHORTEST_SECRET else text


def authorization(key: str | None) -> dict[str, str]:
    """Returns the header that carries the key; an empty mapping if there is no key."""
    return {"Authorization": f"Bearer {key}"} if key else {}
