"""Finds out by which factor a tokenizer can make a text longer, and whether its regular expressions may be slow.

The module reads a tokenizer's JSON, without the vocabulary, from the ``tokenizers`` library. A model's files are not
trusted.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from mlserver_torch_stream.errors import LoadFailed

MAX_EXPANSION = 1024
_USUAL_CHARSMAP = 18  # Unicode's compatibility forms turn one character into at most this many
_MAX_REPEATS = 2  # unbounded repeats in one alternative: the expressions of known models have this many
_TIMES = re.compile(r"[*+?]|\{(\d*),?(\d*)\}")
_PROPERTY = re.compile(r"[pPx]\{[^}]*\}|.", re.DOTALL)


def expansion(tokenizer: PreTrainedTokenizerBase) -> float:
    """Returns an upper bound on the factor by which normalization makes a text longer, without compatibility forms.

    Raises LoadFailed if the normalizer or the decoder exceeds ``MAX_EXPANSION``.
    """
    if not tokenizer.is_fast:
        return 1.0
    for name in ("normalizer", "decoder"):
        times = 1.0
        for part in _parts(_state(tokenizer, name)):
            times *= _times(part)
        if times > MAX_EXPANSION:
            raise LoadFailed(
                f"the tokenizer's {name} can make a text {times:.3g} times as long; the limit is {MAX_EXPANSION}"
            )
        if name == "normalizer":
            growth = times
    return growth


def may_be_slow(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns whether a regular expression of the tokenizer has nested repeats, which can run endlessly."""
    states = [_state(tokenizer, name) for name in ("normalizer", "pre_tokenizer")] if tokenizer.is_fast else []
    return any(backtracks(part["Regex"]) for state in states for part in _parts(state) if "Regex" in part)


def _state(tokenizer: PreTrainedTokenizerBase, name: str) -> Any:
    part = getattr(tokenizer.backend_tokenizer, name)
    return None if part is None else json.loads(part.__getstate__())


def _parts(state: Any) -> Iterator[Mapping[str, Any]]:
    """Returns all objects in the JSON of a part."""
    if isinstance(state, dict):
        yield state
    for inner in state.values() if isinstance(state, dict) else state if isinstance(state, list) else ():
        yield from _parts(inner)


def _times(part: Mapping[str, Any]) -> float:
    """Returns the factor by which one normalizer can make a text longer; a prefix of one character does not count."""
    if part.get("type") == "Replace":
        pattern, content = part["pattern"], len(part["content"])
        matched = len(pattern.get("String", ""))
        return max(1.0, content / matched) if matched else 1.0 + content
    if part.get("type") == "Precompiled":
        blob = base64.b64decode(part["precompiled_charsmap"])
        texts = blob[4 + int.from_bytes(blob[:4], "little") :].decode("utf-8", "replace").split("\0")
        longest = max(map(len, texts), default=0)
        return float(longest) if longest > _USUAL_CHARSMAP else 1.0
    return max(1.0, float(len(part.get("prepend") or "")))


def backtracks(pattern: str) -> bool:
    """Returns whether the expression repeats groups with repeats or alternatives, or has many repeats in a row."""
    # For each open group: its repeats in the current alternative, and all its repeats and alternatives.
    groups = [[0, 0]]
    at = 0
    while at < len(pattern):
        char, inner, at = pattern[at], 0, at + 1
        if char == "\\":
            at = _PROPERTY.match(pattern, at).end() if at < len(pattern) else at  # type: ignore[union-attr]
        elif char == "[":
            at = _after_class(pattern, at)
        elif char == "(":
            groups.append([0, 0])
            continue
        elif char == ")" and len(groups) > 1:
            inner = groups.pop()[1]
            groups[-1][1] += inner
        elif char == "|":
            groups[-1] = [0, groups[-1][1] + 1]
            continue
        times = _TIMES.match(pattern, at)
        if times is None:
            continue
        at = times.end()
        unbounded = times[0] in "*+" or (times[0].endswith(",}") and bool(times[1]))
        if inner and (unbounded or max(int(times[1] or 0), int(times[2] or 0)) > 1):
            return True
        groups[-1][0] += unbounded
        groups[-1][1] += unbounded or times[0] == "?"
        if groups[-1][0] > _MAX_REPEATS:
            return True
    return False


def _after_class(pattern: str, at: int) -> int:
    """Returns the position after a character class whose content begins at ``at``. Classes may be nested."""
    depth, at = 1, at + (pattern[at : at + 1] == "^")
    at += pattern[at : at + 1] == "]"
    while at < len(pattern) and depth:
        depth += {"[": 1, "]": -1}.get(pattern[at], 0)
        at += 2 if pattern[at] == "\\" else 1
    return at
