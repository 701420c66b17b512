"""Reads the instances of a request in KServe's V1 protocol, and writes its predictions or explanations."""

from __future__ import annotations

import json
from typing import Any

from ts.torch_handler.request_envelope.base import BaseEnvelope


class KServeEnvelope(BaseEnvelope):
    """TorchServe's envelope ``kserve``: KServe's V1 protocol, ``instances`` in and ``predictions`` out."""

    def parse_input(self, data: Any) -> Any:
        body = data[0].get("data") or data[0].get("body")
        return (json.loads(body) if isinstance(body, (bytes, bytearray)) else body).get("instances")

    def format_output(self, data: Any) -> Any:
        explained = self.context is not None and self.context.get_request_header(0, "explain") == "True"
        return [{"explanations" if explained else "predictions": data}]
