"""Reads and writes vLLM's ``/tokenize``, which returns the ids of a prompt, and ``/detokenize``, which returns the text
of ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from annotated_types import MinLen

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.bodies import FAIL_FAST, SPENDS, Body, JsonObject, NonEmpty, Refused, TokenIds
from mlserver_torch_stream.protocol.chat import ChatMessage, FunctionTools
from mlserver_torch_stream.protocol.openai_request import MESSAGES, PROMPT
from mlserver_torch_stream.protocol.openai_spelling import OpenAIChat, OpenAISpelling
from mlserver_torch_stream.protocol.spelling import PostedBody, PromptCodec, PromptSpelling
from mlserver_torch_stream.types import GenerationRequest, ModelInfo, TokensPrompt

_STRINGS, _TOKENS = "return_token_strs", "tokens"


class OptionallyNamedModel(Body):
    """A body in which ``model`` may be omitted if the server has only one model that generates tokens."""

    model: NonEmpty | None = None
    model_version: NonEmpty | None = None


class TokenizeRequest(OptionallyNamedModel):
    """The body of ``/tokenize``: a text or a conversation."""

    prompt: NonEmpty | None = None
    messages: Annotated[list[ChatMessage], MinLen(1), FAIL_FAST, SPENDS] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    tools: FunctionTools | None = None
    return_token_strs: bool | None = None
    chat_template: Annotated[Any, Refused()] = None
    media_io_kwargs: Annotated[Any, Refused(({},))] = None
    mm_processor_kwargs: Annotated[Any, Refused(({},))] = None


class DetokenizeRequest(OptionallyNamedModel):
    """The body of ``/detokenize``."""

    tokens: Annotated[TokenIds, MinLen(1)]


class Tokenize(PromptSpelling, OpenAIChat):
    """Reads and writes ``/tokenize``, which returns the token ids of a prompt or a conversation, as in vLLM."""

    body: type[Body] = TokenizeRequest

    def model(self, path: Mapping[str, str], body: Mapping[str, Any]) -> tuple[str, str | None]:
        """Returns the model's name; an empty name means the server's only model."""
        return ("", None) if body.get("model") is None else super().model(path, body)

    def decode(self, posted: PostedBody, info: ModelInfo, *, streaming: bool, request_id: str) -> GenerationRequest:
        request = super().decode(posted, info, streaming=streaming, request_id=request_id)
        repeated = {_STRINGS: bool(posted.json.get(_STRINGS))}
        return replace(request, reply=replace(request.reply, repeated=repeated))

    def answer(self, request: GenerationRequest, codec: PromptCodec, info: ModelInfo) -> JsonObject:
        ids = list(codec.encode(request.prompts[0]))
        strings = list(codec.token_strings(ids)) if request.reply.repeated[_STRINGS] else None
        return {"count": len(ids), "max_model_len": info.max_model_len, "tokens": ids, "token_strs": strings}

    def _asked(self, taken: Mapping[str, Any], info: ModelInfo) -> Mapping[str, Any]:
        if PROMPT in taken and MESSAGES in taken:
            raise InvalidInput(PROMPT, f"cannot be combined with {MESSAGES}: give only one of them")
        if PROMPT not in taken and MESSAGES not in taken:
            raise InvalidInput(PROMPT, f"is needed, unless {MESSAGES} is given")
        return {key: value for key, value in taken.items() if key != _STRINGS}


class Detokenize(Tokenize):
    """Reads and writes ``/detokenize``, which returns the text of token ids, as in vLLM."""

    body = DetokenizeRequest

    def answer(self, request: GenerationRequest, codec: PromptCodec, info: ModelInfo) -> JsonObject:
        (prompt,) = request.prompts
        assert isinstance(prompt, TokensPrompt)
        return {"prompt": codec.decode(prompt.token_ids, skip_special_tokens=False)}

    def _own_name(self, field: str) -> str:
        return field.replace(PROMPT, _TOKENS, 1) if field.startswith(PROMPT) else field

    def _asked(self, taken: Mapping[str, Any], info: ModelInfo) -> Mapping[str, Any]:
        return {PROMPT: taken[_TOKENS]}


TOKENIZE_SPELLINGS: Mapping[str, OpenAISpelling] = {"/tokenize": Tokenize(), "/detokenize": Detokenize()}
