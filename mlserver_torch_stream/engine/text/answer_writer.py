"""Makes the events of one sequence from its tokens. An event has text, divided by the answer's format, and logprobs.

The text can end a sequence; this module detects that, too. Stop strings are found by an Aho-Corasick automaton over
characters, in pure Python.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from mlserver_torch_stream.engine.text.answer_format import AnswerFormat, Part, Reasoning, short
from mlserver_torch_stream.types import MAX_PER_EVENT, SamplingParameters, TokenEvent, TokenLogprob, add_event

# Long text that was held back is split over several events; the first also has room for a token and its logprobs.
_MAX_TEXT = MAX_PER_EVENT // 2


class Detokenizer(Protocol):
    """Turns token ids into text. The joined results of ``push`` and ``flush`` equal the decoded text of all ids."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds ids, and returns the text that they complete. The joined text does not depend on how ids are grouped."""

    def flush(self, *, cut: bool = False) -> str:
        """Returns the rest of the text at the end of the sequence; an incomplete character becomes U+FFFD.

        ``cut`` means that a timeout or a shutdown has ended the sequence: then an incomplete character is left out.
        """


class AnswerCodec(Protocol):
    """The part of a tokenizer (``TextCodec``) that is needed for the text of answers."""

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens."""

    def detokenizer(self, skip_special_tokens: bool, marks: frozenset[int] = frozenset()) -> Detokenizer:
        """Returns a new detokenizer for one sequence. Special tokens in ``marks`` are never skipped."""

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of one token; for a special token, the bytes of its name."""


class AnswerWriter:
    """Makes the events of one sequence. ``reasoning_tokens`` counts the tokens of the answer that are reasoning."""

    def __init__(
        self,
        index: int,
        params: SamplingParameters,
        answer: AnswerFormat | None,
        codec: AnswerCodec,
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
        """Whether no text may follow, because a stop string was found or the only allowed call is complete."""
        return self._stops.hit is not None or (self._parser is not None and self._parser.ended)

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found in the text; None if there is none."""
        return self._stops.hit

    @property
    def called(self) -> bool:
        return self._parser is not None and self._parser.called

    def write_prompt(self, text: str, scores: Iterable[TokenLogprob]) -> None:
        """Adds the prompt's text and scores to the events, before the first token, if the reply contains them."""
        for start in range(0, len(text), _MAX_TEXT):
            add_event(self._events, replace(self.event(), prompt_text=text[start : start + _MAX_TEXT]))
        for score in scores:
            add_event(self._events, replace(self.event(), prompt_logprobs=(self._with_bytes(score),)))

    def write(self, token_id: int, logprob: TokenLogprob | None, *, hidden: bool, stops: bool) -> None:
        """Adds a token.

        The text of a ``hidden`` token is left out. With ``stops`` the text is searched for stop strings.
        """
        if logprob is not None and self._cumulative_logprob is not None:
            self._cumulative_logprob += logprob.logprob or 0.0
        reasoned = self._parser is not None and self._parser.reasons
        text = "" if hidden else self._detokenizer.push((token_id,))
        if stops and not hidden:
            text = self._stops.push(text)
        self._emit(text, (token_id,), () if logprob is None else (self._with_bytes(logprob),))
        if self._parser is not None:
            self.reasoning_tokens += reasoned or self._parser.reasons

    def flush(self, *, cut: bool = False) -> None:
        """Adds the text that was held back, at the end of the sequence.

        ``cut`` has the same meaning as in ``Detokenizer.flush``.
        """
        if self._stops.hit is None:
            self._emit(self._stops.push(self._detokenizer.flush(cut=cut)))
        if self._stops.hit is None:
            self._emit(self._stops.flush())
        if self._parser is not None:
            self._emit_parts(self._parser.flush())

    @property
    def has_output(self) -> bool:
        """Whether there is anything to deliver to the reader; false while all text is held back."""
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


class StopMatcher:
    """Searches a text for stop strings. With ``include``, the returned text includes the stop string that was found.

    The matcher finds the stop string that is complete first, so that a model stops as soon as possible. If several stop
    strings are complete at the same character, it finds the longest one. The result does not depend on how the text was
    divided into parts. Empty stop strings are ignored.
    """

    def __init__(self, stops: StopStrings, include: bool) -> None:
        self._automaton = stops
        self._include = include
        self._state = 0
        self._held = ""
        self.hit: str | None = None  # the stop string that was found

    def push(self, text: str) -> str:
        """Adds the next part of the text.

        Returns the text that cannot belong to a stop string. After a stop string was found, returns no text.
        """
        if self.hit is not None:
            return ""
        automaton, state = self._automaton, self._state
        if not automaton.stops:
            return text
        for position, char in enumerate(text):
            state = automaton.step(state, char)
            if (stop := automaton.found[state]) is not None:
                return self._finish(self._held + text[: position + 1], stop)
        self._state = state
        return self._release(self._held + text, 0 if self._include else automaton.depth[state])

    def flush(self) -> str:
        """Call this when the text has ended.

        Returns the text that is still held back, or no text if a stop string was found.
        """
        held, self._held = self._held, ""
        self._state = 0
        return held

    def _release(self, text: str, hold: int) -> str:
        cut = len(text) - hold
        self._held = text[cut:]
        return text[:cut]

    def _finish(self, text: str, stop: str) -> str:
        self.hit = stop
        self._held = ""
        return text if self._include else text[: len(text) - len(stop)]


class StopStrings:
    """The automaton for a request's stop strings. The matchers of all sequences of the request share it.

    A state stands for the longest prefix of a stop string at the end of the text so far. State 0 is the empty prefix.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = [stop for stop in dict.fromkeys(stops) if stop]
        self.depth = [0]  # length of the state's prefix
        self.found: list[str | None] = [None]  # the longest stop string that the state's prefix ends with
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        for stop in self.stops:
            self._add(stop)
        self._link()

    def step(self, state: int, char: str) -> int:
        """Returns the state after one more character, in constant time on average."""
        while char not in self._next[state]:
            if state == 0:
                return 0
            state = self._fallback[state]
        return self._next[state][char]

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self.depth)
                self.depth.append(self.depth[state] + 1)
                self.found.append(None)
                self._next.append({})
                self._fallback.append(0)
            state = self._next[state][char]
        self.found[state] = stop

    def _link(self) -> None:
        """Sets, breadth first, the fallback of each state: its longest proper suffix that is also a state."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                self._fallback[child] = self.step(self._fallback[state], char)
                queue.append(child)
            if self.found[state] is None:
                self.found[state] = self.found[self._fallback[state]]
