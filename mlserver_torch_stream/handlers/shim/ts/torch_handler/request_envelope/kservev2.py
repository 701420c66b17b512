"""Reads the inputs of a request in KServe's V2 protocol, and writes outputs with the names of the inputs."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from ts.torch_handler.request_envelope.base import BaseEnvelope

_DATATYPES = {
    "bool": "BOOL",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
    **{f"{sign}int{bits}": f"{sign.upper()}INT{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}


class KServev2Envelope(BaseEnvelope):
    """TorchServe's envelope ``kservev2``: data keep the request's shape, but BYTES are cut to their first element."""

    def parse_input(self, data: Any) -> Any:
        body = data[0].get("data") or data[0].get("body")
        request = json.loads(body) if isinstance(body, (bytes, bytearray)) else body
        for tensor in request["inputs"]:
            given = tensor["data"]
            tensor["data"] = (
                given[0] if tensor["datatype"] == "BYTES" else np.array(given).reshape(tensor["shape"]).tolist()
            )
        self._names = [tensor["name"] for tensor in request["inputs"]]
        self._id = (request.get("id") or "").strip() or None
        return request["inputs"]

    def format_output(self, data: Any) -> Any:
        model = self.context.manifest["model"]
        return [
            {
                "id": self._id or self.context.get_request_id(0),
                "model_name": model.get("modelName"),
                "model_version": model.get("modelVersion"),
                "outputs": [self._output(name, item) for name, item in zip(self._names, data)],
            }
        ]

    @staticmethod
    def _output(name: str, item: Any) -> dict[str, Any]:
        flat = np.array(item).flatten()
        datatype = _DATATYPES.get(str(flat.dtype), "BYTES")
        return {"name": name, "datatype": datatype, "data": flat.tolist(), "shape": flat.shape}
