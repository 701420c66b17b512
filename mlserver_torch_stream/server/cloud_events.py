"""Encodes CloudEvents attributes so that HTTP headers and gRPC metadata can carry them.

Knows nothing of where they are sent. A client's own id may have any characters and any length; a header may not.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote

# The limit of one value. gRPC's clients refuse a reply with more than 8 KiB of metadata, and an id is in it twice.
_MOST_CHARS = 1024


def as_headers(attributes: Mapping[str, str]) -> dict[str, str]:
    """Names are in lower case. Values are percent-encoded where needed, as in CloudEvents; long ones are left out."""
    encoded = {name.lower(): _encoded(value) for name, value in attributes.items()}
    return {name: value for name, value in encoded.items() if len(value) <= _MOST_CHARS}


def _encoded(value: str) -> str:
    return value if value.isascii() and value.isprintable() else quote(value)
