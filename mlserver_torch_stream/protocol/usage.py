"""Counts the tokens of a request's sequences, and knows when the last sequence has ended.

Knows nothing of how the counts are spelled in a reply.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlserver_torch_stream.protocol.chat_completion import usage_counts
from mlserver_torch_stream.protocol.spelling import JsonObject
from mlserver_torch_stream.types import GenerationRequest, TokenEvent, Usage


class UsageCounter:
    """The usages of one request's sequences, filled in by their last events."""

    def __init__(self, request: GenerationRequest) -> None:
        self._per_prompt = request.sampling.n
        self._usages: list[Usage | None] = [None] * (len(request.prompts) * request.sampling.n)
        self._open = set(range(len(self._usages)))

    @property
    def unfinished(self) -> Sequence[int]:
        """The sequences whose last event has not been noted."""
        return sorted(self._open)

    def note(self, event: TokenEvent) -> bool:
        """True when this event is the very last of the request."""
        if event.finish_reason is None:
            return False
        self._open.remove(event.index)
        self._usages[event.index] = event.usage
        return not self._open

    @property
    def prompt_tokens_each(self) -> list[int]:
        """The number of tokens of each prompt; 0 if none of its sequences was counted."""
        sizes = [usage.num_input_tokens if usage is not None else 0 for usage in self._usages]
        return [max(sizes[start : start + self._per_prompt]) for start in range(0, len(sizes), self._per_prompt)]

    @property
    def completion_tokens_each(self) -> list[int]:
        """The number of tokens of each sequence, in the order of the prompts."""
        return [usage.num_output_tokens if usage is not None else 0 for usage in self._usages]

    @property
    def prompt_tokens(self) -> int:
        return sum(self.prompt_tokens_each)

    @property
    def completion_tokens(self) -> int:
        return sum(self.completion_tokens_each)

    @property
    def cached_tokens(self) -> int:
        """The number of prompt tokens, of all prompts, that came from the prefix cache."""
        cached = [usage.num_cached_tokens if usage is not None else 0 for usage in self._usages]
        return sum(max(cached[start : start + self._per_prompt]) for start in range(0, len(cached), self._per_prompt))

    @property
    def reasoning_tokens(self) -> int:
        return sum(usage.num_reasoning_tokens for usage in self._usages if usage is not None)

    @property
    def ttft_ms(self) -> int:
        """Milliseconds until the first token of any sequence of the request."""
        return self._earliest([usage.ttft_s for usage in self._usages if usage is not None])

    @property
    def queue_ms(self) -> int:
        """Milliseconds until the first sequence of the request began."""
        return self._earliest([usage.queue_s for usage in self._usages if usage is not None])

    @staticmethod
    def _earliest(seconds: list[float]) -> int:
        return round(min(seconds, default=0.0) * 1000)


class RunningUsage:
    """The usages of one request's sequences so far, for ``continuous_usage_stats``: a chunk has its sequence's."""

    def __init__(self, request: GenerationRequest) -> None:
        self._completion_tokens = [0] * (len(request.prompts) * request.sampling.n)

    def before_and_after(self, event: TokenEvent) -> tuple[JsonObject, JsonObject]:
        """OpenAI's usage of the event's sequence without and with the event's tokens, which are counted."""
        before = self._completion_tokens[event.index]
        self._completion_tokens[event.index] = after = before + len(event.token_ids)
        return usage_counts(event.num_input_tokens, before), usage_counts(event.num_input_tokens, after)
