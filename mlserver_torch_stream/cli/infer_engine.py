"""Infers rows with an engine in this process.

Knows the engine's interface and the request parameters; rows meet nothing of HTTP or MLServer here.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlserver_torch_stream.cli.completion import Answer, Ask, Asking, Unsuitable, each, failed
from mlserver_torch_stream.cli.interrupt import in_a_thread
from mlserver_torch_stream.cloud.faults import Refused, Unavailable
from mlserver_torch_stream.cloud.meter import Meter
from mlserver_torch_stream.cloud.rows import Outcome, Row
from mlserver_torch_stream.errors import InvalidInput, LoadFailed, NotServing, QueueFull, RequestError, SettingsError
from mlserver_torch_stream.types import ChatPrompt, FinishReason, GenerationRequest, Prompt, TextPrompt

if TYPE_CHECKING:
    from mlserver_torch_stream.engine.api import TokenStream
    from mlserver_torch_stream.engine.build import BuiltEngine

EMBEDDED = "embedded://smollm2-135m-instruct"
_BROKEN = (FinishReason.ERROR, FinishReason.ABORT, FinishReason.TIMEOUT)


@dataclass
class EngineInfer:
    """The callable. Rows of a batch are submitted at once; the engine mixes them with those of other batches."""

    built: BuiltEngine
    name: str
    asking: Asking

    @classmethod
    async def load(cls, model: str, extra: Mapping[str, Any], asking: Asking, meter: Meter) -> EngineInfer:
        """Raises Refused, or LeftBehind where it is cancelled: a load cannot be stopped."""
        from mlserver_torch_stream.loading import build
        from mlserver_torch_stream.settings import parse_settings

        before, began = _peak_bytes(), time.monotonic()
        try:
            resolved = parse_settings(model, extra)
            built = await in_a_thread(lambda: build(resolved, "cloud", lambda error: None))
        except (SettingsError, LoadFailed) as error:
            raise Refused(f"--model: {error}") from None
        meter.load_model_latency_milli_secs.update(round((time.monotonic() - began) * 1e3))
        meter.model_byte_size.update(_peak_bytes() - before)
        return cls(built, resolved.source.name, asking)

    async def __call__(self, rows: Sequence[Row]) -> list[Outcome]:
        return await each(rows, self._one)

    def tokens(self, row: Row) -> int:
        """The row's prompt in tokens; of a row that cannot be asked, as many as it has bytes."""
        try:
            return len(self.built.codec.encode(_prompt(self.asking.ask(row))))
        except (Unsuitable, RequestError):
            return row.size

    async def aclose(self) -> None:
        if self.built.give_back():
            await asyncio.to_thread(self.built.shutdown)

    async def _one(self, row: Row) -> Outcome:
        try:
            ask = self.asking.ask(row)
            return await self._answer(ask, self._request(ask))
        except Unsuitable as error:
            return failed("unsuitable", str(error))
        except (NotServing, QueueFull) as error:
            raise Unavailable(f"the engine takes no more: {error.message}") from None
        except InvalidInput as error:
            return failed("invalid_request", error.message)
        except RequestError as error:
            return failed("generation_failed", error.message)

    async def _answer(self, ask: Ask, request: GenerationRequest) -> Outcome:
        from mlserver_torch_stream.generation import Generator

        streams: list[TokenStream] = []
        answer = Answer()
        try:
            await Generator(self.built.engine, self.built.codec, self.built.info).start(request, streams.append)
            async for event in streams[0]:
                if event.finish_reason in _BROKEN:
                    return self._broken(event.finish_reason, event.error)
                answer.add(event.index, event.text, event.finish_reason and event.finish_reason.value)
                if event.usage is not None:
                    answer.prompt_tokens = event.usage.num_input_tokens
                    answer.completion_tokens += event.usage.num_output_tokens
        finally:
            for stream in streams:
                stream.close()
        return answer.outcome(self.name, ask.chat)

    def _broken(self, reason: FinishReason | None, error: Exception | None) -> Outcome:
        """A row that the model broke on fails; one that a dead engine left is inferred again by the next run."""
        message = str(error) if error is not None else f"ended with {reason.value if reason else 'no reason'}"
        if not self.built.engine.alive:
            raise Unavailable(f"the engine died: {message}")
        return failed("generation_failed", message)

    def _request(self, ask: Ask) -> GenerationRequest:
        from mlserver_torch_stream.protocol.parameters import merge_parameters, resolve_sampling

        info = self.built.info
        if ask.chat and not info.has_chat_template:
            raise InvalidInput("messages", "the model has no chat template")
        plain = {key: value for key, value in ask.parameters.items() if key != "tools"}
        given = merge_parameters({"llm_parameters": plain}, (), None, info)
        for name in ("logprobs", "top_logprobs", "echo"):
            if name in given and given[name].value not in (False, 0, (False, None)):
                raise InvalidInput(given[name].spelling, "is not implemented for rows of objects")
        timeout = given["timeout"].value / 1e6 if "timeout" in given else None
        return GenerationRequest("row", (_prompt(ask),), resolve_sampling(given, info), timeout_s=timeout or None)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _prompt(ask: Ask) -> Prompt:
    from mlserver_torch_stream.protocol.chat import check_messages, check_tools

    if ask.messages is None:
        if not ask.prompt:
            raise InvalidInput("prompt", "the prompt is empty")
        return TextPrompt(ask.prompt)
    tools = ask.parameters.get("tools")
    return ChatPrompt(check_messages("messages", ask.messages), check_tools("tools", tools) if tools else None)
