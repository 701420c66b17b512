"""What a client has received, and in what two replies differ."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_ID = re.compile(rb"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_OF_A_WORKER = re.compile(rb'"(id|startTime|pid|memoryUsage|gpuUsage)": (?:"[^"]*"|-?\d+)')


@dataclass(frozen=True)
class Reply:
    """``pieces`` are the chunks of a chunked body, or the one body. ``fault`` says how the connection failed, if it
    did.

    For a gRPC call, ``status`` is the code's name, ``headers`` are the metadata, and ``pieces`` the messages.
    """

    status: int | str = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    pieces: Sequence[bytes] = ()
    fault: str = ""
    details: str = ""  # of a gRPC status

    def differs(self, other: Reply) -> list[str]:
        """Returns what differs: ``status``, ``body``, ``end``, ``details`` and names of headers."""
        found = [] if self.status == other.status else ["status"]
        names = sorted({*self.headers, *other.headers})
        found += [name for name in names if self.headers.get(name) != other.headers.get(name)]
        found += [] if list(self.pieces) == list(other.pieces) else ["body"]
        found += [] if self.fault == other.fault else ["end"]
        return found + ([] if self.details == other.details else ["details"])


def without_ids(text: bytes) -> bytes:
    return _OF_A_WORKER.sub(rb'"\1": <its own>', _ID.sub(b"<id>", text))
