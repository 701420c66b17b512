"""A foreign runtime that tells how many tasks the server's event loop has. Copied into a test's folder.

Knows nothing of the models beside it: what they leave behind on the loop it finds there.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter

from mlserver import MLModel
from mlserver.codecs import StringCodec
from mlserver.types import InferenceRequest, InferenceResponse


class Census(MLModel):  # type: ignore[misc]
    """Answers with one line per kind of task: its count and its coroutine's name."""

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        gc.collect()  # what waits for it only is no leak
        kinds = Counter(getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks())
        lines = [f"{count} {kind}" for kind, count in sorted(kinds.items())]
        return InferenceResponse(model_name=self.name, outputs=[StringCodec.encode_output("tasks", lines)])
