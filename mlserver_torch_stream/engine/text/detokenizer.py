"""Turns one sequence's token ids into text, one by one, and never splits a character.

Knows nothing of stop strings or events. Each token costs the same, and odd ids raise nothing.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_PENDING_CHARS = 3  # the bytes of an unfinished character decode to at most so many replacement characters
_CONTEXT = 4  # tokens kept before new ones: their text fixes the space in front of the next
_WINDOW = 16  # tokens after which the window is cut back to its context
_STUCK = 32  # tokens after which it is cut although its end is unfinished


_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """The texts that ``push`` and ``flush`` return join to the decode of all ids."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that these ids complete. The grouping of ids into calls does not change the joined text."""

    def flush(self, *, cut: bool = False) -> str:
        """Returns the rest of the text at the end of the sequence; an unfinished character becomes its replacement.

        ``cut``: the sequence was ended from outside, by its time limit or a shutdown: such a character is left out.
        """


class ByteDetokenizer:
    """For tokenizers whose only decoder is ByteLevel: concatenates the bytes of tokens, and decodes them as UTF-8."""

    def __init__(self, token_bytes: Callable[[int], bytes], silent: frozenset[int]) -> None:
        """``silent``: tokens that are skipped."""
        self._token_bytes = token_bytes
        self._silent = silent
        self._decoder = _Utf8Decoder("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(
            b"".join([self._token_bytes(token_id) for token_id in token_ids if token_id not in self._silent])
        )

    def flush(self, *, cut: bool = False) -> str:
        rest = self._decoder.decode(b"", final=True)
        return "" if cut else rest


class WindowDetokenizer:
    """Decodes a short window of recent tokens and returns what is new in its text, for any tokenizer.

    There is one exception to what ``Detokenizer`` says: tokenizers with byte fallback can emit, byte by byte, a run
    that is not UTF-8 or that spells the replacement character. The characters that were complete stay as they were
    returned, where a whole decode replaces the entire run, and the number of replacement characters can differ.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], silent: frozenset[int]) -> None:
        """``silent``: tokens that are skipped: they never reach a ``decode``."""
        self._decode = decode
        self._silent = silent
        self._window: list[int] = []
        self._returned = ""  # the text of the window that has been returned
        self._complete = 0  # tokens of the window whose text has been returned entirely
        self._cut = 0  # an earlier such count, where the window may be cut

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._push(token_id) for token_id in token_ids if token_id not in self._silent])

    def flush(self, *, cut: bool = False) -> str:
        text = self._decode(self._window)
        if text.startswith(self._returned):
            rest = text[len(self._returned) :]
        else:
            rest = self._decode(self._window[self._complete :])
        self._window, self._returned, self._complete, self._cut = [], "", 0, 0
        return rest.rstrip(_REPLACEMENT) if cut else rest

    def _push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.startswith(self._returned):
            return self._restart() if self._broken(text) else ""
        return self._release(text)

    def _release(self, text: str) -> str:
        """Returns the text of the window that is new and cannot change."""
        unfinished = min(len(text) - len(text.rstrip(_REPLACEMENT)), _PENDING_CHARS)
        certain = max(len(text) - unfinished, len(self._returned))
        new = text[len(self._returned) : certain]
        self._returned = text[:certain]
        if certain == len(text):
            self._mark_complete()
        elif len(self._window) >= _STUCK:
            self._trim(len(self._window) - 2 * _CONTEXT, unfinished)
        return new

    def _mark_complete(self) -> None:
        self._complete = len(self._window)
        if self._complete >= _WINDOW and self._cut:
            self._trim(self._cut, 0)
        elif self._complete >= _WINDOW - _CONTEXT and not self._cut:
            self._cut = self._complete

    def _trim(self, start: int, unfinished: int) -> None:
        """Drops the tokens before ``start``. The last ``unfinished`` characters are not returned yet."""
        text = self._decode(self._window[start:])
        if not text and len(self._window) < _STUCK:
            return  # a context without text would not keep the next token's leading space
        self._window = self._window[start:]
        self._returned = text[: len(text) - unfinished]
        self._complete = len(self._window) - unfinished
        self._cut = 0

    def _broken(self, text: str) -> bool:
        """Whether the returned text differs from the window's for good, not only until a character is complete."""
        return not text.endswith(_REPLACEMENT) or len(self._window) - self._complete > 2 * _CONTEXT

    def _restart(self) -> str:
        """Starts a new window at the first token that has not been returned entirely."""
        self._window = self._window[self._complete :]
        self._returned, self._complete, self._cut = "", 0, 0
        return self._release(self._decode(self._window))
