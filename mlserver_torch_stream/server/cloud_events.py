"""CloudEvents attributes as HTTP headers and gRPC metadata can carry them.

Knows nothing of who sends them. A client's own id may hold anything and be of any length, a header may not.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote

# Of one value. gRPC's clients refuse a reply with more than 8 KiB of metadata, and an id stands in it twice.
_MOST_CHARS = 1024


def as_headers(attributes: Mapping[str, str]) -> dict[str, str]:
    """Names in lower case; values percent-encoded where need be, as CloudEvents says, left out where too long."""
    encoded = {name.lower(): _encoded(value) for name, value in attributes.items()}
    return {name: value for name, value in encoded.items() if len(value) <= _MOST_CHARS}


def _encoded(value: str) -> str:
    return value if value.isascii() and value.isprintable() else quote(value)
