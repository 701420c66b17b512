"""A request, what the client keeps of its stream while it runs, and the finished answer with its checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. The answer must have exactly ``new_tokens`` tokens, or the comparison is spoiled. A temperature of 0
    means greedy decoding. ``schema`` is the JSON schema that the answer must match."""

    prompt: str
    prompt_tokens: int
    new_tokens: int
    temperature: float = 0.0
    schema: Mapping[str, Any] | None = None


@dataclass(slots=True)
class Recording:
    """The raw bytes of one answer and the times of their arrival, by ``time.perf_counter``.

    ``started`` is when the client began, before it connected.
    """

    started: float = 0.0
    ended: float = 0.0
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    on_change: Callable[[], None] | None = None  # for a run that waits until streams have begun

    def add(self, at: float, chunk: bytes) -> None:
        self.chunks.append((at, chunk))
        if self.on_change is not None:
            self.on_change()

    def end(self, at: float) -> None:
        self.ended = at
        if self.on_change is not None:
            self.on_change()


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer. ``arrivals`` are the times of the events with text; both counts are the server's own.

    ``text`` is what the events add up to; it is empty over gRPC.
    """

    started: float
    ended: float
    arrivals: tuple[float, ...]
    prompt_tokens: int
    new_tokens: int
    text: str = ""

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.started

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]

    def gaps_within(self, begin: float, end: float) -> list[float]:
        """Returns the gaps that overlap a span of time."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return [later - earlier for earlier, later in pairs if later > begin and earlier < end]


class WrongCount(Exception):
    """Raised if a server generated another number of tokens than it was asked for, or read another prompt."""


# A server may add a token of its own to a prompt, such as one that begins every text.
_PROMPT_SLACK = 1


def check(ask: Ask, answer: Answer) -> None:
    """Raises WrongCount if the counts of the answer are not those that were asked for."""
    if answer.new_tokens != ask.new_tokens:
        raise WrongCount(f"the server counts {answer.new_tokens} new tokens, {ask.new_tokens} were asked for")
    if abs(answer.prompt_tokens - ask.prompt_tokens) > _PROMPT_SLACK:
        raise WrongCount(f"the server counts {answer.prompt_tokens} prompt tokens, the prompt has {ask.prompt_tokens}")
    if not answer.arrivals:
        raise WrongCount("no event of the answer has text")


def check_all(asks: Sequence[Ask], answers: Sequence[Answer]) -> None:
    for ask, answer in zip(asks, answers, strict=True):
        check(ask, answer)
