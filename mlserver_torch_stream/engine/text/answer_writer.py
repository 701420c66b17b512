"""Makes the events of one sequence out of its tokens: their text, divided by the answer's format, and their logprobs.

Of the reasons for which a sequence ends it knows those that are in the text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from mlserver_torch_stream.engine.text.answer_format import Part, Reasoning, short
from mlserver_torch_stream.engine.text.detokenizer import StopMatcher, StopStrings
from mlserver_torch_stream.types import MAX_PER_EVENT, SamplingParameters, TokenEvent, TokenLogprob, add_event

if TYPE_CHECKING:
    from mlserver_torch_stream.engine.text.answer_format import AnswerFormat
    from mlserver_torch_stream.engine.text.tokenizer import TextCodec

# Long text that was held back is split over events, the first of which has room for a token and its logprobs too.
_MAX_TEXT = MAX_PER_EVENT // 2


class AnswerWriter:
    """``reasoning_tokens``: how many tokens of the answer are reasoning."""

    def __init__(
        self,
        index: int,
        params: SamplingParameters,
        answer: AnswerFormat | None,
        codec: TextCodec,
        stops: StopStrings,
    ) -> None:
        self.reasoning_tokens = 0
        self._index = index
        self._codec = codec
        self._parser = None if answer is None else answer.parser()
        marks = frozenset[int]() if answer is None else answer.marks
        self._detokenizer = codec.detokenizer(params.skip_special_tokens, marks)
        self._stops = StopMatcher(stops, params.include_stop_str_in_output)
        self._cumulative_logprob = 0.0 if params.logprobs else None
        self._events: list[TokenEvent] = []

    @property
    def stopped(self) -> bool:
        """Whether nothing may follow the text: it has a stop string, or an only call is whole."""
        return self._stops.hit is not None or (self._parser is not None and self._parser.ended)

    @property
    def stop_string(self) -> str | None:
        """The stop string that the text has."""
        return self._stops.hit

    @property
    def called(self) -> bool:
        return self._parser is not None and self._parser.called

    def write(self, token_id: int, logprob: TokenLogprob | None, *, hidden: bool, stops: bool) -> None:
        """Adds a token. The text of a ``hidden`` token is left out. ``stops``: whether stop strings count in it."""
        if logprob is not None and self._cumulative_logprob is not None:
            self._cumulative_logprob += logprob.logprob
        reasoned = self._parser is not None and self._parser.reasons
        text = "" if hidden else self._detokenizer.push((token_id,))
        if stops and not hidden:
            text = self._stops.push(text)
        self._emit(text, (token_id,), () if logprob is None else (self._with_bytes(logprob),))
        if self._parser is not None:
            self.reasoning_tokens += reasoned or self._parser.reasons

    def flush(self, *, cut: bool = False) -> None:
        """Adds the text that was held back, at the end of the sequence. ``cut``: as in ``Detokenizer.flush``."""
        if self._stops.hit is None:
            self._emit(self._stops.push(self._detokenizer.flush(cut=cut)))
        if self._stops.hit is None:
            self._emit(self._stops.flush())
        if self._parser is not None:
            self._emit_parts(self._parser.flush())

    @property
    def has_output(self) -> bool:
        """Whether a reader gets something of the events so far: no character or possible stop string is held back."""
        return any([event.has_output for event in self._events])

    def take(self) -> list[TokenEvent]:
        """Returns the events since the last call."""
        events, self._events = self._events, []
        return events

    def event(
        self, text: str = "", token_ids: tuple[int, ...] = (), logprobs: tuple[TokenLogprob, ...] = ()
    ) -> TokenEvent:
        return TokenEvent(self._index, text, token_ids, logprobs, self._cumulative_logprob)

    def _with_bytes(self, entry: TokenLogprob) -> TokenLogprob:
        of = self._codec.token_bytes
        special = entry.token_id in self._codec.special_ids
        top_tokens = tuple(of(token_id) for token_id, _ in entry.top)
        return replace(entry, token=of(entry.token_id), top_tokens=top_tokens, special=special)

    def _emit(self, text: str, token_ids: tuple[int, ...] = (), logprobs: tuple[TokenLogprob, ...] = ()) -> None:
        if self._parser is not None:
            add_event(self._events, self.event("", token_ids, logprobs))
            self._emit_parts(self._parser.push(text))
            return
        add_event(self._events, self.event(text[:_MAX_TEXT], token_ids, logprobs))
        for start in range(_MAX_TEXT, len(text), _MAX_TEXT):
            add_event(self._events, self.event(text[start : start + _MAX_TEXT]))

    def _emit_parts(self, parts: Iterable[Part]) -> None:
        for piece in (piece for part in parts for piece in short(part, _MAX_TEXT)):
            if isinstance(piece, str):
                event = self.event(piece)
            elif isinstance(piece, Reasoning):
                event = replace(self.event(), reasoning=piece.text)
            else:
                event = replace(self.event(), tool_calls=(piece,))
            add_event(self._events, event)
