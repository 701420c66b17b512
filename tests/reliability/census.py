"""A runtime that is not ours and counts the tasks of the server's event loop. Copied into a test's folder.

Knows nothing of the other models; it counts what they leave on the loop.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter

from mlserver import MLModel
from mlserver.codecs import StringCodec
from mlserver.types import InferenceRequest, InferenceResponse


class Census(MLModel):  # type: ignore[misc]
    """Answers with a line for each kind of task: how many there are, and their coroutine's name."""

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        gc.collect()  # what waits for it only is no leak
        kinds = Counter(getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks())
        lines = [f"{count} {kind}" for kind, count in sorted(kinds.items())]
        return InferenceResponse(model_name=self.name, outputs=[StringCodec.encode_output("tasks", lines)])
