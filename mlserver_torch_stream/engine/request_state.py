"""Holds the state of a request and of its sequences, such as their tokens, their text events and how they end."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Sequence as Ids
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from mlserver_torch_stream.engine.api import EngineRequest, Mailbox, call_on
from mlserver_torch_stream.engine.failures import log_failure
from mlserver_torch_stream.engine.text.answer_writer import AnswerCodec, AnswerWriter, StopStrings
from mlserver_torch_stream.types import FAILURES, FinishReason, SamplingParameters, TokenEvent, TokenLogprob, Usage

if TYPE_CHECKING:
    from mlserver_torch_stream.engine.constraints.token_matcher import TokenMatcher
    from mlserver_torch_stream.engine.sampling.row_sampler import RowSampler

# Tokens without text that prompts are kept out for: a character has at most four bytes, and each may be a token.
_SILENT_TOKENS = 4
# Answers without ``max_tokens`` may fill the context, but most of them end long before.
_ASSUMED_TOKENS = 1024


class SequenceState:
    """One sequence: its tokens so far, its text, and the events that are not delivered yet.

    ``accept`` adds the id of a token; the next forward needs only this id. ``write`` makes the token's text; on a GPU
    it runs during that forward. So a sequence ends in two steps: ``ended`` is true once the sequence gets no further
    tokens, and ``finish_reason`` is set once its text is complete.

    A sequence does not keep its request alive: code that holds a sequence longer than one call must hold the request,
    too.
    """

    def __init__(self, request: RequestState, index: int, codec: AnswerCodec, stops: StopStrings) -> None:
        # A weak reference: a cycle would keep both objects and the token matcher until a garbage collection.
        self._request = weakref.ref(request)
        self._input = request.input
        self._end_ids = request.end_ids
        self.index = index
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None  # set once its text is complete
        self.last_event_taken = False  # taken by ``take_events``
        self.sampler: RowSampler | None = None
        # Why the newest token ends the sequence; set before its text is made.
        self._reason_by_ids: FinishReason | None = None
        self._unwritten: list[TokenLogprob | None] = []  # logprobs of the newest tokens, whose text is not made yet
        self._writer = AnswerWriter(index, request.params, request.input.answer, codec, stops)
        self._first_token_at: float | None = None
        self._max_tokens = 0  # known from the first token on
        self._error: Exception | None = None
        self._prompt_shown = False
        self._interval, self._interval_s = request.event_interval
        self._shown = 0  # the number of tokens at the newest event
        self._shown_at: float | None = None  # the time of the newest event
        self._waits_since: float | None = None

    @property
    def request(self) -> RequestState:
        """The sequence's request; something else must still refer to it."""
        request = self._request()
        assert request is not None, "a sequence is used after its request"
        return request

    @property
    def length(self) -> int:
        """The number of tokens of the prompt and the answer so far.

        The next decode step writes the newest token to the cache.
        """
        return len(self._input.prompt_ids) + len(self.tokens)

    def token_ids(self, start: int, stop: int) -> Ids[int]:
        """Returns the tokens from ``start`` to ``stop``, counted over the prompt and the answer together."""
        prompt = self._input.prompt_ids
        known = len(prompt)
        if stop <= known:
            return prompt[start:stop]
        if start >= known:
            return self.tokens[start - known : stop - known]
        return [*prompt[start:], *self.tokens[: stop - known]]

    @property
    def waits_since(self) -> float:
        """The time since which the reader waits for an event.

        It is the time of the newest event, or of a later token after which the next event was not due yet. Before the
        first event, it is the time at which the prompt became complete.
        """
        return self.request.whole_at if self._waits_since is None else self._waits_since

    @property
    def awaits_text(self) -> bool:
        """Whether the next event is due but the tokens after the last event have no text.

        They may be a part of a character, of a stop string or of a tool call, or special tokens. False before the first
        event, and after ``_SILENT_TOKENS`` such tokens.
        """
        new = len(self.tokens) - self._shown
        if not self._shown or new >= _SILENT_TOKENS or new <= len(self._unwritten):
            return False
        return self._is_due and not self._writer.has_output

    @property
    def matcher(self) -> TokenMatcher | None:
        """The matcher of the sequence's constraint. None without a constraint or before the prompt is computed."""
        return None if self.sampler is None else self.sampler.matcher

    @property
    def ended(self) -> bool:
        """Whether the sequence gets no further tokens. The text of the newest tokens may not exist yet."""
        return self._reason_by_ids is not None or self.finish_reason is not None

    def accept(self, token_id: int, logprob: TokenLogprob | None) -> None:
        """Adds the next token. If the id of the token ends the sequence, ``ended`` is true after the call."""
        if self._first_token_at is None:
            self._first_token_at = time.monotonic()
            self._max_tokens = self.request.max_tokens  # its prompt is whole
        self.tokens.append(token_id)
        self._unwritten.append(logprob)
        if not self._is_due:
            self._waits_since = time.monotonic()
        count, matcher = len(self.tokens), self.matcher
        if self._is_end(count) or (matcher is not None and matcher.complete):
            self._reason_by_ids = FinishReason.STOP
        elif count >= self._max_tokens:
            self._reason_by_ids = FinishReason.LENGTH

    def write(self) -> None:
        """Makes the text of the new tokens.

        If the text ends the sequence, ``finish_reason`` is set, and the tokens after the token that ended it are
        dropped. If the text of a token cannot be made, the sequence ends with an error.
        """
        unwritten, self._unwritten = self._unwritten, []
        if unwritten:
            self._show_prompt()
        known = len(self.tokens) - len(unwritten)
        for count, logprob in enumerate(unwritten, known + 1):
            try:
                self._write(count, logprob)
            except Exception as error:
                self.finish(FinishReason.ERROR, log_failure(f"token {self.tokens[count - 1]}", error))
            if self.finish_reason is not None:
                del self.tokens[count:]
                break

    def _show_prompt(self) -> None:
        """Makes the events of the prompt, once it is computed."""
        if self._prompt_shown:
            return
        self._prompt_shown = True
        self._writer.write_prompt(self._input.prompt_text, self.request.scores)

    def _write(self, count: int, logprob: TokenLogprob | None) -> None:
        """Makes the text of the token with this number, counted from 1."""
        params = self._input.sampling
        hidden = self._is_end(count) and not params.include_stop_str_in_output
        # Stop strings count from ``min_tokens`` on, as end ids do.
        self._writer.write(self.tokens[count - 1], logprob, hidden=hidden, stops=count > params.min_tokens)
        if self._writer.stopped:
            self.finish(FinishReason.STOP)
        elif self._reason_by_ids is not None and count == len(self.tokens):
            self.finish(self._reason_by_ids)

    def _is_end(self, count: int) -> bool:
        """Returns whether the token with this number, counted from 1, ends the answer because of its id."""
        return self.tokens[count - 1] in self._end_ids and count > self._input.sampling.min_tokens

    def finish(self, reason: FinishReason, error: Exception | None = None) -> None:
        """Makes the text of all tokens. Then ends the sequence with ``reason``, unless the text has already ended it.

        Text that was held back, because of a stop string or an incomplete character, is included, except after an
        error. After a timeout or an abort, an incomplete character is left out.
        """
        self.write()
        if self.finish_reason is not None:
            return
        if reason not in FAILURES:
            self._show_prompt()
        self.finish_reason = reason
        self._error = error
        if reason is FinishReason.ERROR:
            return  # making the text may be what failed
        self._writer.flush(cut=reason in FAILURES)
        if reason is FinishReason.STOP and self._writer.called:
            self.finish_reason = FinishReason.TOOL_CALLS

    def take_events(self) -> Ids[TokenEvent]:
        """Returns the events since the last call; none after the sequence's last event.

        No event is returned while all new text is held back, or before the next event is due.
        """
        if self.last_event_taken or (self.finish_reason is None and not (self._is_due and self._writer.has_output)):
            return ()
        self._shown, self._shown_at = len(self.tokens), time.monotonic()
        self._waits_since = self._shown_at
        events = self._writer.take()
        for event in events:
            event.prompt_ids = self._input.prompt_ids
            event.num_input_tokens = len(event.prompt_ids)
        if self.finish_reason is not None:
            self.last_event_taken = True
            last = events.pop() if events else self._writer.event()
            events.append(
                replace(
                    last,
                    finish_reason=self.finish_reason,
                    usage=self.request.usage(len(self.tokens), self._first_token_at, self._writer.reasoning_tokens),
                    error=self._error,
                    stop_reason=self._stop_reason(),
                )
            )
        return events

    @property
    def _is_due(self) -> bool:
        """Whether there are enough new tokens for an event, or the last event was long enough ago."""
        if self._shown_at is None or len(self.tokens) >= self._shown + self._interval:
            return True
        return time.monotonic() >= self._shown_at + self._interval_s

    def _stop_reason(self) -> int | str | None:
        if self.finish_reason is not FinishReason.STOP:
            return None
        if self._writer.stop_string is not None:
            return self._writer.stop_string
        return self.tokens[-1] if self.tokens[-1] in self._input.sampling.stop_token_ids else None


class RequestState:
    """The state of a request: its ``input``, its sequences, the mailbox for their events, and its times."""

    def __init__(
        self,
        input: EngineRequest,
        mailbox: Mailbox,
        codec: AnswerCodec,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
        default_timeout: float | None = None,
        event_interval: tuple[int, float] = (1, math.inf),
    ) -> None:
        """``max_model_len`` is the result of ``Admission.longest``; for an open request ``seal`` replaces it."""
        self.input = input
        self.mailbox = mailbox
        self.max_model_len = max_model_len
        self.event_interval = event_interval
        self.end_ids = _end_ids(input.sampling, eos_token_ids)
        # From submit to the last token.
        self.timeout_s = default_timeout if input.timeout_s is None else input.timeout_s
        self.submitted_at = time.monotonic()
        self.whole_at = self.submitted_at  # when the prompt became complete and its wait began
        self.started_at: float | None = None
        self.cached_tokens = 0  # tokens of the prompt that were found in the prefix cache
        self.scores: list[TokenLogprob] = []  # the scores of the prompt's first tokens, if the request asks for them
        indices = range(input.first_index, input.first_index + input.sampling.n)
        stops = StopStrings(input.sampling.stop)
        self.sequences = [SequenceState(self, index, codec, stops) for index in indices]

    @property
    def prompt(self) -> Ids[int]:
        """The ids of the prompt; empty while the request is open."""
        return self.input.prompt_ids

    @property
    def params(self) -> SamplingParameters:
        return self.input.sampling

    @property
    def unscored(self) -> bool:
        """Whether the request asks for scores of its prompt and some of these scores are not known yet."""
        return self.params.prompt_logprobs is not None and len(self.scores) < len(self.prompt)

    def rows_to_score(self, start: int, end: int) -> int:
        """Returns how many prompt tokens from ``start`` to ``end`` need logits, because the next tokens are scored."""
        return max(0, end - max(start, len(self.scores) - 1)) if self.unscored else 0

    @property
    def unfinished(self) -> int:
        """The number of sequences that still get tokens."""
        return sum(not sequence.ended for sequence in self.sequences)

    @property
    def finished(self) -> bool:
        """True if all sequences have their ``finish_reason``."""
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    @property
    def work(self) -> int:
        """The maximum number of tokens that the request can need, for its prompt and all its sequences.

        An answer without ``max_tokens`` counts as at most ``_ASSUMED_TOKENS``.
        """
        answer = min(self.max_tokens, _ASSUMED_TOKENS) if self.params.max_tokens is None else self.max_tokens
        return len(self.prompt) + self.params.n * answer

    @property
    def max_tokens(self) -> int:
        """The maximum number of tokens of one answer: the request's own limit, or the rest of the context."""
        room = self.max_model_len - len(self.prompt)
        return room if self.params.max_tokens is None else min(self.params.max_tokens, room)

    def seal(self, prompt_ids: Ids[int], max_model_len: int) -> None:
        """Sets the whole prompt of an open request and the maximum length of its sequences.

        From now on the request waits in the queue.
        """
        self.max_model_len = max_model_len
        self.input.prompt_ids = tuple(prompt_ids)
        self.input.open = False
        self.whole_at = time.monotonic()

    def finish(self, reason: FinishReason, error: Exception | None = None) -> None:
        for sequence in self.sequences:
            sequence.finish(reason, error)

    def end_for_reader(self, reason: FinishReason, error: Exception) -> None:
        """Sends the reader the last event of each sequence, with the number of delivered tokens.

        Any thread may call this. The sequences are not changed, because they belong to the engine's thread, which is
        still in a step. A sequence whose last event was delivered gets no further event.
        """
        call_on(self.mailbox.loop, partial(self._end_for_reader, reason, error))

    def _end_for_reader(self, reason: FinishReason, error: Exception) -> None:
        for sequence in self.sequences:
            delivered = self.mailbox.delivered(sequence.index)
            if delivered.ended:
                continue
            usage = self.usage(delivered.tokens, delivered.first_at)
            self.mailbox.deliver(
                TokenEvent(
                    sequence.index,
                    cumulative_logprob=delivered.cumulative_logprob,
                    finish_reason=reason,
                    usage=usage,
                    error=error,
                )
            )

    def usage(self, tokens: int, first_token_at: float | None, reasoning_tokens: int = 0) -> Usage:
        """Returns the counts and times of a sequence that has ``tokens`` tokens."""
        started = self.started_at or time.monotonic()
        return Usage(
            num_input_tokens=len(self.prompt),
            num_output_tokens=tokens,
            queue_s=started - self.whole_at,
            ttft_s=(first_token_at or started) - self.submitted_at,
            num_cached_tokens=self.cached_tokens,
            num_reasoning_tokens=reasoning_tokens,
        )


def _end_ids(params: SamplingParameters, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
    """Returns the stop tokens.

    Unless the request ignores EOS, adds its EOS ids, or ``eos_token_ids`` if it has none.
    """
    eos = () if params.ignore_eos else eos_token_ids if params.eos_token_ids is None else params.eos_token_ids
    return frozenset(eos) | frozenset(params.stop_token_ids)
