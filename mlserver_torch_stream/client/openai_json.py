"""OpenAI's API as the client speaks it: chat completions for messages, completions for prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlserver_torch_stream.client.call import (
    Delta,
    GenerationCall,
    GenerationError,
    Logprob,
    ModelsRequest,
    RequestUsage,
)
from mlserver_torch_stream.tool_calls import calls_of

_DONE = "[DONE]"


class OpenAIJson:
    """OpenAI's API over HTTP."""

    models_request: ModelsRequest = "GET", "/v1/models", None

    def request(self, call: GenerationCall) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {"model": call.model, "stream": True, "stream_options": {"include_usage": True}}
        if call.messages is None:
            prompt = call.prompts[0] if len(call.prompts) == 1 else list(call.prompts)
            return "/v1/completions", {**body, "prompt": prompt, **call.parameters}
        return "/v1/chat/completions", {**body, "messages": list(call.messages), **call.parameters}

    def reader(self) -> OpenAIEventReader:
        return OpenAIEventReader()

    def model_names(self, body: Any) -> list[str]:
        return sorted({item["id"] for item in body["data"]})


class OpenAIEventReader:
    """Reads the chunks of a stream.

    The delta that ends a sequence is kept until the next chunk, because the usage and the end arrive after it and
    belong to the request's last delta.
    """

    def __init__(self) -> None:
        self._kept: Delta | None = None
        self._usage: RequestUsage | None = None
        self._unfinished: set[int] = set()

    def read(self, data: str) -> Sequence[Delta]:
        if data == _DONE:
            return [self._last()]
        chunk = json.loads(data)
        if error := chunk.get("error"):
            raise GenerationError(f"the generation failed: {error_message(error)}")
        if usage := chunk.get("usage"):
            self._usage = RequestUsage(usage["prompt_tokens"], usage["completion_tokens"])
        ready: list[Delta] = []
        for choice in chunk["choices"]:
            if self._kept:
                ready.append(self._kept)
            delta, self._kept = _delta(choice), None
            self._unfinished.add(delta.index)
            if delta.finish_reason is not None:
                self._unfinished.remove(delta.index)
                self._kept = delta
            elif delta != Delta(index=delta.index):  # the first chunk of a chat has its role alone
                ready.append(delta)
        return ready

    def end(self) -> Sequence[Delta]:
        """Some servers send no ``[DONE]``: there the stream is whole if all its sequences have ended."""
        if self._kept is None:
            return []
        return [self._kept if self._unfinished else self._last()]

    def _last(self) -> Delta:
        delta, self._kept = self._kept or Delta(), None
        return replace(delta, usage=self._usage, final=True)


def error_message(error: Any) -> str:
    """The message of an error object, in OpenAI's form or in V2's."""
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _delta(choice: Mapping[str, Any]) -> Delta:
    said = choice.get("delta", {})
    text = said.get("content") if "delta" in choice else choice["text"]
    logprobs = _logprobs(choice.get("logprobs") or {})
    # Some servers leave the index out, and write "" as the reason of a sequence that goes on.
    index, reason = choice.get("index", 0), choice.get("finish_reason") or None
    return Delta(
        text or "",
        index,
        logprobs=logprobs,
        finish_reason=reason,
        reasoning=said.get("reasoning") or said.get("reasoning_content") or "",
        tool_calls=calls_of(said.get("tool_calls") or ()),
    )


def _logprobs(said: Mapping[str, Any]) -> tuple[Logprob, ...]:
    """Of a chat, which has a list of objects, and of a completion, which has parallel lists."""
    if "tokens" in said:
        tops = said.get("top_logprobs") or [None] * len(said["tokens"])
        return tuple(
            Logprob(logprob, token=token, top=tuple(Logprob(value, token=name) for name, value in (top or {}).items()))
            for token, logprob, top in zip(said["tokens"], said["token_logprobs"], tops, strict=True)
        )
    return tuple(
        Logprob(entry["logprob"], token=entry["token"], top=_logprobs({"content": entry.get("top_logprobs")}))
        for entry in said.get("content") or ()
    )
