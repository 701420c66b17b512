"""The handlers of the compared model store, as source. Both servers run them unchanged."""

from __future__ import annotations

# Says what it has got: the kind and the value of each field, its content type, and some headers.
ECHO = """
def shown(value):
    if isinstance(value, (bytes, bytearray)):
        text = bytes(value[:40]).decode("latin-1")
        return [type(value).__name__, text if len(value) <= 40 else f"{text}... {len(value)} bytes"]
    return [type(value).__name__, value]

def handle(data, context):
    if data is None:
        return None
    row = data[0]
    names = [*row, "x-own", "X-Capitals", "explain", "url_path", "ts_request_sequence_id"]
    headers = {name: context.get_request_header(0, name) for name in names}
    version = context.manifest["model"]["modelVersion"]
    answer = {"data": {name: shown(value) for name, value in row.items()}, "version": version}
    return [{**answer, "headers": {name: value for name, value in headers.items() if value}}]
"""

# Does what the text of the body says.
DO = """
import json
import os
import time
from ts.handler_utils.utils import send_intermediate_predict_response as send
from ts.service import PredictionException

VALUES = {
    "str": "text", "unicode": "Gr\\u00fc\\u00dfe", "bytes": b"\\x89PNG\\xff", "bytearray": bytearray(b"ab"), "int": 7,
    "float": 2.5, "bool": True, "none": None, "dict": {"a": [1, {"b": None}], "c": "\\u00fc"}, "list": [1, "two"],
    "empty-str": "", "empty-dict": {}, "nan": float("nan"), "set": {1}, "tuple": (1, 2),
}

def value(name):
    if name.startswith("tensor"):
        import torch
        return {"tensor": torch.ones(2), "tensor-in-a-dict": {"x": torch.ones(2)}}[name]
    if name == "numpy":
        import numpy
        return numpy.ones(2)
    return VALUES[name]

def status(code, phrase, body, context, kind="text/plain"):
    context.set_response_status(int(code), phrase, 0)
    context.set_response_content_type(0, kind)
    return [body]

def stream(pieces, context, headers=()):
    for name, text in headers:
        context.set_response_header(0, name, text)
    for piece in pieces:
        send([piece], context.request_ids, "Intermediate Prediction success", 200, context)
        time.sleep(0.3)
    return ["last"]

def handle(data, context):
    if data is None:
        return None
    body = data[0].get("body") or data[0].get("data")
    words = bytes(body).decode().split() if isinstance(body, (bytes, bytearray)) else str(body).split()
    what, rest = words[0], words[1:]
    if what == "value":
        return [value(rest[0])]
    if what == "not-a-list":
        return "text"
    if what == "two-results":
        return ["one", "two"]
    if what == "no-result":
        return []
    if what == "raise":
        raise {"value": ValueError, "memory": MemoryError, "exit": SystemExit}[rest[0]]("as asked")
    if what == "cuda":
        raise RuntimeError("CUDA out of memory")
    if what == "prediction-exception":
        raise PredictionException("as asked", *map(int, rest))
    if what == "status":
        return status(rest[0], " ".join(rest[1:]), "the body", context)
    if what == "all-status":
        context.set_all_response_status(code=202, phrase="Accepted")
        return ["the body"]
    if what == "type":
        context.set_response_content_type(0, rest[0])
        return ['{"a": 1}']
    if what == "header":
        context.set_response_header(0, rest[0], " ".join(rest[1:]))
        return ["x"]
    if what == "stream":
        return stream(rest, context)
    if what == "stream-json":
        return stream([{"token": 1}, [2], 3], context)
    if what == "stream-bytes":
        return stream([b"\\xff\\x00", "Gr\\u00fc\\u00dfe"], context)
    if what == "stream-typed":
        context.set_response_content_type(0, "text/event-stream")
        return stream(["data: 1"], context, [("x-mine", "yes")])
    if what == "stream-status":  # those of the intermediate responses, and of the last one
        for code in rest[:-1]:
            context.set_response_status(int(code), "Own", 0)
            send([code], context.request_ids, "ok", 200, context)
            time.sleep(0.3)
        return status(rest[-1], "Own", "last", context)
    if what == "code":
        send(["lost"], context.request_ids, "enough", int(rest[0]), context)
        time.sleep(0.3)
        return ["ignored"]
    if what == "stream-raise":
        stream(["first"], context)
        raise ValueError("after the first piece")
    if what == "die":
        os._exit(9)
    if what == "sleep":
        time.sleep(float(rest[0]))
        return ["slept"]
    raise KeyError(what)
"""

# A batch: each member answers for itself, some of them spoil it.
BATCH = """
from ts.handler_utils.utils import send_intermediate_predict_response as send

def handle(data, context):
    if data is None:
        return None
    texts = [bytes(row.get("body") or row.get("data")).decode() for row in data]
    if "raise" in texts:
        raise ValueError("one of the batch")
    if "short" in texts:
        return texts[:-1]
    if "status" in texts:
        place = texts.index("status")
        context.set_response_status(418, "I am a teapot", place)
    if all(text.startswith("stream") for text in texts):
        for step in range(2):
            send([f"{text}-{step} " for text in texts], context.request_ids, "ok", 200, context)
    return [f"{text} of {len(texts)}" for text in texts]
"""

# Behind an envelope: ``data`` is what that has made of the requests.
ENVELOPED = """
def handle(data, context):
    if data is None:
        return None
    return [{"got": bytes(row).decode() if isinstance(row, (bytes, bytearray)) else row} for row in data]
"""

# A class with BaseHandler's interface, as most archives have.
CLASS = """
from ts.torch_handler.base_handler import BaseHandler

class Doubling(BaseHandler):
    def initialize(self, context):
        self.initialized = True

    def preprocess(self, data):
        values = [row.get("data") or row.get("body") for row in data]
        return [float(value if isinstance(value, str) else bytes(value)) for value in values]

    def inference(self, numbers, *args, **kwargs):
        return [2 * number for number in numbers]

    def postprocess(self, numbers):
        return [{"doubled": number} for number in numbers]

    def explain_handle(self, numbers, data):
        return [{"explained": number} for number in numbers]
"""

# One state for each sequence of requests.
STATEFUL = """
from collections import defaultdict

SUMS = defaultdict(int)

def handle(data, context):
    if data is None:
        return None
    answers = []
    for place, row in enumerate(data):
        sequence = context.get_sequence_id(place)
        SUMS[sequence] += int(bytes(row.get("data") or row.get("body")))
        started = context.get_request_header(place, "ts_request_sequence_start")
        shown = "made up" if str(sequence).startswith("ts-seq-") else sequence
        answers.append({"sequence": shown, "start": started, "sum": SUMS[sequence]})
    return answers
"""
