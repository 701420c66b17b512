"""Reads the key for servers of OpenAI's API from the environment.

Knows no server. No message holds the key.
"""

from __future__ import annotations

import os

KEY_VARIABLE = "OPENAI_API_KEY"
_SHORTEST_SECRET = 8  # characters


def openai_key() -> str | None:
    """None where none is set. Raises ValueError for one that a header cannot carry: HTTP libraries would quote it."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"{KEY_VARIABLE}: has characters that a header cannot carry")
    return key or None


def without_key(text: str) -> str:
    """The text without the key, which a server may have repeated in its error. A shorter one, such as EMPTY, is no
    secret."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    return text.replace(key, "***") if len(key) >= _SHORTEST_SECRET else text


def authorization(key: str | None) -> dict[str, str]:
    """The header that carries the key."""
    return {"Authorization": f"Bearer {key}"} if key else {}
