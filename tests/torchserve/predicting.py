"""One server for all tests of TorchServe's inference paths that do not disturb it, and its handlers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.server.harness import Model, Server, serve
from tests.torchserve.workshop import HELLO, write_handler

TORCHSERVE = "mlserver_torch_stream.TorchServeRuntime"
SHIM = {"ts": "shim"}
SETTINGS = {"debug": False, "parallel_workers": 0, "gzip_enabled": False}
MAX_BYTES = 100_000  # of a body
_PREFIX = "MLSERVER_TORCH_STREAM"

# Says what it has got, or does what the text says.
ECHO = """
import time
from ts.handler_utils.utils import send_intermediate_predict_response as send
from ts.service import PredictionException

def shown(value):
    return ["bytearray", value.decode("latin-1")] if isinstance(value, bytearray) else [type(value).__name__, value]

def handle(data, context):
    if data is None:
        return None
    row = data[0]
    text = row.get("body", b"")
    text = bytes(text).decode("latin-1") if isinstance(text, bytearray) else text
    if text == "created":
        context.set_response_status(201, "Created", 0)
        context.set_response_content_type(0, "image/png")
        context.set_response_header(0, "X-Mine", "yes")
        context.set_response_header(0, "Content-Length", "3")
        return [b"\\x89PNG"]
    if text == "nothing":
        context.set_response_status(204, "No Content", 0)
        return [b"ignored"]
    if text == "teapot":
        context.set_response_status(404, "Not here", 0)
        context.set_response_content_type(0, "text/plain")
        return ["no such pot"]
    if text == "split":
        context.set_response_header(0, "x-mine", "a\\r\\nset-cookie: b")
        return ["x"]
    if text == "slow":
        time.sleep(1.5)
        return ["slow"]
    if text == "raise":
        raise ValueError("as asked")
    if text == "exception":
        raise PredictionException("no such thing", 404)
    if text == "memory":
        raise MemoryError
    if text == "late":
        send(["first"], context.request_ids, "ok", 200, context)
        raise ValueError("after the first piece")
    statuses = {"206 at first": (206, 202), "204 at first": (204, 202), "503 at last": (200, 503)}
    if text in list(statuses):
        first, last = statuses[text]
        for number, status in enumerate((first, 299)):
            context.set_response_status(status, "Own", 0)
            send([f"piece {number}"], context.request_ids, "ok", 200, context)
        context.set_response_status(last, "Own", 0)
        return ["the end"]
    if str(text).startswith("code "):
        send(["lost"], context.request_ids, "enough", int(text.split()[1]), context)
        send(["ignored"], context.request_ids, "ok", 200, context)
        return ["ignored"]
    if text == "late code":
        send(["first"], context.request_ids, "ok", 200, context)
        send(["lost"], context.request_ids, "enough", 429, context)
        return ["ignored"]
    if text == "pieces":
        context.set_response_content_type(0, "text/plain")
        for piece in ("one", "", b"\\xff\\x00", {"three": 3}):
            send([piece], context.request_ids, "ok", 200, context)
            time.sleep(0.05)
        return ["last"]
    if text in ("endless", "flood"):
        while True:
            send(["piece" * (1 if text == "endless" else 100000)], context.request_ids, "ok", 200, context)
            time.sleep(0.01)
    names = ("explain", "url_path", "x-own", "X-Own", "ts_request_sequence_id")
    kinds = {name: (context.get_request_header(0, name) or {}).get("content-type") for name in row}
    return [{
        "data": {name: shown(value) for name, value in row.items()},
        "kinds": kinds,
        "headers": {name: context.get_request_header(0, name) for name in names},
        "id": context.get_request_id(0),
    }]
"""

# Answers as TorchServe's vllm_handler does: the same paths, the same framing of events, no content type.
SPEAKER = """
import json
from ts.handler_utils.utils import send_intermediate_predict_response as send
from ts.service import PredictionException

def chunk(chat, text):
    piece = {"delta": {"content": text}} if chat else {"text": text}
    return {"id": "1", "created": 1, "model": "m", "object": "chat.completion.chunk" if chat else "text_completion",
            "choices": [{"index": 0, "finish_reason": None, "logprobs": None, **piece}]}

async def answer(data, context):
    path = context.get_request_header(0, "url_path")
    body = data[0].get("body")
    if path == "v1/models":
        return [{"object": "list", "data": [{"id": "served", "object": "model", "created": 1, "owned_by": "me"}]}]
    if path not in ("v1/chat/completions", "v1/completions"):
        raise PredictionException(f"Unknown API endpoint: {path}", 404)
    chat = path == "v1/chat/completions"
    if not body.get("stream"):
        whole = chunk(chat, "one two")
        if chat:
            whole["object"] = "chat.completion"
            whole["choices"][0]["message"] = {"role": "assistant", **whole["choices"][0].pop("delta")}
        return [whole]
    for text in ("one", " two"):
        send([f"data: {json.dumps(chunk(chat, text))}\\n\\n"], context.request_ids, "Result", 200, context)
    return ["data: [DONE]\\n\\n"]

class Speaker:
    def initialize(self, context):
        pass

    async def handle(self, data, context):
        return await answer(data, context)
"""

# Adds to a metric of each type, two of them with a dimension of its own.
METERED = """
from ts.metrics.dimension import Dimension
from ts.metrics.metric_type_enum import MetricTypes

def handle(data, context):
    if data is None:
        return None
    for index in range(len(data)):
        context.metrics.add_counter("Calls", 1, index, [Dimension("Kind", "test")])
        context.metrics.add_counter("calls_total", 1, index)
        context.metrics.add_time("HandlerTime", 7, index)
        context.metrics.add_metric("Sizes", 0.5, "MB", index, [], MetricTypes.HISTOGRAM)
    return ["x"] * len(data)
"""


@contextmanager
def serve_predictions(folder: Path, tiny_model: Path) -> Iterator[Server]:
    def handler(name: str, source: str, version: str | None = None, **config: object) -> Model:
        uri = write_handler(folder / name, source, config)
        return Model(name, uri, implementation=TORCHSERVE, extra=SHIM, version=version)

    models = [
        handler("hello", HELLO, "1.0"),
        handler("echo", ECHO),
        handler("assistant", ECHO, "1.0"),
        handler("speaker", SPEAKER, "1.0", asyncCommunication=True),
        handler("older", SPEAKER, "v1", asyncCommunication=True),
        handler("metered", METERED, batchSize=4, minWorkers=2, maxBatchDelay=5),
        Model("tokens", str(tiny_model), version="1.0"),
    ]
    environment = {
        f"{_PREFIX}_MAX_BODY_BYTES": str(MAX_BYTES),
        f"{_PREFIX}_STALLED_READER_TIMEOUT": "2",
        f"{_PREFIX}_TORCHSERVE_METRIC_NAMES": "true",
    }
    with serve(folder / "models", models, settings=SETTINGS, environment=environment) as running:
        yield running
