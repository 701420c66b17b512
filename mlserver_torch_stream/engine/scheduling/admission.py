"""Refuses requests that can never run, and requests that are too many for the queue.

Knows nothing of threads; the same checks hold for every batcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.scheduling.queue_limits import QueueLimits, ServiceRate
from mlserver_torch_stream.errors import ContextLengthExceeded, InvalidInput, QueueFull
from mlserver_torch_stream.types import ModelInfo

Refusal = Callable[[int, int, int], str | None]
"""Returns why a request of (sequences, prompt tokens, tokens at the end) can never run; None if it can."""


class Admission:
    """Its checks raise InvalidInput, which names the field, or QueueFull."""

    def __init__(self, info: ModelInfo, queue_limits: QueueLimits) -> None:
        self._info = info
        self._queue_limits = queue_limits

    def check(self, requests: Sequence[EngineRequest], refusal: Refusal) -> None:
        most = self._queue_limits.max_queued_requests
        if len(requests) > most:
            raise InvalidInput("text_input", f"{len(requests)} prompts are more than the queue's {most}")
        for request in requests:
            self.check_prompt(request, request.prompt_ids, len(request.prompt_ids), refusal, whole=not request.open)

    def check_prompt(
        self, request: EngineRequest, prompt_ids: Sequence[int], tokens: int, refusal: Refusal, *, whole: bool
    ) -> None:
        """Checks a request whose prompt has ``tokens`` so far, of which ``prompt_ids`` are new."""
        self._check_length(tokens, whole)
        self._check_ids(prompt_ids)
        self._check_size(request, tokens, refusal)

    def _check_length(self, tokens: int, whole: bool) -> None:
        context = self._info.max_model_len
        if tokens == 0 and whole:
            raise InvalidInput("text_input", "the prompt is empty")
        if tokens >= context:
            raise ContextLengthExceeded("text_input", tokens, context)

    def _check_ids(self, prompt_ids: Sequence[int]) -> None:
        """Refuses ids that have no embedding: a tokenizer can have more ids than the model, and a GPU fails on them."""
        size = self._info.vocab_size
        if prompt_ids and not (min(prompt_ids) >= 0 and max(prompt_ids) < size):
            raise InvalidInput("text_input", f"holds a token outside the model's vocabulary of {size}")

    def _check_size(self, request: EngineRequest, prompt: int, refusal: Refusal) -> None:
        context, asked = self._info.max_model_len, request.sampling.max_tokens
        final = context if asked is None else min(context, prompt + asked)
        reason = refusal(request.sampling.n, prompt, final)
        if reason is not None:
            too_many = request.sampling.n > 1 and refusal(1, prompt, final) is None
            raise InvalidInput("n" if too_many else "max_tokens", reason)

    def check_open_prompts(self, requests: Sequence[EngineRequest], already_open: int) -> None:
        most = self._queue_limits.max_queued_requests
        if already_open >= most and any(request.open for request in requests):
            raise QueueFull(f"{already_open} prompts are being sent in pieces already, of {most} allowed", 1)

    def check_queue(
        self, requests: Sequence[EngineRequest], waiting: int, waiting_tokens: int, rate: ServiceRate
    ) -> None:
        limits, retry_after = self._queue_limits, rate.seconds_for(waiting)
        if waiting + len(requests) > limits.max_queued_requests:
            raise QueueFull(
                f"{waiting} prompts are waiting already, of {limits.max_queued_requests} allowed", retry_after
            )
        tokens = waiting_tokens + sum(len(request.prompt_ids) for request in requests)
        if limits.max_queued_tokens is not None and waiting and tokens > limits.max_queued_tokens:
            raise QueueFull(f"{tokens} prompt tokens would wait, of {limits.max_queued_tokens} allowed", retry_after)
