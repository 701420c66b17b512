"""Reads and writes OpenAI's chat completions, completions and responses: requests, streamed and whole replies, and
errors.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter

from mlserver_torch_stream.errors import InvalidInput, RequestError
from mlserver_torch_stream.protocol import v2_names as names
from mlserver_torch_stream.protocol.bodies import Body, taken_values, validate
from mlserver_torch_stream.protocol.custom_tools import without_hosted
from mlserver_torch_stream.protocol.openai_models import (
    TOOL_KINDS,
    ChatCompletionRequest,
    CompletionRequest,
    ModelResponseRequest,
    NamedModel,
)
from mlserver_torch_stream.protocol.openai_objects import ChatCompletion, TextCompletion
from mlserver_torch_stream.protocol.openai_request import MESSAGES, PROMPT, decode_body
from mlserver_torch_stream.protocol.openai_stream import (
    ChatStream,
    CompletionStream,
    OpenAIWhole,
    error_object,
    openai_status,
)
from mlserver_torch_stream.protocol.request_options import MAX_ID_CHARACTERS, read_client
from mlserver_torch_stream.protocol.responses_objects import repeated_values
from mlserver_torch_stream.protocol.responses_request import INPUT, chat_body, own_name
from mlserver_torch_stream.protocol.responses_stream import ResponsesStream, ResponsesWhole
from mlserver_torch_stream.protocol.spelling import (
    NO_HEADERS,
    JsonObject,
    PostedBody,
    ReplyContext,
    Spelling,
    StreamEncoder,
    WholeEncoder,
)
from mlserver_torch_stream.protocol.values import NOT_IMPLEMENTED, most_checked, refuse_left_over
from mlserver_torch_stream.types import ChatPrompt, GenerationRequest, ModelInfo

REQUEST_ID = "x-request-id"
_MODEL = "model"
_MODEL_VERSION = "model_version"
_STREAM = "stream"
_STREAM_OPTIONS = "stream_options"
_PROMPT_LOGPROBS = "prompt_logprobs"
_NAMED_MODEL = TypeAdapter(NamedModel)
_READ_HERE = (_MODEL, _MODEL_VERSION, _STREAM, _STREAM_OPTIONS)


class OpenAISpelling(Spelling):
    """The common base of OpenAI's endpoints. ``prompt`` is the name of the parameter that holds the prompt."""

    prompt: str
    body: type[Body]

    def model(self, path: Mapping[str, str], body: Mapping[str, Any]) -> tuple[str, str | None]:
        if "model_name" in path:
            return super().model(path, body)
        validate("", _NAMED_MODEL, body)
        return body[_MODEL], body.get(_MODEL_VERSION)

    def request_id(self, body: Mapping[str, Any], headers: Mapping[str, str] = NO_HEADERS) -> str:
        """Returns the header ``X-Request-Id``; an empty string if it could not be repeated in the reply's headers."""
        given = headers.get(REQUEST_ID, "")
        return given if len(given) <= MAX_ID_CHARACTERS and given.isascii() and given.isprintable() else ""

    def headers(self, request_id: str) -> Mapping[str, str]:
        return {REQUEST_ID: request_id}

    def decode(self, posted: PostedBody, info: ModelInfo, *, streaming: bool, request_id: str) -> GenerationRequest:
        refuse_left_over(len(posted.raw))
        taken = taken_values(posted.json, self.body, most_checked(info))
        if _STREAM_OPTIONS in taken and not streaming:
            raise InvalidInput(_STREAM_OPTIONS, "needs stream: true")
        said = {name: value for name, value in taken.items() if name not in _READ_HERE}
        asked = self._asked(said, info)
        try:
            return decode_body(
                asked,
                info,
                request_id,
                streaming=streaming,
                stream_options=taken.get(_STREAM_OPTIONS),
                client=read_client(posted.headers),
            )
        except InvalidInput as error:
            if (own := self._own_name(error.field)) == error.field:
                raise
            raise InvalidInput(own, error.reason) from None

    def refusal(self, error: RequestError) -> tuple[int, JsonObject]:
        """Returns status and body.

        The engine's errors contain V2's name for the prompt; it is replaced by the name at this endpoint.
        """
        message, field = error.message, error.field
        if field == names.TEXT_INPUT:
            message, field = message.replace(names.TEXT_INPUT, self.prompt, 1), self.prompt
        status = openai_status(error.status)
        return status, {"error": error_object(status, message, field, error.code)}

    def _own_name(self, field: str) -> str:
        """Returns the name in the client's body of the parameter that ``_asked`` calls ``field``."""
        return field

    @abstractmethod
    def _asked(self, taken: Mapping[str, Any], info: ModelInfo) -> Mapping[str, Any]:
        """Returns the validated parameters in the form of a chat or a completion.

        Raises InvalidInput for parameters that contradict each other, which a schema cannot express.
        """


class OpenAIChat(OpenAISpelling):
    """Reads and writes ``/v1/chat/completions``."""

    prompt = MESSAGES
    body: type[Body] = ChatCompletionRequest

    def stream(self, request: GenerationRequest, context: ReplyContext) -> StreamEncoder:
        return ChatStream(request, context)

    def whole(self, request: GenerationRequest, context: ReplyContext) -> WholeEncoder:
        return OpenAIWhole(request, ChatCompletion(request.request_id, context.model_name, context.created))

    def _asked(self, taken: Mapping[str, Any], info: ModelInfo) -> Mapping[str, Any]:
        if taken.get("top_logprobs") and not taken.get("logprobs"):
            raise InvalidInput("top_logprobs", "needs logprobs: true")
        return taken


class OpenAICompletions(OpenAISpelling):
    """Reads and writes ``/v1/completions``."""

    prompt = PROMPT
    body: type[Body] = CompletionRequest

    def stream(self, request: GenerationRequest, context: ReplyContext) -> StreamEncoder:
        return CompletionStream(request, context)

    def whole(self, request: GenerationRequest, context: ReplyContext) -> WholeEncoder:
        return OpenAIWhole(request, TextCompletion(request.request_id, context.model_name, context.created))

    def _asked(self, taken: Mapping[str, Any], info: ModelInfo) -> Mapping[str, Any]:
        if taken.get("echo") and taken.get("logprobs") is not None:
            return {**taken, _PROMPT_LOGPROBS: taken["logprobs"]}
        return taken

    def refusal(self, error: RequestError) -> tuple[int, JsonObject]:
        """Returns status and body.

        ``prompt_logprobs`` in an error becomes ``echo`` with ``logprobs``, as clients ask.
        """
        status, body = super().refusal(error)
        if error.field == _PROMPT_LOGPROBS and NOT_IMPLEMENTED not in error.message:
            body["error"] |= {
                "param": "echo",
                "message": error.message.replace(_PROMPT_LOGPROBS, "echo with logprobs", 1),
            }
        return status, body


class OpenAIResponses(OpenAISpelling):
    """Reads and writes ``/v1/responses``. The events of a stream have names, and no ``[DONE]`` follows them."""

    prompt = INPUT
    body: type[Body] = ModelResponseRequest
    event_name_field = "type"

    def decode(self, posted: PostedBody, info: ModelInfo, *, streaming: bool, request_id: str) -> GenerationRequest:
        body, left_out = without_hosted(posted.json, TOOL_KINDS)
        posted = replace(posted, json=body)
        request = super().decode(posted, info, streaming=streaming, request_id=request_id)
        constraint = request.constraint
        if constraint is not None:  # the engine's refusal names the client's field
            constraint = replace(constraint, field=own_name(constraint.field))
        warnings = tuple(f"{name} is ignored: hosted tools are not implemented" for name in left_out)
        reply = replace(request.reply, repeated=repeated_values(body), warnings=warnings)
        prompts = tuple(replace(each, field=INPUT) for each in request.prompts if isinstance(each, ChatPrompt))
        return replace(request, prompts=prompts, reply=reply, constraint=constraint)

    def stream(self, request: GenerationRequest, context: ReplyContext) -> StreamEncoder:
        return ResponsesStream(request, context)

    def whole(self, request: GenerationRequest, context: ReplyContext) -> WholeEncoder:
        return ResponsesWhole(request, context)

    def _own_name(self, field: str) -> str:
        return own_name(field)

    def _asked(self, taken: Mapping[str, Any], info: ModelInfo) -> Mapping[str, Any]:
        return chat_body(taken)


OPENAI_CHAT = OpenAIChat()
OPENAI_COMPLETIONS = OpenAICompletions()
OPENAI_RESPONSES = OpenAIResponses()
OPENAI_SPELLINGS: Mapping[str, OpenAISpelling] = {
    "/v1/chat/completions": OPENAI_CHAT,
    "/v1/completions": OPENAI_COMPLETIONS,
    "/v1/responses": OPENAI_RESPONSES,
}
