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
_DOCUMENT = "our document describes the paths of our server"

MANAGEMENT = (
    Case("the models", _manage("GET", "/models")),
    Case("the models, in pages", _manage("GET", "/models?limit=1")),
    Case("a model", _manage("GET", "/models/class"), why=_DESCRIBED),
    Case("a model's version", _manage("GET", "/models/class/1.0"), why=_DESCRIBED),
    Case("all versions", _manage("GET", "/models/class/all"), why=_DESCRIBED),
    Case("a model's own description", _manage("GET", "/models/class/1.0?customized=true"), why=_DESCRIBED),
    Case("a model that does not exist", _manage("GET", "/models/nothing")),
    Case("a version that does not exist", _manage("GET", "/models/class/7.0")),
    Case("registering without a worker", _manage("POST", "/models?url=late-1.0.mar")),
    Case("a prediction without a worker", "curl /predictions/late -d data=hello"),
    Case("registering the same model again", _manage("POST", "/models?url=late-1.0.mar")),
    Case("a first worker", _manage("PUT", "/models/late?min_worker=1&synchronous=true")),
    Case("a prediction by this worker", "curl /predictions/late -d data=hello"),
    Case(
        "registering another version with a worker",
        _manage("POST", "/models?url=late-2.0.mar&initial_workers=1&synchronous=true"),
    ),
    Case("the first version is the default", "curl /predictions/late -d data=hello"),
    Case("setting the default", _manage("PUT", "/models/late/2.0/set-default")),
    Case("a prediction by the new default", "curl /predictions/late -d data=hello"),
    Case("a default version that does not exist", _manage("PUT", "/models/late/7.0/set-default")),
    Case("registering without a url", _manage("POST", "/models")),
    Case("an archive that is not in the store", _manage("POST", "/models?url=nothing.mar")),
    Case("scaling a model that does not exist", _manage("PUT", "/models/nothing?min_worker=1")),
    Case(
        "scaling to a value that is not a number",
        _manage("PUT", "/models/late?min_worker=many"),
        why="TorchServe reads such a value as 1",
    ),
    Case("scaling with a minimum above the maximum", _manage("PUT", "/models/late?min_worker=2&max_worker=1")),
    Case("unregistering the default before others", _manage("DELETE", "/models/late/2.0")),
    Case("unregistering a version", _manage("DELETE", "/models/late/1.0")),
    Case("unregistering the last version", _manage("DELETE", "/models/late")),
    Case("unregistering the same model again", _manage("DELETE", "/models/late")),
    Case("a method that the path does not support", _manage("PATCH", "/models")),
    Case("an unknown path of the management port", _manage("GET", "/nothing")),
    Case("a description of the management API", _manage("OPTIONS", "/"), why=_DOCUMENT),
)
