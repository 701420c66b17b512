"""The names of TorchServe's headers of a sequence, which the environment may change."""

from __future__ import annotations

import os

# V2's parameters of a sequence, and how TorchServe's variables and headers end.
SEQUENCE_PARAMETERS = {"sequence_id": "ID", "sequence_start": "START", "sequence_end": "END"}


def sequence_header(parameter: str) -> str:
    """The name in lower case, since clients may spell a header in any case."""
    kind = SEQUENCE_PARAMETERS[parameter]
    return os.environ.get(f"TS_REQUEST_SEQUENCE_{kind}", f"ts_request_sequence_{kind}").lower()
