"""An API in at most 60 lines, added only through the interface: its own path, errors, usage message and end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlserver_torch_stream.errors import InvalidInput, RequestError
from mlserver_torch_stream.protocol.spelling import (
    CollectedReply,
    JsonObject,
    PostedBody,
    ReplyContext,
    Spelling,
    StreamProgress,
)
from mlserver_torch_stream.protocol.spellings import REST_ROUTES, RestRoute
from mlserver_torch_stream.runtime import TorchStreamRuntime
from mlserver_torch_stream.types import GenerationRequest, ModelInfo, SamplingParameters, TextPrompt, TokenEvent


class TrialSpelling(Spelling):
    def model(self, path: Mapping[str, str], body: Mapping[str, Any]) -> tuple[str, str | None]:
        return str(body.get("model")), None

    def streams(self, body: Mapping[str, Any]) -> bool:
        return body.get("live") is True

    def decode(self, posted: PostedBody, info: ModelInfo, *, streaming: bool, request_id: str) -> GenerationRequest:
        if not isinstance(posted.json.get("say"), str):
            raise InvalidInput("say", "must be a string")
        sampling = SamplingParameters(max_tokens=int(posted.json.get("limit", 5)), ignore_eos=True)
        return GenerationRequest(request_id, (TextPrompt(posted.json["say"]),), sampling)

    def stream(self, request: GenerationRequest, context: ReplyContext) -> TrialStream:
        return TrialStream(request, context.request_index)

    def whole(self, request: GenerationRequest, context: ReplyContext) -> TrialWhole:
        return TrialWhole(request)

    def refusal(self, error: RequestError) -> tuple[int, JsonObject]:
        status = 400 if error.status == 422 else error.status
        return status, {"problem": {"what": error.message, "where": error.field}}


class TrialStream(StreamProgress):
    def event(self, event: TokenEvent) -> Sequence[JsonObject]:
        final = self.describe(event, {})
        message = {"problem": {"what": str(event.error)}} if event.error else {"piece": event.text}
        return (message, {"used": self.usage.completion_tokens}) if final and not event.error else (message,)

    def fail(self, error: Exception) -> Sequence[JsonObject]:
        return [message for ending in self.endings(error) for message in self.event(ending)]

    def end(self) -> bytes | None:
        return None if self.error else b"[FIN]"


class TrialWhole(CollectedReply):
    def body(self) -> JsonObject:
        return {"pieces": [choice.text for choice in self.choices()]}


class TrialRuntime(TorchStreamRuntime):
    rest_routes = (*REST_ROUTES, RestRoute("/trial/chat", None, (TrialSpelling(),)))
