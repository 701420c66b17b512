"""Reads and writes Anthropic's Messages API: streamed and whole messages, errors, and token counts of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlserver_torch_stream.errors import RequestError
from mlserver_torch_stream.protocol.anthropic_models import CountTokensRequest, MessagesRequest
from mlserver_torch_stream.protocol.anthropic_request import chat_body, own_name
from mlserver_torch_stream.protocol.anthropic_stream import MessagesStream, MessagesWhole, error_body
from mlserver_torch_stream.protocol.bodies import Body
from mlserver_torch_stream.protocol.custom_tools import without_hosted
from mlserver_torch_stream.protocol.openai_request import MESSAGES
from mlserver_torch_stream.protocol.openai_spelling import OpenAISpelling
from mlserver_torch_stream.protocol.spelling import (
    JsonObject,
    PostedBody,
    PromptCodec,
    PromptSpelling,
    ReplyContext,
    StreamEncoder,
    WholeEncoder,
)
from mlserver_torch_stream.types import GenerationRequest, ModelInfo


class AnthropicMessages(OpenAISpelling):
    """Reads and writes ``/v1/messages``. The events of a stream have names, and no ``[DONE]`` follows them."""

    prompt = MESSAGES
    body: type[Body] = MessagesRequest
    event_name_field = "type"
    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def headers(self, request_id: str) -> Mapping[str, str]:
        return {**super().headers(request_id), "request-id": request_id}

    def decode(self, posted: PostedBody, info: ModelInfo, *, streaming: bool, request_id: str) -> GenerationRequest:
        body, _ = without_hosted(posted.json, ("custom",))
        request = super().decode(replace(posted, json=body), info, streaming=streaming, request_id=request_id)
        if request.constraint is not None:  # the engine's refusal names the client's field
            request = replace(request, constraint=replace(request.constraint, field=own_name(request.constraint.field)))
        return request

    def stream(self, request: GenerationRequest, context: ReplyContext) -> StreamEncoder:
        return MessagesStream(request, context)

    def whole(self, request: GenerationRequest, context: ReplyContext) -> WholeEncoder:
        return MessagesWhole(request, context)

    def refusal(self, error: RequestError) -> tuple[int, JsonObject]:
        return error_body(error)

    def _own_name(self, field: str) -> str:
        return own_name(field)

    def _asked(self, taken: Mapping[str, Any], info: ModelInfo) -> Mapping[str, Any]:
        return chat_body(taken, info)


class AnthropicTokenCount(PromptSpelling, AnthropicMessages):
    """Reads and writes ``/v1/messages/count_tokens``, which counts the tokens of messages, tools and system prompt."""

    body = CountTokensRequest

    def answer(self, request: GenerationRequest, codec: PromptCodec, info: ModelInfo) -> JsonObject:
        return {"input_tokens": sum(len(codec.encode(prompt)) for prompt in request.prompts)}


ANTHROPIC_MESSAGES = AnthropicMessages()
ANTHROPIC_SPELLINGS: Mapping[str, OpenAISpelling] = {
    "/v1/messages": ANTHROPIC_MESSAGES,
    "/v1/messages/count_tokens": AnthropicTokenCount(),
}
