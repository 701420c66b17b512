"""All compared cases, by the model folder and the configuration with which both servers are started.

Cases of another port are one more section.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.torchserve.beside import handlers
from tests.torchserve.beside.case import Case
from tests.torchserve.beside.grpc_cases import (
    GRPC_PREDICTIONS,
    GRPC_STORE,
    GRPC_STREAMS,
    TOKENS,
)
from tests.torchserve.beside.management_cases import MANAGEMENT
from tests.torchserve.beside.rest_cases import (
    BATCHES,
    BODIES,
    FAULTS,
    HEADERS,
    JSON,
    PATHS,
    RESULTS,
    SAID,
    STREAMS,
    VALUES,
)
from tests.torchserve.beside.store import ENVELOPES, STORE, Stored


@dataclass(frozen=True)
class Group:
    """Cases for one start of both servers. ``properties`` are those of config.properties.

    ``registered`` models are only in the store. ``tokens`` says whether the servers require tokens.
    """

    models: Sequence[Stored]
    sections: Mapping[str, Sequence[Case]]
    properties: Mapping[str, str] = field(default_factory=dict)
    registered: Sequence[Stored] = ()
    tokens: bool = False


def _enveloped(name: str, cases: Sequence[Case]) -> Group:
    """Returns a group with one envelope for all models, set in the configuration."""
    return Group([ENVELOPES[name]], {"Envelopes": cases}, {"service_envelope": name})


GROUPS = (
    Group(
        STORE,
        {
            "Bodies": BODIES,
            "Paths and methods": PATHS,
            "Headers and connections": HEADERS,
            "What a handler returns": VALUES,
            "Statuses, headers and errors of a handler": RESULTS,
            "Streams": STREAMS,
            "Batches and sequences": BATCHES,
            "Faults": FAULTS,
        },
    ),
    Group(
        [Stored("class", handlers.CLASS)],
        {"Management": MANAGEMENT},
        registered=[Stored("late", handlers.ECHO, {}, version) for version in ("1.0", "2.0")],
    ),
    Group(
        GRPC_STORE,
        {
            "gRPC: predictions": GRPC_PREDICTIONS,
            "gRPC: streams": GRPC_STREAMS,
        },
    ),
    Group([Stored("echo", handlers.ECHO)], {"Tokens": TOKENS}, tokens=True),
    _enveloped("body", (
        Case("`body`", "curl /predictions/enveloped -d data=hello"),
        Case("`body`, JSON", f"curl /predictions/enveloped {JSON} --data @input.json"),
    )),
    _enveloped("json", (
        Case("`json`", f"curl /predictions/enveloped {JSON} --data @input.json"),
        Case("`json`, base64", f"curl /predictions/enveloped {JSON} --data @base64.json"),
        Case("`json`, no instances", f"curl /predictions/enveloped {JSON} -d '{{}}'", why=SAID),
    )),
    _enveloped("kserve", (
        Case("`kserve`", f"curl /v1/models/enveloped:predict {JSON} --data @input.json"),
        Case("`kserve`, an explanation", f"curl /v1/models/enveloped:explain {JSON} --data @input.json"),
        Case("`kserve`, by `/predictions`", f"curl /predictions/enveloped {JSON} --data @input.json"),
        Case("`kserve`, no instances", f"curl /v1/models/enveloped:predict {JSON} -d '{{}}'", why=SAID),
    )),
)  # fmt: skip
