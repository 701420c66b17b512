"""Infers whole objects, or chunks of them, with a server of the V2 protocol: each is a BYTES tensor of raw bytes.

Knows V2's binary tensor data extension. Knows nothing of objects and outputs.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from mlserver_torch_stream.cli.answers_http import parse
from mlserver_torch_stream.cli.infer_http import HttpInfer, unreadable_answer
from mlserver_torch_stream.cli.object_row import AnswerTooLarge, ObjectRequest, PieceCollector, answer_too_large
from mlserver_torch_stream.cloud.chunk_join import PREDICTIONS
from mlserver_torch_stream.cloud.rows import Outcome, Row

_JSON_BYTES = "Inference-Header-Content-Length"


@dataclass
class TensorInfer(HttpInfer):
    """The prediction for a request is the list of its output tensors."""

    tensor: str = "body"
    request: ObjectRequest = field(default_factory=ObjectRequest)

    async def _one(self, row: Row) -> Outcome:
        raw = len(row.data).to_bytes(4, "little") + row.data
        tensor: dict[str, Any] = {"name": self.tensor, "shape": [1], "datatype": "BYTES"}
        tensor["parameters"] = {"binary_data_size": len(raw), "content_type": self.request.content_type(row)}
        head = json.dumps({"parameters": self.request.all_headers(row), "inputs": [tensor]}).encode()
        return await self._tried(lambda alone: self._tensor_attempt(len(head), head + raw, alone))

    async def _tensor_attempt(self, head: int, content: bytes, alone: bool) -> Outcome:
        path = f"/v2/models/{quote(self.model, safe='')}/infer"
        headers = {"Content-Type": "application/octet-stream", _JSON_BYTES: str(head)}
        async with self.gate.through(alone) as started:
            began, pieces = time.monotonic(), PieceCollector()
            async with self._answered(started, path, content, headers) as response:
                try:
                    async for part in response.aiter_bytes():
                        pieces.add(part, "")
                except AnswerTooLarge as error:
                    return answer_too_large(error)
        outputs = _outputs(b"".join(part for part, _ in pieces.found))
        body = {"object": "prediction", "content_type": "application/json", PREDICTIONS: [outputs]}
        return Outcome(body, span=(began, time.monotonic()))


def _outputs(answer: bytes) -> list[dict[str, Any]]:
    """Raises RowFailed."""
    try:
        return [
            {key: tensor[key] for key in ("name", "datatype", "shape", "parameters", "data") if key in tensor}
            for tensor in parse(answer)["outputs"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise unreadable_answer(error) from None
