"""Orders the waiting requests by priority and fair shares, and refuses requests that cannot run within the limits.

This module does not read a clock or import torch. The same checks apply to every batcher.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from mlserver_torch_stream.engine.api import EngineRequest, EngineStats
from mlserver_torch_stream.engine.cache.page_counts import largest
from mlserver_torch_stream.engine.cache.pages import CacheSpec
from mlserver_torch_stream.engine.request_state import RequestState
from mlserver_torch_stream.errors import ContextLengthExceeded, InvalidInput, QueueFull
from mlserver_torch_stream.types import ModelInfo


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The bounds of the scheduler.

    ``pages`` bounds the pages of each group of layers; ``cache_bytes`` bounds the pages of all groups plus the states.

    ``token_budget`` bounds the prompt tokens and drafts of one step. ``beside_budget`` bounds them in steps in which
    sequences decode, because those sequences wait until the step ends. None means no bound. A decoding sequence's
    newest token does not count, because it never waits for a prompt. A chunk of a prompt counts as at least
    ``prefill_floor`` tokens, because many short chunks would delay the decoding sequences if each chunk is a separate
    forward. With ``whole_prompts`` a step computes at most one prompt, and always the whole prompt.

    ``prefix_bytes`` bounds the pages that only the prefix cache holds. At most ``stages`` batches are in flight at a
    time.
    """

    max_num_seqs: int
    token_budget: int | None
    pages: tuple[int, ...]
    cache_bytes: int
    prefix_bytes: int = 0
    stages: int = 1
    whole_prompts: bool = False
    prefill_floor: int = 1
    beside_budget: int | None = None

    def budget(self, *, decodes: bool) -> float:
        """Returns the maximum number of prompt tokens and drafts in one step; ``decodes`` means that sequences decode
        in it.
        """
        budgets = (self.token_budget, self.beside_budget if decodes else None)
        return min((each for each in budgets if each is not None), default=math.inf)

    def chunk(self, tokens: int) -> int:
        """Returns the maximum number of prompt tokens that one step computes if a prompt has ``tokens`` left."""
        return tokens if self.whole_prompts or self.token_budget is None else min(self.token_budget, tokens)


@dataclass(frozen=True, slots=True)
class PromptBudget:
    """Bounds the prompt tokens of one step by their cost, and its drafts.

    A prompt token with ``k`` keys before it costs ``1 + per_key * k``. All prompt tokens of the step together cost at
    most ``cost``. But the first prompt gets at least ``least`` tokens, whatever they cost, and at least the limits'
    ``prefill_floor``, because fewer tokens would take as long; if ``least`` is 0, it gets only tokens that fit.

    While prompts wait, each draft costs ``per_draft``, and the drafts leave enough for the ``least`` tokens. All
    sequences together get at most ``most_drafts`` drafts, because the others wait for the drafts of one.
    """

    cost: float
    per_key: float = 0.0
    least: int = 1
    per_draft: float = 0.0
    most_drafts: float = math.inf

    def cost_of(self, start: int, tokens: int) -> float:
        """Returns the cost of ``tokens`` prompt tokens from position ``start`` on."""
        return tokens * (1 + self.per_key * (start + tokens / 2))

    def fitting(self, cost: float, start: int) -> int:
        """Returns how many prompt tokens, from position ``start`` on, can be computed at a total cost of ``cost``."""
        linear, square, cost = 1 + self.per_key * start, self.per_key / 2, max(0.0, cost)
        return int(2 * cost / (linear + math.sqrt(linear * linear + 4 * square * cost)))


def fits_alone(spec: CacheSpec, limits: SchedulerLimits, sequences: int, prompt: int, final: int) -> bool:
    """Returns whether an idle engine could finish a request that has ``sequences`` sequences of ``final`` tokens.

    The sequences share the full pages of the prompt.
    """
    pages = []
    for one, group in zip(spec.most_pages(final, limits.chunk(final)), spec.groups, strict=True):
        shared = min(one, prompt // spec.page_size) if group.span is None else 0
        pages.append(one + (sequences - 1) * (one - shared))
    return (
        sequences <= limits.max_num_seqs
        and spec.bytes_of(pages, sequences) <= limits.cache_bytes
        and all(count <= most for count, most in zip(pages, limits.pages, strict=True))
    )


def longest_sequence(spec: CacheSpec, limits: SchedulerLimits, max_model_len: int) -> int:
    """Returns the maximum length of a single sequence, prompt included, that the cache can hold."""
    return largest(max_model_len, lambda length: fits_alone(spec, limits, 1, length, length))


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """The limits of the queue and the timeouts, which are in seconds. None means no limit."""

    max_queued_requests: int = 256  # waiting requests
    max_queued_tokens: int | None = None  # the total length of the waiting prompts
    queue_timeout: float | None = None  # seconds from submit to the start of the prefill
    request_timeout: float | None = None  # seconds from submit to the last token, for requests that name no timeout
    step_timeout: float | None = None  # seconds that a forward of up to ``chunk`` tokens may take
    chunk: int = 512

    def step_limit(self, tokens: int) -> float:
        """Returns the time limit of a forward of ``tokens``, in seconds: ``step_timeout`` per ``chunk`` tokens."""
        return math.inf if self.step_timeout is None else self.step_timeout * max(1, math.ceil(tokens / self.chunk))


# How many later requests may be admitted before a request that does not fit yet. After that all requests wait for it.
_MAX_OVERTAKEN = 16
_MAX_TRIED = 16  # per admission: a long queue costs a step no more than a short one


class FairQueue:
    """Start-time fair queueing with one flow per request.

    The longer a client's backlog, the lower the weight of its flows. A request's work is the maximum number of tokens
    that it can need. Its tag is the virtual time plus its work times the number of its client's requests in the queue.
    The request with the lowest tag goes first. So short requests overtake earlier long requests, and a client that
    floods the queue does not overtake other clients. The virtual time grows with each admission, so no request waits
    forever.
    """

    def __init__(self) -> None:
        self._tags: dict[RequestState, float] = {}  # in the order of arrival
        self._overtaken: Counter[RequestState] = Counter()
        self._backlog: Counter[str] = Counter()
        self._virtual_time = 0.0
        self.tokens = 0  # the total length of the waiting prompts

    def __len__(self) -> int:
        return len(self._tags)

    def __iter__(self) -> Iterator[RequestState]:
        """Yields the requests in the order in which they are considered for admission."""
        return iter(sorted(self._tags, key=lambda request: (request.input.priority, self._tags[request])))

    def __contains__(self, request: RequestState) -> bool:
        return request in self._tags

    def has_before(self, priority: float) -> bool:
        """Returns whether a waiting request has a priority number below ``priority``."""
        return any(request.input.priority < priority for request in self._tags)

    def add(self, request: RequestState) -> None:
        """Adds a request.

        The place of the request depends on its work and on the number of its client's queued requests.
        """
        self._backlog[request.input.client] += 1
        self._tags[request] = self._virtual_time + request.work * self._backlog[request.input.client]
        self.tokens += len(request.prompt)

    def remove(self, request: RequestState) -> None:
        """Removes a request from the queue."""
        del self._tags[request]
        self._overtaken.pop(request, None)
        self.tokens -= len(request.prompt)
        self._backlog[request.input.client] -= 1
        if not self._backlog[request.input.client]:
            del self._backlog[request.input.client]

    def admit(self, fits: Callable[[RequestState], bool]) -> RequestState | None:
        """Removes and returns the first request for which ``fits`` returns True.

        Returns None if no request fits, or if an earlier request was overtaken too often.
        """
        passed: list[RequestState] = []
        for request in islice(self, _MAX_TRIED):
            if fits(request):
                self._overtaken.update(passed)
                self._virtual_time = max(self._virtual_time, self._tags[request])
                self.remove(request)
                return request
            if self._overtaken[request] >= _MAX_OVERTAKEN:
                return None
            passed.append(request)
        return None


class ServiceRate:
    """Estimates how long requests take, based on the requests that have ended."""

    def __init__(self) -> None:
        self._busy_s = 0.0
        self._requests = 0

    def note(self, busy_s: float) -> None:
        self._busy_s += busy_s

    def finished(self, requests: int) -> None:
        self._requests += requests

    def seconds_for(self, requests: int) -> int:
        """Returns the estimated seconds for this many requests: a whole number from 1 to 120."""
        if not self._requests:
            return 1
        return min(120, max(1, math.ceil(requests * self._busy_s / self._requests)))


Refusal = Callable[[int, int, int], str | None]
"""A callable that gets (sequences, prompt tokens, final tokens), and returns why such a request can never run, or None.
"""


class Admission:
    """Checks requests before they are queued.

    The checks raise QueueFull, or InvalidInput if a request can never run; this error names the field.

    The class also counts the requests in the engine's inbox, which the batcher has not accepted yet.
    """

    def __init__(self, info: ModelInfo, queue_limits: QueueLimits) -> None:
        self._info = info
        self._queue_limits = queue_limits
        self._submitted = self._submitted_tokens = 0  # requests and prompt tokens; the loop's thread writes them
        self._accepted = self._accepted_tokens = 0  # the engine's thread writes them
        self.service_rate = ServiceRate()

    def submitted(self, requests: Sequence[RequestState]) -> None:
        """Counts requests as queued while they are on their way to the engine's thread."""
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
            raise InvalidInput("text_input", f"{len(requests)} prompts are too many: at most {most} may wait")
        for request in requests:
            self.check_prompt(request, request.prompt_ids, len(request.prompt_ids), refusal, whole=not request.open)

    def check_prompt(
        self, request: EngineRequest, prompt_ids: Sequence[int], tokens: int, refusal: Refusal, *, whole: bool
    ) -> None:
        """Checks a request whose prompt has ``tokens`` tokens so far, of which ``prompt_ids`` are new."""
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
        """Refuses ids without an embedding: a tokenizer can have more ids than the model, and a GPU fails on them."""
        size = self._info.vocab_size
        if prompt_ids and not (min(prompt_ids) >= 0 and max(prompt_ids) < size):
            raise InvalidInput("text_input", f"contains a token id outside the model's vocabulary of {size} tokens")

    def _check_size(self, request: EngineRequest, prompt: int, refusal: Refusal) -> None:
        context, asked = self._info.max_model_len, request.sampling.max_tokens
        final = prompt + 1 if asked is None else min(context, prompt + asked)
        reason = refusal(request.sampling.n, prompt, final)
        if reason is not None:
            too_many = request.sampling.n > 1 and refusal(1, prompt, final) is None
            raise InvalidInput("n" if too_many else "max_tokens", reason)

    def longest(self, request: EngineRequest, prompt: int, refusal: Refusal) -> int:
        """Returns the maximum length of a request's sequences, including the prompt of ``prompt`` tokens.

        Without ``max_tokens`` the result is limited so that all sequences of the request fit the cache together.
        """
        context, n = self._info.max_model_len, request.sampling.n
        if n == 1 or request.sampling.max_tokens is not None:
            return context
        return largest(context, lambda length: length <= prompt or refusal(n, prompt, length) is None)

    def check_queue(self, requests: Sequence[EngineRequest], stats: EngineStats, open_prompts: int) -> None:
        """Checks, from the batcher's ``stats``, that the queue has room and that one more open prompt is allowed."""
        limits, waiting = self._queue_limits, self.waiting(stats)
        most, retry_after = limits.max_queued_requests, self.service_rate.seconds_for(waiting)
        if waiting + len(requests) > most:
            raise QueueFull(f"{waiting} prompts are waiting already; at most {most} may wait", retry_after)
        tokens = self._submitted_tokens - self._accepted_tokens + stats.waiting_tokens
        tokens += sum(len(request.prompt_ids) for request in requests)
        if limits.max_queued_tokens is not None and waiting and tokens > limits.max_queued_tokens:
            raise QueueFull(
                f"{tokens} prompt tokens would wait; at most {limits.max_queued_tokens} may wait", retry_after
            )
        if open_prompts >= most and any(request.open for request in requests):
            raise QueueFull(f"{open_prompts} prompts are being sent in pieces already; at most {most} are allowed", 1)
