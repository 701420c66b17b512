"""The cases of the inference port.

A case's ``why`` is empty exactly if both replies are the same, which the test checks.
"""

from __future__ import annotations

from tests.torchserve.beside.case import Case

JSON = "-H 'content-type: application/json'"
SAID = "our message gives the reason"
_TEXT = "-H 'content-type: text/plain'"
_ALONE = "here the requests of a failed batch are run again, each alone"
DEFAULT = "TorchServe takes the first version registered, our server the newest; `defaultVersion` sets it on both"
_NO_MODEL = "the path names no model, and MLServer has its own route there"
_DOCUMENT = "our document describes the paths of our server"
_CLOSED = "our reply says that the connection is closed"
_DEAD = "503 here, because the worker is started again and the request may be sent again"
_METHODS = "TorchServe calls the handler for every method"
_OLDER = "here the handler gets the header `explain` on this path, too"
_OTHER_PATHS = "all other paths are MLServer's, which has its own errors"
_UNSENDABLE = ("tensor-in-a-dict", "numpy", "set")


def _do(what: str, model: str = "do") -> str:
    return f"curl /predictions/{model} {_TEXT} -d '{what}'"


BODIES = (
    Case("a file as the body", "curl /predictions/echo -T kitten.jpg"),
    Case("a file as the body, POST", "curl -X POST /predictions/echo -T sample.txt"),
    Case("a field of a form", "curl /predictions/echo -d data=hello"),
    Case("several fields", "curl /predictions/echo -d data=hello -d size=224 -d size=225"),
    Case("an encoded field", "curl /predictions/echo --data-urlencode 'data=a b&c=ü'"),
    Case("a field without a value", "curl /predictions/echo -d 'a&b='"),
    Case(
        "JSON that curl sends as a form",
        'curl /predictions/echo -d \'{"prompt": "hello"}\'',
        why="TorchServe drops a last field without `=`; here the text becomes the field's name",
    ),
    Case("a file in a multipart form", "curl /predictions/echo -F data=@kitten.jpg"),
    Case("two files with one name", "curl /predictions/echo -F data=@dog.jpg -F data=@kitten.jpg"),
    Case("a file and a field", "curl /predictions/echo -F data=@kitten.jpg -F size=224"),
    Case("a JSON file in a form", "curl /predictions/echo -F 'data=@input.json;type=application/json'"),
    Case("a text file in a form", "curl /predictions/echo -F 'data=@sample.txt;type=text/plain'"),
    Case("JSON", f"curl /predictions/echo {JSON} --data @input.json"),
    Case(
        "JSON with a character set",
        "curl /predictions/echo -H 'Content-Type: application/json; charset=utf-8' -d '[1]'",
    ),
    Case("a body that is not JSON", f"curl /predictions/echo {JSON} -d '{{'"),
    Case("text", f"curl /predictions/echo {_TEXT} --data-binary @sample.txt"),
    Case(
        "text in another character set",
        "curl /predictions/echo -H 'content-type: text/plain' --data-binary @kitten.jpg",
    ),
    Case("bytes with a content type", "curl /predictions/echo -H 'content-type: image/jpeg' --data-binary @kitten.jpg"),
    Case("an empty body", "curl -X POST /predictions/echo"),
    Case("an empty file", "curl /predictions/echo -T empty"),
    Case("a large body", "curl /predictions/echo -T large.bin"),
    Case("a large body in chunks", "curl /predictions/echo -H 'transfer-encoding: chunked' -T large.bin"),
    Case("a body over the limit", "curl /predictions/echo -T too-large.bin", why="the error names the limit"),
    Case(
        "a body that is not a form",
        "curl /predictions/echo -H 'content-type: multipart/form-data; boundary=b' -d 'no form'",
        why="TorchServe calls the handler with what it can read",
    ),
    Case("`requests.post(data=…)`", "requests post /predictions/echo file=kitten.jpg"),
    Case("`requests.post(files=…)`", "requests post /predictions/echo files=data:kitten.jpg,more:dog.jpg"),
    Case("`requests.put(data=…)`", "requests put /predictions/echo data=hello"),
)
PATHS = (
    Case("the version in the path", "curl /predictions/echo/1.0 -d data=hello"),
    Case("one of two versions", "curl /predictions/two/1.0 -d data=hello"),
    Case("the other version", "curl /predictions/two/2.0 -d data=hello"),
    Case(
        "the default version",
        "curl /predictions/two -d data=hello",
        why=DEFAULT,
    ),
    Case("no such version", "curl /predictions/echo/3.0 -d data=hello"),
    Case("no such model", "curl /predictions/nothing -d data=hello"),
    Case("no such model and version", "curl /predictions/nothing/1.0 -d data=hello"),
    Case("no model", "curl /predictions -d data=hello", why=_OTHER_PATHS),
    Case("a path after the version", "curl /predictions/echo/1.0/v1/things -d data=hello"),
    Case("a query", "curl '/predictions/echo?data=hello' -d x=y"),
    Case("GET", "curl /predictions/class", why=_METHODS),
    Case("DELETE", "curl -X DELETE /predictions/class", why=_METHODS),
    Case("PATCH", "curl -X PATCH /predictions/class -d data=2", why=_METHODS),
    Case("HEAD", "curl -I /predictions/class", why=_METHODS),
    Case("`GET /ping`", "curl /ping"),
    Case("`POST /ping`", "curl -X POST /ping", why="here only GET and HEAD are accepted"),
    Case("`HEAD /ping`", "curl -I /ping"),
    Case("an unknown path", "curl /nothing/at/all/here", why=_OTHER_PATHS),
    Case("a description of the API", "curl -X OPTIONS /", why=_DOCUMENT),
    Case("a description of a model", "curl -X OPTIONS /predictions/echo", why=_DOCUMENT),
    Case("`/models/{model}/invoke`", "curl /models/echo/invoke -d data=hello", why=_OLDER),
    Case(
        "`/invocations`",
        "curl '/invocations?model_name=echo' -d data=hello",
        why="the path names no model, and MLServer has its own route there",
    ),
    Case("`/{model}/predict`", "curl /echo/predict -d data=hello", why=_OLDER),
    Case("an explanation", f"curl /explanations/class {_TEXT} -d 2"),
    Case("an explanation of a handler that has none", "curl /explanations/echo -d data=hello"),
    Case("KServe's V1", f"curl /v1/models/echo:predict {JSON} --data @input.json"),
    Case("KServe's V1, an explanation", f"curl /v1/models/echo:explain {JSON} --data @input.json"),
    Case("KServe's V1, no such model", f"curl /v1/models/nothing:predict {JSON} -d '{{}}'"),
)
HEADERS = (
    Case("the client's request id", "curl /predictions/echo -H 'x-request-id: mine' -d data=hello", why="kept here"),
    Case(
        "a prefix of the request id",
        "curl /predictions/echo -H 'x-request-id-prefix: mine' -d data=hello",
        why="the new id begins with this prefix; TorchServe 0.12 ignores it",
    ),
    Case("a header for the handler", "curl /predictions/echo -H 'x-own: value' -d data=hello"),
    Case("a header in capitals", "curl /predictions/echo -H 'X-Capitals: value' -d data=hello"),
    Case(
        "a browser's preflight request",
        "curl -X OPTIONS /predictions/echo -H 'origin: http://a' -H 'access-control-request-method: POST'",
        why=_DOCUMENT,
    ),
    Case("two requests on one connection", "curl /predictions/class /predictions/class -d data=2"),
    Case("a request to close the connection", "curl /predictions/class -H 'connection: close' -d data=2", why=_CLOSED),
    Case("HTTP/1.0", "curl --http1.0 /predictions/class -d data=2", why=_CLOSED),
    Case(
        "HTTP/1.0 and a stream",
        f"curl --http1.0 /predictions/do {_TEXT} -d 'stream one two'",
        why="HTTP/1.0 has no chunks: the body ends with the connection",
    ),
    Case("a request for a compressed body", "curl --compressed /predictions/class -d data=2"),
)
VALUES = tuple(
    Case(f"a handler returns {article}", _do(f"value {name}"), why=SAID if name in _UNSENDABLE else "")
    for name, article in (
        ("str", "a string"), ("unicode", "a non-ASCII string"), ("empty-str", "an empty string"), ("bytes", "bytes"),
        ("bytearray", "a bytearray"), ("int", "an int"), ("float", "a float"), ("bool", "a bool"), ("none", "None"),
        ("dict", "a dict"), ("empty-dict", "an empty dict"), ("list", "a list"), ("tuple", "a tuple"), ("nan", "NaN"),
        ("tensor", "a tensor"), ("tensor-in-a-dict", "a tensor in a dict"), ("numpy", "an array"), ("set", "a set"),
    )
)  # fmt: skip
RESULTS = (
    Case("a result that is not a list", _do("not-a-list"), why=SAID),
    Case("one result too many", _do("two-results"), why=SAID),
    Case("no result", _do("no-result"), why=SAID),
    Case("a content type", _do("type application/json")),
    Case("a header", _do("header x-mine yes")),
    Case("a header that the server sets too", _do("header Cache-Control max-age=60"), why="here the handler's wins"),
    Case("a wrong length", _do("header Content-Length 3")),
    Case("a status of 201", _do("status 201 Created")),
    Case("a status of 204", _do("status 204 No Content")),
    Case("a status of 404", _do("status 404 Not here")),
    Case("a status of 500", _do("status 500 Broken")),
    Case("one status for all", _do("all-status")),
    Case("a `PredictionException` without a code", _do("prediction-exception")),
    *(
        Case(f"a `PredictionException` of {code}", _do(f"prediction-exception {code}"))
        for code in (400, 404, 503, 507, 513)
    ),
    Case("a `ValueError`", _do("raise value"), why=SAID),
    Case("a `MemoryError`", _do("raise memory"), why=SAID),
    Case("a CUDA error", _do("cuda"), why=SAID),
)
STREAMS = (
    Case("intermediate responses", _do("stream one two")),
    Case("… by `iter_content(chunk_size=None)`", "requests post /predictions/do data='stream one two'"),
    Case("intermediate responses of JSON", _do("stream-json")),
    Case("intermediate responses of bytes and of text", _do("stream-bytes")),
    Case("a content type and a header of a stream", _do("stream-typed")),
    Case("a status set with the first response", _do("stream-status 206 200")),
    Case("statuses set with later responses", _do("stream-status 200 299 202")),
    Case("an error status in the last response", _do("stream-status 200 503")),
    Case(
        "an error status in the first response",
        _do("stream-status 429 200"),
        why="TorchServe closes the connection after the head of the reply; here the stream is complete",
    ),
    Case(
        "an error code in an intermediate response, and the next request",
        (_do("code 429"), _do("value str")),
        why="TorchServe's worker dies at the handler's next response; here that response is dropped",
    ),
    Case(
        "an error after the first piece",
        _do("stream-raise"),
        why="here only the last chunk is missing, after all pieces that were sent; TorchServe resets the connection",
    ),
)


def _batch(first: str, second: str) -> tuple[str, str]:
    return f"curl /predictions/batch -d data={first}", f"curl /predictions/batch -d data={second}"


def _twice(line: str) -> tuple[str, str]:
    return line, line


BATCHES = (
    Case("a batch", _batch("a", "b"), together=True),
    Case("a batch that streams", _batch("stream-a", "stream-b"), together=True),
    Case("a batch in which one request makes the handler raise", _batch("a", "raise"), together=True, why=_ALONE),
    Case("a batch with one result too few", _batch("a", "short"), together=True, why=_ALONE),
    Case("a batch in which one request gets its own status", _batch("a", "status"), together=True),
    Case("a batch that is not full", "curl /predictions/batch -d data=alone"),
    Case("a sequence", _twice("curl /predictions/stateful -H 'ts_request_sequence_id: s' -d data=2")),
    Case("a request without a sequence", "curl /predictions/stateful -d data=5"),
    Case("one sequence too many", "curl /predictions/stateful -d data=6", why=SAID),
)
FAULTS = (
    Case("a worker that dies, and the next request", (_do("die"), _do("value str")), why=_DEAD),
    Case(
        "a `SystemExit`, and the next request", (_do("raise exit"), _do("value str")), why="here the worker survives it"
    ),
    Case(
        "a request that takes longer than `responseTimeout`, and the next request",
        (_do("sleep 8", "short"), _do("value str", "short")),
        why="504 is the status of a timeout; here the worker is replaced, too",
    ),
    Case(
        "a request that waits longer than `clientTimeoutInMills`",
        _twice(_do("sleep 3", "impatient").replace("curl", "curl -m 10", 1)),
        together=True,
        why="TorchServe drops the request, and its client waits for ever",
    ),
    Case("no free worker with `useJobTicket`", _twice(_do("sleep 3", "ticket")), together=True, why=SAID),
)
