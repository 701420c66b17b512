"""A runtime like MLServer's own streaming example, copied into a folder where MLServer finds it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from mlserver import MLModel
from mlserver.codecs import StringCodec
from mlserver.types import InferenceRequest, InferenceResponse


class TextModel(MLModel):  # type: ignore[misc]
    """Answers with the words of a text one by one; all but the first begin with a space."""

    async def predict_stream(self, payloads: AsyncIterator[InferenceRequest]) -> AsyncIterator[InferenceResponse]:
        payload, *_ = [each async for each in payloads]
        words = StringCodec.decode_input(payload.inputs[0])[0].split(" ")
        for place, word in enumerate(words):
            await asyncio.sleep(0.01)
            text = f" {word}" if place else word
            output = StringCodec.encode_output(name="output", payload=[text], use_bytes=True)
            yield InferenceResponse(model_name=self._settings.name, outputs=[output])
