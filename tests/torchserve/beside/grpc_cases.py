"""The cases of TorchServe's gRPC inference service, and of tokens.

A case's ``why`` is empty exactly if both replies are the same, which the test checks.
"""

from __future__ import annotations

from tests.torchserve.beside import handlers
from tests.torchserve.beside.case import Case
from tests.torchserve.beside.rest_cases import DEFAULT, SAID
from tests.torchserve.beside.store import SEQUENCES, Stored

# Where a call ends a worker of TorchServe's, its model is asked nothing else.
GRPC_STORE = (
    Stored("echo", handlers.ECHO),
    Stored("two", handlers.ECHO),
    Stored("two", handlers.ECHO, version="2.0"),
    Stored("do", handlers.DO),
    *(Stored(name, handlers.DO) for name in ("pieces", "last", "late", "mortal")),
    Stored("short", handlers.DO, {"responseTimeout": 2}),
    Stored("stateful", handlers.STATEFUL, SEQUENCES),
)
_KINDS = ("str", "unicode", "bytes", "bytearray", "int", "none", "dict", "list", "tensor", "nan", "set")
_CODE = "our gRPC code fits the error"
_NO_METADATA = "TorchServe drops metadata"
_PIECES = "here the reply joins all pieces; TorchServe's worker dies after the first"
_NO_PIECES = "TorchServe's worker dies after the answer"
_NAMES_SEQUENCE = "TorchServe leaves `sequence_id` of responses empty"
_STARTED = "here a sequence that starts without an id is given one"
_ENDS_CALL = "our gRPC code fits the error, and the call goes on"
_INFERENCE = "here only the management API needs a token"
_CODES = (400, 404, 409, 413, 429, 500, 503)


def _predict(name: str, rest: str = "", why: str = "", method: str = "Predictions") -> Case:
    return Case(f"{method}: {name}", f"grpc inference:{method} {rest}".strip(), why)


def _do(name: str, what: str, why: str = "", method: str = "Predictions", model: str = "do") -> Case:
    return _predict(name, f"model_name={model} input.data='{what}'", why, method)


def _sequence(name: str, rest: str, why: str) -> Case:
    return _predict(name, f"model_name=stateful {rest}", why, "StreamPredictions2")


GRPC_PREDICTIONS = (
    Case("Ping", "grpc inference:Ping"),
    _predict("one input", "model_name=echo input.data=hello"),
    _predict("several inputs", "model_name=echo input.data=hello input.size=224 input.grö=ü"),
    _predict("a file", "model_name=echo input.body=@kitten.jpg"),
    _predict("an input without a value", "model_name=echo input.data="),
    _predict("no input", "model_name=echo"),
    _predict("metadata", "model_name=echo input.data=hello metadata.x-own=yes metadata.explain=True", why=_NO_METADATA),
    _predict("no model name", "input.data=hello", why=_CODE),
    _predict("an unknown model", "model_name=nothing input.data=hello", why=_CODE),
    _predict("an unknown version", "model_name=echo model_version=7.0 input.data=hello", why=_CODE),
    _predict("a version", "model_name=two model_version=1.0 input.data=hello"),
    _predict("the default version", "model_name=two input.data=hello", why=DEFAULT),
    _predict("a large message", "model_name=echo input.data=@large.bin"),
    _predict("a message that is too large", "model_name=echo input.data=@too-large.bin", why=_CODE),
    *(_do(f"the handler returns {kind}", f"value {kind}", SAID if kind == "set" else "") for kind in _KINDS),
    _do("the handler sets a status of 404", "status 404 Not here"),
    _do("the handler raises ValueError", "raise value", why=SAID),
    _do("the handler raises MemoryError", "raise memory", why=SAID),
    *(_do(f"the handler raises PredictionException of {code}", f"prediction-exception {code}") for code in _CODES),
    _do("too many results", "two-results", why=SAID),
    _do("no results", "no-result", why=SAID),
    _do("a handler that sends pieces", "stream a b", model="pieces", why=_PIECES),
    _do("the worker dies", "die", model="mortal", why=_CODE),
    _do("the worker is silent for longer than responseTimeout", "sleep 5", model="short", why=_CODE),
    _predict("the deadline has passed", "model_name=do input.data='sleep 2' timeout=0.5"),
)
GRPC_STREAMS = (
    _do("pieces", "stream a b", method="StreamPredictions"),
    _do("pieces of bytes", "stream-bytes", method="StreamPredictions"),
    _do("pieces of JSON", "stream-json", method="StreamPredictions"),
    _predict("an unknown model", "model_name=nothing input.data=hello", method="StreamPredictions", why=_CODE),
    _predict(
        "an unknown version", "model_name=do model_version=7.0 input.data=x", method="StreamPredictions", why=_CODE
    ),
    _do("an error after the first piece", "stream-raise", method="StreamPredictions", model="late", why=SAID),
    _do("a handler that sends no pieces", "value str", method="StreamPredictions", model="last", why=_NO_PIECES),
    _sequence("one request", "sequence_id=a input.data=1", _NAMES_SEQUENCE),
    _sequence(
        "two requests",
        "sequence_id=a input.data=2 + model_name=stateful sequence_id=a input.data=3",
        _NAMES_SEQUENCE,
    ),
    _sequence(
        "the end of a sequence", "sequence_id=a input.data=4 input.ts_request_sequence_end=true", _NAMES_SEQUENCE
    ),
    _sequence(
        "the start of a sequence, without an id",
        "input.data=1 input.ts_request_sequence_start=true input.ts_request_sequence_end=true",
        _STARTED,
    ),
    _sequence("no sequence id", "input.data=1", _CODE),
    _predict(
        "an unknown model", "model_name=nothing sequence_id=a input.data=1", method="StreamPredictions2", why=_ENDS_CALL
    ),
)
TOKENS = (
    Case("the models, without a token", "curl management:/models"),
    Case("the models, with a wrong token", "curl -H 'authorization: Bearer wrong' management:/models"),
    Case("the models, with the token", "curl -H 'authorization: Bearer <token>' management:/models"),
    _predict("without a token", "model_name=echo input.data=hello", _INFERENCE),
    Case("a prediction without a token", "curl /predictions/echo -d data=hello", _INFERENCE),
)
