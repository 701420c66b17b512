"""Refuses requests that can never run, and requests that are too many for the queue.

The same checks hold for every batcher. Knows nothing of streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlserver_torch_stream.engine.api import EngineRequest, EngineStats
from mlserver_torch_stream.engine.request_state import RequestState
from mlserver_torch_stream.engine.scheduling.queue_limits import QueueLimits, ServiceRate
from mlserver_torch_stream.errors import ContextLengthExceeded, InvalidInput, QueueFull
from mlserver_torch_stream.types import ModelInfo

Refusal = Callable[[int, int, int], str | None]
"""Returns why a request of (sequences, prompt tokens, tokens at the end) can never run; None if it can."""


class Admission:
    """Its checks raise InvalidInput, which names the field, or QueueFull.

    It counts the requests that are in the engine's inbox: they are submitted, and the batcher has not accepted them.
    """

    def __init__(self, info: ModelInfo, queue_limits: QueueLimits) -> None:
        self._info = info
        self._queue_limits = queue_limits
        self._submitted = self._submitted_tokens = 0  # requests and prompt tokens; the loop's thread writes them
        self._accepted = self._accepted_tokens = 0  # the engine's thread writes them
        self.service_rate = ServiceRate()

    def submitted(self, requests: Sequence[RequestState]) -> None:
        self._submitted += len(requests)
        self._submitted_tokens += sum(len(request.prompt) for request in requests)

    def accepted(self, requests: Sequence[RequestState]) -> None:
        self._accepted += len(requests)
        self._accepted_tokens += sum(len(request.prompt) for request in requests)

    def waiting(self, stats: EngineStats) -> int:
        """Returns the number of requests in the inbox and in the batcher's queue."""
        return self._submitted - self._accepted + stats.waiting_requests

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

    def check_queue(self, requests: Sequence[EngineRequest], stats: EngineStats) -> None:
        """Checks whether the queue has room, from the batcher's ``stats``."""
        limits, waiting = self._queue_limits, self.waiting(stats)
        most, retry_after = limits.max_queued_requests, self.service_rate.seconds_for(waiting)
        if waiting + len(requests) > most:
            raise QueueFull(f"{waiting} prompts are waiting already, of {most} allowed", retry_after)
        tokens = self._submitted_tokens - self._accepted_tokens + stats.waiting_tokens
        tokens += sum(len(request.prompt_ids) for request in requests)
        if limits.max_queued_tokens is not None and waiting and tokens > limits.max_queued_tokens:
            raise QueueFull(f"{tokens} prompt tokens would wait, of {limits.max_queued_tokens} allowed", retry_after)
        already_open = self._submitted - self._accepted + stats.open_prompts
        if already_open >= most and any(request.open for request in requests):
            raise QueueFull(f"{already_open} prompts are being sent in pieces already, of {most} allowed", 1)
