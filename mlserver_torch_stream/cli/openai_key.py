"""Reads the key for servers of OpenAI's API from the environment, and the key for any server from a file.

Knows no server. No message holds the key.
"""

from __future__ import annotations

import os
from pathlib import Path

KEY_VARIABLE = "OPENAI_API_KEY"
_SHORTEST_SECRET = 8  # characters


def openai_key() -> str | None:
    """None where none is set. Raises ValueError for one that a header cannot carry: HTTP libraries would quote it."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"{KEY_VARIABLE}: has characters that a header cannot carry")
    return key or None


def key_in_file(path: str) -> str:
    """The first key of a file as the server reads it: one a line, without comments. Raises ValueError."""
    try:
        lines = map(str.strip, Path(path).read_text(encoding="ascii").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--api-key-file: {path} cannot be read: {error}") from None
    key = next((line for line in lines if line and not line.startswith("#")), None)
    if key is None:
        raise ValueError(f"--api-key-file: {path} has no key")
    return key


def without_key(text: str) -> str:
    """The text without the key, which a server may repeat in its error.

    A key too short to be a secret, such as EMPTY, stays.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    return text.replace(key, "***") if len(key) >= _SHORTEST_SECRET else text


def authorization(key: str | None) -> dict[str, str]:
    """The header that carries the key."""
    return {"Authorization": f"Bearer {key}"} if key else {}
