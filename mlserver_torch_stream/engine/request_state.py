"""Holds the state of a request and of its sequences: their tokens, their text events, and when they end.

Knows nothing of tensors, batches or caches.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as Ids
from dataclasses import replace
from typing import TYPE_CHECKING

from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.mailbox import Mailbox
from mlserver_torch_stream.engine.text.answer_parts import Part, Reasoning, short
from mlserver_torch_stream.engine.text.detokenizer import Detokenizer
from mlserver_torch_stream.engine.text.stops import StopMatcher
from mlserver_torch_stream.types import (
    MOST_PER_EVENT,
    FinishReason,
    SamplingParameters,
    TokenEvent,
    TokenLogprob,
    Usage,
    add_event,
)

if TYPE_CHECKING:
    from mlserver_torch_stream.engine.constraints.token_matcher import TokenMatcher
    from mlserver_torch_stream.engine.sampling.row_sampler import RowSampler
    from mlserver_torch_stream.engine.text.tokenizer import TextCodec

# Long text that was held back is split over events, the first of which has room for a token and its logprobs too.
_MOST_TEXT = MOST_PER_EVENT // 2


class SequenceState:
    """One sequence: its tokens so far, its text, and the events that are not delivered yet."""

    def __init__(self, request: RequestState, index: int, codec: TextCodec) -> None:
        params = request.params
        self.request = request
        self.index = index
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.last_event_taken = False  # by ``take_events``
        self.sampler: RowSampler | None = None
        self._codec = codec
        self._parser = None if request.answer is None else request.answer.parser()
        marks = frozenset[int]() if request.answer is None else request.answer.marks
        self._detokenizer = Detokenizer(codec, params.skip_special_tokens, marks)
        self._stops = StopMatcher(params.stop, params.include_stop_str_in_output)
        self._first_token_at: float | None = None
        self._cumulative_logprob = 0.0
        self._reasoning_tokens = 0
        self._pending_events: list[TokenEvent] = []
        self._error: Exception | None = None

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the sequence: as many are in the cache after the next decode step."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def matcher(self) -> TokenMatcher | None:
        """Of an answer that has a constraint, once its prompt is computed."""
        return None if self.sampler is None else self.sampler.matcher

    def accept(self, token_id: int, logprob: TokenLogprob | None) -> None:
        """Adds the next token. If it was the last, ``finish_reason`` is set afterwards."""
        if self._first_token_at is None:
            self._first_token_at = time.monotonic()
        self.tokens.append(token_id)
        if logprob is not None:
            self._cumulative_logprob += logprob.logprob
        ends = token_id in self.request.end_ids and len(self.tokens) > self.request.params.min_tokens
        hidden = ends and not self.request.params.include_stop_str_in_output
        reasoned = self._reasons
        text = "" if hidden else self._push([token_id])
        self._emit(text, (token_id,), () if logprob is None else (self._with_bytes(logprob),))
        self._reasoning_tokens += reasoned or self._reasons
        if ends or self._complete or self._stops.hit is not None:
            self.finish(FinishReason.STOP)
        elif len(self.tokens) >= self.request.max_tokens:
            self.finish(FinishReason.LENGTH)

    @property
    def _reasons(self) -> bool:
        return self._parser is not None and self._parser.reasons

    @property
    def _complete(self) -> bool:
        """Whether nothing may follow: no token by the constraint, or no text behind an only call."""
        if self._parser is not None and self._parser.ended:
            return True
        return self.matcher is not None and self.matcher.complete

    def _with_bytes(self, entry: TokenLogprob) -> TokenLogprob:
        of = self._codec.token_bytes
        special = entry.token_id in self._codec.special_ids
        top_tokens = tuple(of(token_id) for token_id, _ in entry.top)
        return replace(entry, token=of(entry.token_id), top_tokens=top_tokens, special=special)

    def _push(self, token_ids: Ids[int]) -> str:
        """Returns the text that the ids complete and that cannot become part of a stop string."""
        text = self._detokenizer.push(token_ids)
        if len(self.tokens) > self.request.params.min_tokens:  # stop strings count from there on, as end ids do
            text = self._stops.push(text)
        return text

    def _emit(self, text: str, token_ids: tuple[int, ...] = (), logprobs: tuple[TokenLogprob, ...] = ()) -> None:
        if self._parser is not None:
            add_event(self._pending_events, self._event("", token_ids, logprobs))
            self._emit_parts(self._parser.push(text))
            return
        add_event(self._pending_events, self._event(text[:_MOST_TEXT], token_ids, logprobs))
        for start in range(_MOST_TEXT, len(text), _MOST_TEXT):
            add_event(self._pending_events, self._event(text[start : start + _MOST_TEXT]))

    def _emit_parts(self, parts: Iterable[Part]) -> None:
        for piece in (piece for part in parts for piece in short(part, _MOST_TEXT)):
            if isinstance(piece, str):
                event = self._event(piece)
            elif isinstance(piece, Reasoning):
                event = replace(self._event(), reasoning=piece.text)
            else:
                event = replace(self._event(), tool_calls=(piece,))
            add_event(self._pending_events, event)

    def _event(
        self, text: str = "", token_ids: tuple[int, ...] = (), logprobs: tuple[TokenLogprob, ...] = ()
    ) -> TokenEvent:
        cumulative = self._cumulative_logprob if self.request.params.logprobs else None
        return TokenEvent(self.index, text, token_ids, logprobs, cumulative)

    def finish(self, reason: FinishReason, error: Exception | None = None) -> None:
        if self.finish_reason is not None:
            return
        self.finish_reason = reason
        self._error = error
        if reason is FinishReason.ERROR:
            return  # the failure may be in the text
        if self._stops.hit is None:
            self._emit(self._stops.push(self._detokenizer.flush()))
        if self._stops.hit is None:
            self._emit(self._stops.flush())
        if self._parser is not None:
            self._emit_parts(self._parser.flush())
            if reason is FinishReason.STOP and self._parser.called:
                self.finish_reason = FinishReason.TOOL_CALLS

    def take_events(self) -> Ids[TokenEvent]:
        """Returns the events since the last call, and nothing after the last event.

        While a character or a possible stop string is held back, it returns nothing either.
        """
        if self.last_event_taken or (
            self.finish_reason is None and not any(event.has_output for event in self._pending_events)
        ):
            return ()
        events, self._pending_events = self._pending_events, []
        if self.finish_reason is not None:
            self.last_event_taken = True
            last = events.pop() if events else self._event()
            events.append(
                replace(
                    last,
                    finish_reason=self.finish_reason,
                    usage=self.request.usage(len(self.tokens), self._first_token_at, self._reasoning_tokens),
                    error=self._error,
                    stop_reason=self._stop_reason(),
                )
            )
        return events

    def _stop_reason(self) -> int | str | None:
        if self.finish_reason is not FinishReason.STOP:
            return None
        if self._stops.hit is not None:
            return self._stops.hit
        return self.tokens[-1] if self.tokens[-1] in self.request.params.stop_token_ids else None


class RequestState:
    """One prompt and its ``params.n`` sequences. An open prompt grows until it is ``sealed``."""

    def __init__(
        self,
        given: EngineRequest,
        mailbox: Mailbox,
        codec: TextCodec,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
        default_timeout: float | None = None,
    ) -> None:
        """``max_model_len`` is the model's context, or less if the cache is small."""
        self.prompt = list(given.prompt_ids)
        self.params = given.sampling
        self.mailbox = mailbox
        self.max_model_len = max_model_len
        self.answer = given.answer
        self.constraint = given.constraint
        self.end_ids = _end_ids(given.sampling, eos_token_ids)
        self.sealed = not given.open
        self.priority = given.priority
        self.client = given.client
        # From submit to the last token.
        self.timeout_s = default_timeout if given.timeout_s is None else given.timeout_s
        self.submitted_at = time.monotonic()
        self.whole_at = self.submitted_at  # when the prompt became complete and its wait began
        self.started_at: float | None = None
        self.kept = 0  # ids at the beginning of an open prompt that its end did not change
        self.cached_tokens = 0  # of the prompt: found in the prefix cache
        indices = range(given.first_index, given.first_index + given.sampling.n)
        self.sequences = [SequenceState(self, index, codec) for index in indices]

    @property
    def unfinished(self) -> int:
        """The number of sequences that have not finished."""
        return sum(sequence.finish_reason is None for sequence in self.sequences)

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    @property
    def work(self) -> int:
        """The most tokens that the request can need: of its prompt and of all its sequences."""
        return len(self.prompt) + self.params.n * self.max_tokens

    @property
    def max_tokens(self) -> int:
        room = self.max_model_len - len(self.prompt)
        return room if self.params.max_tokens is None else min(self.params.max_tokens, room)

    @property
    def final_length(self) -> int:
        """The most tokens that one of its sequences can have, prompt included."""
        return len(self.prompt) + self.max_tokens

    def grow(self, prompt_ids: Ids[int], whole: bool) -> None:
        """Extends an open prompt, or sets it as a whole."""
        if not whole:
            self.prompt.extend(prompt_ids)
            return
        pairs = enumerate(zip(self.prompt, prompt_ids, strict=False))
        changed = (index for index, (old, new) in pairs if old != new)
        self.kept = next(changed, min(len(self.prompt), len(prompt_ids)))
        self.prompt[:] = prompt_ids
        self.sealed = True

    def finish(self, reason: FinishReason, error: Exception | None = None) -> None:
        for sequence in self.sequences:
            sequence.finish(reason, error)

    def end_for_reader(self, reason: FinishReason, error: Exception) -> None:
        """Gives the reader the last events of the sequences, with the tokens delivered so far. On the loop's thread.

        The sequences stay as they are: they belong to the engine's thread, whose step does not return.
        """
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
    """Returns the stop tokens and, unless the request ignores EOS, its own EOS ids or else ``eos_token_ids``."""
    eos = () if params.ignore_eos else eos_token_ids if params.eos_token_ids is None else params.eos_token_ids
    return frozenset(eos) | frozenset(params.stop_token_ids)
