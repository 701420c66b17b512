"""A runtime that is not ours, and that ours must not disturb. Copied into a test's folder, where MLServer finds it."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import Request, Response
from mlserver import MLModel
from mlserver.codecs import StringCodec
from mlserver.errors import MLServerError
from mlserver.handlers import custom_handler
from mlserver.types import InferenceRequest, InferenceResponse


class Foreign(MLModel):  # type: ignore[misc]
    """Answers with the words it was sent, twice on a stream; the word "fail" makes it fail."""

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        words = [word for tensor in payload.inputs for word in StringCodec.decode_input(tensor)]
        if "fail" in words:
            raise MLServerError("asked to fail", 418)
        outputs = [StringCodec.encode_output("echo", words)]
        return InferenceResponse(model_name=self.name, model_version=self.version, outputs=outputs)

    @custom_handler(rest_path="/v1/own")  # type: ignore[untyped-decorator]
    async def own(self, request: Request) -> Response:
        return Response(await request.body(), media_type="text/plain")

    async def predict_stream(self, payloads: AsyncIterator[InferenceRequest]) -> AsyncIterator[InferenceResponse]:
        async for payload in payloads:
            yield await self.predict(payload)
            yield await self.predict(payload)
