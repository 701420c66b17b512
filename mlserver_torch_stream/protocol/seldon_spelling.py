"""The spelling of Seldon Core 2's OpenAI translator: a conversation in parallel tensors, OpenAI's objects in one.

Knows nothing of how the conversation is read, which ``seldon_chat`` does, nor of the transport. The translator hands
the tensor ``output_all`` through unchanged, so that finish reasons and usage reach OpenAI's clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from mlserver_torch_stream.protocol import v2_names as names
from mlserver_torch_stream.protocol.chat_completion import ChatChoice, ChatCompletion
from mlserver_torch_stream.protocol.seldon_chat import MESSAGE_TENSORS
from mlserver_torch_stream.protocol.spelling import JsonObject, ReplyContext, StreamEncoder, WholeEncoder
from mlserver_torch_stream.protocol.v2_outputs import output
from mlserver_torch_stream.protocol.v2_reply import StreamReply, UnaryReply
from mlserver_torch_stream.protocol.v2_spelling import V2, V2Tensors
from mlserver_torch_stream.types import GenerationRequest, ReplyOptions, TokenEvent


class SeldonChat(V2Tensors):
    """V2 tensors, the conversation's among them, and the reply's ``role``, ``content``, ``type`` and ``output_all``."""

    comments = False  # the translator reads every block of a stream as JSON
    outputs = frozenset({*V2Tensors.outputs, *names.CHAT_OUTPUT_DATATYPES})

    def accepts(self, body: Mapping[str, Any]) -> bool:
        inputs = body.get("inputs")
        tensors = inputs if isinstance(inputs, list) else []
        return has_message(str(tensor.get("name")) for tensor in tensors if isinstance(tensor, dict))

    def stream(self, request: GenerationRequest, context: ReplyContext) -> StreamEncoder:
        return SeldonStreamReply(request, context)

    def whole(self, request: GenerationRequest, context: ReplyContext) -> WholeEncoder:
        return SeldonUnaryReply(request, context)


SELDON = SeldonChat()


def spelling_of(inputs: Iterable[str]) -> V2Tensors:
    """The spelling of a gRPC message whose input tensors have these names."""
    return SELDON if has_message(inputs) else V2


def has_message(inputs: Iterable[str]) -> bool:
    return any(name in MESSAGE_TENSORS for name in inputs)


class SeldonStreamReply(StreamReply):
    """V2 responses, each with one chat.completion.chunk."""

    def __init__(self, request: GenerationRequest, context: ReplyContext) -> None:
        super().__init__(request, context)
        self._chat = ChatCompletion(request.request_id, context.model_name, context.created)
        self._chat_shown = _shown(request.reply)
        self._logprobs = request.sampling.logprobs
        self._begun: set[int] = set()

    def _tensors(self, event: TokenEvent, final: bool) -> list[JsonObject]:
        tensors = super()._tensors(event, final)
        behind_text = int(names.TEXT_OUTPUT in self._shown)
        tensors[behind_text:behind_text] = _message_tensors([event.text], self._chat_shown)
        if names.OUTPUT_ALL in self._chat_shown:
            tensors.append(self._chunk(event, final))
        self._begun.add(event.index)
        return tensors

    def _chunk(self, event: TokenEvent, final: bool) -> JsonObject:
        choice = ChatChoice(event.index, event.text, event.finish_reason, event.logprobs if self._logprobs else None)
        usage = self._progress.usage if final else None
        chunk = self._chat.chunk(choice, first=event.index not in self._begun, usage=usage)
        return output(names.OUTPUT_ALL, [orjson.dumps(chunk).decode()])


class SeldonUnaryReply(UnaryReply):
    """A V2 response with one chat.completion."""

    def _tensors(self) -> list[JsonObject]:
        shown = _shown(self._request.reply)
        choices = self._collected.choices()
        tensors = super()._tensors() + _message_tensors([choice.text for choice in choices], shown)
        if names.OUTPUT_ALL in shown:
            chat = ChatCompletion(self._request.request_id, self._context.model_name, self._context.created)
            whole = chat.whole(choices, self._collected.usage)
            tensors.append(output(names.OUTPUT_ALL, [orjson.dumps(whole).decode()]))
        return tensors


def _shown(reply: ReplyOptions) -> frozenset[str]:
    return frozenset(names.CHAT_OUTPUT_DATATYPES if reply.outputs is None else reply.outputs)


def _message_tensors(texts: list[str], shown: frozenset[str]) -> list[JsonObject]:
    count = len(texts)
    columns = {names.ROLE: ["assistant"] * count, names.CONTENT: texts, names.TYPE: ["text"] * count}
    return [output(name, data) for name, data in columns.items() if name in shown]
