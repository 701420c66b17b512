"""Reads and writes the flat JSON of Triton's generate extension: a request has ``text_input``, and an event
``text_output``.

The names come from the Open Inference Protocol's generate extension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from mlserver_torch_stream.did_you_mean import nearest_name
from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol import v2_names as names
from mlserver_torch_stream.protocol import values
from mlserver_torch_stream.protocol.openai_objects import finite, token_name
from mlserver_torch_stream.protocol.parameters import SILENT
from mlserver_torch_stream.protocol.request_options import (
    build_request,
    check_id,
    merge_parameters,
    read_client,
    refuse_chat_options,
)
from mlserver_torch_stream.protocol.spelling import (
    CollectedSequence,
    JsonObject,
    PostedBody,
    ReplyContext,
    Spelling,
    StreamEncoder,
    StreamProgress,
    WholeEncoder,
    WholeReply,
    event_values,
    head,
    shown_values,
    totals,
)
from mlserver_torch_stream.protocol.v2_tensors import ALL_BINARY
from mlserver_torch_stream.types import FinishReason, GenerationRequest, ModelInfo, TextPrompt, TokenEvent, TokenLogprob


def whole_details(sequence: CollectedSequence) -> JsonObject:
    """Returns the ``details`` of a whole sequence."""
    reason = _reason(sequence.finish_reason, sequence.stop_reason)
    return {"finish_reason": reason, "logprobs": [_token(entry) for entry in sequence.logprobs]}


def event_details(event: TokenEvent) -> JsonObject:
    """Returns the ``details`` of an event that has at most one token."""
    token = _token(event.logprobs[0]) if event.logprobs else None
    return {"finish_reason": _reason(event.finish_reason, event.stop_reason), "token": token}


def split_by_token(event: TokenEvent) -> Sequence[TokenEvent]:
    """Splits an event into events of one token each; the last one has the whole text."""
    earlier = [TokenEvent(event.index, "", (entry.token_id,), (entry,)) for entry in event.logprobs[:-1]]
    return [*earlier, replace(event, token_ids=event.token_ids[-1:], logprobs=event.logprobs[-1:])]


def _reason(reason: FinishReason | None, stop_reason: int | str | None) -> str | None:
    """Returns the extension's name for a finish reason. Reasons that the extension does not have, such as ``timeout``,
    keep our name.
    """
    if reason is FinishReason.STOP:
        return "eos_token" if stop_reason is None else "stop_sequence"
    return None if reason is None else reason.value


def _token(entry: TokenLogprob) -> JsonObject:
    return {
        "id": entry.token_id,
        "text": token_name(entry.token_id, entry.token),
        "logprob": finite(entry.logprob),
        "special": entry.special,
    }


_ID = "id"
_PARAMETERS = "parameters"
_DETAILS = "details"
_V2_TENSORS = "inputs"
_MAX_KEYS = 32  # keys that are compared with the names of prompts; each comparison takes microseconds
_NO_PARAMETERS = SILENT | {_ID, _PARAMETERS, names.TEXT_INPUT}
_ALWAYS_LISTS = frozenset({names.TOKEN_IDS})


class FlatGenerate(Spelling):
    """Reads and writes flat JSON. Parameters are at the top level or in ``parameters``.

    It accepts every body that has ``text_input`` or does not have V2's list ``inputs``.
    """

    def accepts(self, body: Mapping[str, Any]) -> bool:
        return names.TEXT_INPUT in body or not isinstance(body.get(_V2_TENSORS), list)

    def decode(self, posted: PostedBody, info: ModelInfo, *, streaming: bool, request_id: str) -> GenerationRequest:
        body = posted.json
        values.refuse_left_over(len(posted.raw))
        _check_id(body.get(_ID))
        if names.TEXT_INPUT not in body:
            raise _no_text(body)
        texts = _texts(body[names.TEXT_INPUT], values.most_elements(info.max_model_len))
        parameters = _parameters(body)
        details = values.named(_DETAILS, values.boolean, parameters.pop(_DETAILS, False), info)
        given = merge_parameters(parameters, (), None, info)
        if not texts or not all(texts):
            raise InvalidInput(names.TEXT_INPUT, "the prompt is empty")
        refuse_chat_options(False, given)
        prompts = tuple(TextPrompt(text) for text in texts)
        client = read_client(posted.headers)
        return build_request(request_id, prompts, given, info, streaming=streaming, client=client, details=details)

    def stream(self, request: GenerationRequest, context: ReplyContext) -> StreamEncoder:
        return FlatStreamReply(request, context)

    def whole(self, request: GenerationRequest, context: ReplyContext) -> WholeEncoder:
        return FlatUnaryReply(request, context)


FLAT = FlatGenerate()


class FlatStreamReply:
    """One object for each event of a streamed request."""

    def __init__(self, request: GenerationRequest, context: ReplyContext) -> None:
        self._head = head(context, request.request_id)
        self._progress = StreamProgress(request, context.request_index)
        self._shown = shown_values(request.reply)
        self._details = request.reply.details

    def event(self, event: TokenEvent) -> Sequence[JsonObject]:
        """Returns the objects of one event. With ``details`` there is one object for each token.

        If a sequence has failed, the last object of the request contains its ``error``.
        """
        return [self._object(each) for each in (split_by_token(event) if self._details else (event,))]

    def fail(self, error: Exception) -> Sequence[JsonObject]:
        return [self._object(ending) for ending in self._progress.endings(error)]

    def end(self) -> None:
        """Returns None: a flat stream ends with its last object."""

    def _object(self, event: TokenEvent) -> JsonObject:
        reply = {**self._head, **event_values(event, self._shown)}
        if self._details:
            reply[_DETAILS] = event_details(event)
        final = self._progress.describe(event, reply)
        if final and self._progress.error:
            reply["error"] = self._progress.error
        return reply


class FlatUnaryReply(WholeReply):
    """One object for a whole request. A value with one element is written as that element, all others as a list."""

    def body(self) -> JsonObject:
        reply = head(self._context, self._request.request_id)
        for name, data in self.values(shown_values(self._request.reply)).items():
            reply[name] = data[0] if len(data) == 1 and name not in _ALWAYS_LISTS else data
        if self._request.reply.details:
            details = [whole_details(sequence) for sequence in self.sequences]
            reply[_DETAILS] = details[0] if len(details) == 1 else details
        return {**reply, "chunk_index": 0, "triton_final_response": True, **totals(self.usage)}


def _texts(value: Any, most: int) -> list[str]:
    texts = value if isinstance(value, list) else [value]
    for text in texts:
        if not values.is_text(text):
            raise InvalidInput(names.TEXT_INPUT, f"must be a string or a list of strings, got {values.shown(text)}")
    if len(texts) > most:
        raise InvalidInput(names.TEXT_INPUT, f"must have at most {most} elements, got {len(texts)}")
    return texts


def _no_text(body: Mapping[str, Any]) -> InvalidInput:
    """Returns the error for a body without a prompt. It names the key that probably contains the prompt."""
    alias = next((key for key in names.PROMPT_TENSORS if key in body), None)
    few = (values.printable(key) for key in islice(body, _MAX_KEYS))
    near = alias or next((key for key in few if nearest_name(key, names.TEXT_TENSORS, 0.7)), None)
    hint = "" if near is None else f" (the body has {near!r})"
    return InvalidInput(
        names.TEXT_INPUT,
        f"is missing{hint}; flat JSON needs its prompt there, and V2 needs its tensors in {_V2_TENSORS}",
    )


def _check_id(value: Any) -> None:
    if value is not None and not values.is_text(value):
        raise InvalidInput(_ID, f"must be a string, got {values.shown(value)}")
    check_id(value)


def _parameters(body: Mapping[str, Any]) -> dict[str, Any]:
    nested = body.get(_PARAMETERS)
    if nested is not None and not isinstance(nested, dict):
        raise InvalidInput(_PARAMETERS, f"must be a JSON object, got {values.shown(nested)}")
    if (nested or {}).get(ALL_BINARY) or body.get(ALL_BINARY):
        raise InvalidInput(ALL_BINARY, "flat JSON has no binary outputs; send V2 tensors")
    merged = {key: value for key, value in (nested or {}).items() if key not in SILENT}
    for key, value in body.items():
        if key in _NO_PARAMETERS:
            continue
        if key in names.PROMPT_TENSORS:
            raise InvalidInput(key, f"is a second prompt in addition to {names.TEXT_INPUT}; send exactly one")
        if key == names.TOOLS:
            raise InvalidInput(key, f"is for conversations only; send {names.MESSAGES}")
        if merged.setdefault(key, value) != value:
            raise InvalidInput(key, f"differs from its value in {_PARAMETERS}")
    return merged
