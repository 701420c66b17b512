"""The names of TorchServe's sequence headers, which environment variables may change."""

from __future__ import annotations

import os

# V2's parameters of a sequence, and the endings of TorchServe's variables and headers for them.
SEQUENCE_PARAMETERS = {"sequence_id": "ID", "sequence_start": "START", "sequence_end": "END"}


def sequence_header(parameter: str) -> str:
    """Returns the header's name in lower case, since headers are case-insensitive."""
    kind = SEQUENCE_PARAMETERS[parameter]
    return os.environ.get(f"TS_REQUEST_SEQUENCE_{kind}", f"ts_request_sequence_{kind}").lower()
