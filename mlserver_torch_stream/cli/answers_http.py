"""Puts servers' answers together, from one body or from the events of a stream, as OpenAI's objects.

Knows the spellings of answers: OpenAI's and V2's. Knows nothing of how they come.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlserver_torch_stream.protocol.chat_completion import ChatChoice
from mlserver_torch_stream.protocol.openai_chunks import ChunkFold
from mlserver_torch_stream.protocol.text_completion import completion
from mlserver_torch_stream.types import TokenLogprob

DONE = "[DONE]"


class GenerationBroke(Exception):
    """The server says that the generation failed; ``error`` is its error object, where it is one."""

    def __init__(self, error: Any) -> None:
        self.error = error if isinstance(error, dict) else None
        super().__init__(reason_of(error))


def parse(text: str | bytes) -> Any:
    """JSON as servers in Python write it: NaN and the infinities, of log-probabilities, are null, which all can read.

    Raises ValueError, also where it is nested without a bottom.
    """
    try:
        return json.loads(text, parse_constant=lambda constant: None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class HttpAnswer(Protocol):
    """One answer as it comes. What raises ValueError, KeyError, TypeError, IndexError or AttributeError was none."""

    prompt_tokens: int
    completion_tokens: int

    def whole(self, body: dict[str, Any]) -> None:
        """The body of an answer that is not streamed."""

    def event(self, data: str) -> bool:
        """One event of a stream; True for the last."""

    def body(self) -> dict[str, Any]:
        """OpenAI's object."""


@dataclass
class OpenAIAnswer:
    """Everything that the server says is kept."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    _whole: dict[str, Any] | None = None
    _fold: ChunkFold = field(default_factory=ChunkFold)

    def whole(self, body: dict[str, Any]) -> None:
        self._check(body)
        self._whole = body

    def event(self, data: str) -> bool:
        if data == DONE:
            return True
        chunk = parse(data)
        self._check(chunk)
        self._fold.add(chunk)
        return False

    def body(self) -> dict[str, Any]:
        body = self._fold.whole() if self._whole is None else self._whole
        usage = body.get("usage") or {}
        self.prompt_tokens = _count(usage.get("prompt_tokens"))
        self.completion_tokens = _count(usage.get("completion_tokens"))
        return body

    @staticmethod
    def _check(body: Mapping[str, Any]) -> None:
        if body.get("error"):
            raise GenerationBroke(body["error"])
        for choice in body["choices"]:
            choice["index"]


@dataclass
class V2ServerAnswer:
    """Texts, finish reasons, log-probabilities and counts, from output tensors."""

    model: str
    chat: bool
    prompt_tokens: int = 0
    completion_tokens: int = 0
    _texts: dict[int, list[str]] = field(default_factory=dict)
    _reasons: dict[int, str] = field(default_factory=dict)
    _logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)

    def whole(self, body: dict[str, Any]) -> None:
        self._take(body)

    def event(self, data: str) -> bool:
        return self._take(parse(data))

    def body(self) -> dict[str, Any]:
        choices = [
            ChatChoice(index, "".join(self._texts[index]), self._reasons.get(index), self._logprobs.get(index))
            for index in sorted(self._texts)
        ]
        return completion(self.chat, self.model, choices, self)

    def _take(self, event: Mapping[str, Any]) -> bool:
        parameters = event.get("parameters") or {}
        error = event.get("error") or parameters.get("error")
        if error:
            raise GenerationBroke(error)
        tensors = {tensor["name"]: tensor["data"] for tensor in event.get("outputs", ())}
        first = int(parameters.get("index", 0))
        for offset, text in enumerate(tensors.get("text_output") or ()):
            self._texts.setdefault(first + offset, []).append(text)
        for offset, reason in enumerate(tensors.get("finish_reason") or ()):
            self._reasons[first + offset] = reason
        for offset, entries in enumerate(tensors.get("logprobs") or ()):
            self._logprobs.setdefault(first + offset, []).extend(map(_logprob, json.loads(entries)))
        self.prompt_tokens = max([self.prompt_tokens, *(tensors.get("num_input_tokens") or ())])
        self.completion_tokens += sum(tensors.get("num_output_tokens") or ())
        return bool(parameters.get("triton_final_response", False))


def _count(said: Any) -> int:
    return said if isinstance(said, int) else 0


def _logprob(entry: Mapping[str, Any]) -> TokenLogprob:
    return TokenLogprob(entry["token_id"], entry["logprob"], tuple((token, value) for token, value in entry["top"]))


def reason_of(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)
