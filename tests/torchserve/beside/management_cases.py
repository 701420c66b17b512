"""The cases of the management port, in one order: they register, scale and unregister one model.

A case's ``why`` is empty exactly if both replies are the same, which the test checks.
"""

from __future__ import annotations

from tests.torchserve.beside.case import Case


def _manage(method: str, path: str) -> str:
    return f"curl -X {method} 'management:{path}'"


_DESCRIBED = (
    "keys in another order; `maxRetryTimeoutInSec` is not honoured; without sequences `maxNumSequence` and "
    "`maxSequenceJobQueueSize` are 1"
)
_DOCUMENT = "the document names the paths that this server has"

MANAGEMENT = (
    Case("the models", _manage("GET", "/models")),
    Case("the models, by pages", _manage("GET", "/models?limit=1")),
    Case("a model", _manage("GET", "/models/class"), why=_DESCRIBED),
    Case("a model's version", _manage("GET", "/models/class/1.0"), why=_DESCRIBED),
    Case("all versions", _manage("GET", "/models/class/all"), why=_DESCRIBED),
    Case("a model's own description", _manage("GET", "/models/class/1.0?customized=true"), why=_DESCRIBED),
    Case("a model that is not there", _manage("GET", "/models/nothing")),
    Case("a version that is not there", _manage("GET", "/models/class/7.0")),
    Case("registering without a worker", _manage("POST", "/models?url=late-1.0.mar")),
    Case("a prediction without a worker", "curl /predictions/late -d data=hello"),
    Case("registering it again", _manage("POST", "/models?url=late-1.0.mar")),
    Case("a first worker", _manage("PUT", "/models/late?min_worker=1&synchronous=true")),
    Case("a prediction of it", "curl /predictions/late -d data=hello"),
    Case(
        "registering another version with a worker",
        _manage("POST", "/models?url=late-2.0.mar&initial_workers=1&synchronous=true"),
    ),
    Case("the first version is the default", "curl /predictions/late -d data=hello"),
    Case("setting the default", _manage("PUT", "/models/late/2.0/set-default")),
    Case("a prediction of the new default", "curl /predictions/late -d data=hello"),
    Case("a default that is not there", _manage("PUT", "/models/late/7.0/set-default")),
    Case("registering without a url", _manage("POST", "/models")),
    Case("an archive that is not in the store", _manage("POST", "/models?url=nothing.mar")),
    Case("scaling a model that is not there", _manage("PUT", "/models/nothing?min_worker=1")),
    Case(
        "scaling by no number",
        _manage("PUT", "/models/late?min_worker=many"),
        why="TorchServe takes what is no number for 1",
    ),
    Case("scaling with bounds the wrong way round", _manage("PUT", "/models/late?min_worker=2&max_worker=1")),
    Case("unregistering the default before others", _manage("DELETE", "/models/late/2.0")),
    Case("unregistering a version", _manage("DELETE", "/models/late/1.0")),
    Case("unregistering the last version", _manage("DELETE", "/models/late")),
    Case("unregistering it again", _manage("DELETE", "/models/late")),
    Case("a method that is none of these", _manage("PATCH", "/models")),
    Case("an unknown path of the management port", _manage("GET", "/nothing")),
    Case("a description of the management API", _manage("OPTIONS", "/"), why=_DOCUMENT),
)
