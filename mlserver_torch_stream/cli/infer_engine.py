"""Infers rows with an engine in this process.

Knows the engine's interface and OpenAI's objects.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mlserver_torch_stream.cli.answers_http import RowQuestion, RowRequest, RowUnsuitable, each, refused
from mlserver_torch_stream.cli.interruptible import in_a_thread
from mlserver_torch_stream.cloud.rows import Outcome, Row, RunRefused, StoreUnavailable, refusal
from mlserver_torch_stream.cloud.run_metrics import RunMetrics
from mlserver_torch_stream.errors import (
    GenerationFailed,
    LoadFailed,
    NotServing,
    QueueFull,
    RequestError,
    SettingsError,
)
from mlserver_torch_stream.protocol.openai_objects import completion
from mlserver_torch_stream.protocol.openai_request import decode_body
from mlserver_torch_stream.protocol.spelling import CollectedReply
from mlserver_torch_stream.types import ChatPrompt, FinishReason, GenerationRequest

if TYPE_CHECKING:
    from mlserver_torch_stream.engine.api import TokenStream
    from mlserver_torch_stream.engine.build import BuiltEngine

EMBEDDED = "embedded://smollm2-135m-instruct"
_BROKEN = (FinishReason.ERROR, FinishReason.ABORT, FinishReason.TIMEOUT)


@dataclass
class EngineInfer:
    """The callable that infers a batch. All rows of a batch are submitted at once, and the engine batches them with the
    rows of other batches."""

    built: BuiltEngine
    name: str
    row_request: RowRequest

    @classmethod
    async def load(
        cls, model: str, extra: Mapping[str, Any], row_request: RowRequest, metrics: RunMetrics, name: str | None = None
    ) -> EngineInfer:
        """``name``: the model's name in the answers; None: the name of its source. Raises RunRefused, or LeftBehind if
        it is cancelled, since a load cannot be stopped."""
        from mlserver_torch_stream.loading import build
        from mlserver_torch_stream.settings import parse_settings

        before, began = _peak_bytes(), time.monotonic()
        try:
            resolved = parse_settings(model, extra)
            built = await in_a_thread(lambda: build(resolved, "cloud", lambda error: None))
        except (SettingsError, LoadFailed) as error:
            raise RunRefused(f"--model: {str(error).removeprefix('parameters.uri: ')}") from None
        metrics.load_model_latency_milli_secs.update(round((time.monotonic() - began) * 1e3))
        metrics.model_byte_size.update(_peak_bytes() - before)
        source = resolved.source.name
        return cls(built, name or source, replace(row_request, served={*row_request.served, model, source}))

    async def __call__(self, rows: Sequence[Row]) -> list[Outcome]:
        return await each(rows, self._one)

    def tokens(self, row: Row) -> int:
        """The number of tokens of the row's prompt; for a row without a valid request, the number of its bytes."""
        try:
            return len(self.built.codec.encode(self._request(self.row_request.ask(row)).prompts[0]))
        except (RowUnsuitable, RequestError):
            return row.size

    async def aclose(self) -> None:
        if self.built.give_back():
            await asyncio.to_thread(self.built.shutdown)

    async def _one(self, row: Row) -> Outcome:
        try:
            request = self._request(self.row_request.ask(row))
            return await self._answer(request)
        except RowUnsuitable as error:
            return refused("unsuitable", str(error))
        except (NotServing, QueueFull) as error:
            raise StoreUnavailable(f"the engine takes no more: {error.message}") from None
        except RequestError as error:
            return Outcome(failure=refusal(error))

    def _request(self, ask: RowQuestion) -> GenerationRequest:
        return decode_body(ask.body, self.built.engine.info, "row")

    async def _answer(self, request: GenerationRequest) -> Outcome:
        from mlserver_torch_stream.generation import Generator

        streams: list[TokenStream] = []
        collected = CollectedReply(request)
        try:
            await Generator(self.built.engine, self.built.codec, self.built.engine.info).start(request, streams.append)
            async for event in streams[0]:
                if event.finish_reason in _BROKEN:
                    raise self._broken(event.finish_reason, event.error)
                collected.add(event)
        finally:
            for stream in streams:
                stream.close()
        usage, chat = collected.usage, isinstance(request.prompts[0], ChatPrompt)
        body = completion(chat, self.name, collected.choices(), usage)
        return Outcome(body, None, usage.prompt_tokens, usage.completion_tokens)

    def _broken(self, reason: FinishReason | None, error: Exception | None) -> Exception:
        """The row's failure, or, if the engine is dead, a StoreUnavailable: the next run infers the row again."""
        message = str(error) if error is not None else f"ended with {reason.value if reason else 'no reason'}"
        if not self.built.engine.alive:
            return StoreUnavailable(f"the engine died: {message}")
        return error if isinstance(error, RequestError) else GenerationFailed(message)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
