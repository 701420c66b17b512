"""Reads ``{"instances": […]}`` and writes ``{"predictions": […]}``, as TensorFlow Serving does."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Any

from ts.torch_handler.request_envelope.base import BaseEnvelope


class JSONEnvelope(BaseEnvelope):
    """TorchServe's envelope ``json``: the instances of all requests of a batch go to the handler as one list."""

    def parse_input(self, data: Any) -> Any:
        rows = [self._instances(row) for row in data]
        self._lengths = [len(row) for row in rows]
        return [instance for row in rows for instance in row]

    def format_output(self, data: Any) -> Any:
        results = iter(data)
        return [json.dumps({"predictions": [next(results) for _ in range(length)]}) for length in self._lengths]

    @staticmethod
    def _instances(row: Any) -> list[Any]:
        body = row.get("data") or row.get("body") or row
        if isinstance(body, (bytes, bytearray)):
            body = json.loads(body)
        return [_decoded(instance) for instance in body["instances"]]


def _decoded(instance: Any) -> Any:
    if not isinstance(instance, dict):
        return instance
    if list(instance) == ["b64"]:
        return b64decode(instance["b64"])
    return {
        key: b64decode(value["b64"]) if isinstance(value, dict) and list(value) == ["b64"] else value
        for key, value in instance.items()
    }
