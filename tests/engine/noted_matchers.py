"""Records the token matchers of constraints by weak references, so that a test sees when they are freed."""

from __future__ import annotations

import weakref
from collections.abc import Collection

import pytest

from mlserver_torch_stream.engine.constraints.token_matcher import CompiledConstraint, TokenMatcher


def note_matchers(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[TokenMatcher]]:
    """Returns a list to which every matcher made from now on is added."""
    matchers: list[weakref.ref[TokenMatcher]] = []
    make = CompiledConstraint.matcher

    def noted(self: CompiledConstraint, end_ids: Collection[int], vocab_size: int) -> TokenMatcher:
        matcher = make(self, end_ids, vocab_size)
        matchers.append(weakref.ref(matcher))
        return matcher

    monkeypatch.setattr(CompiledConstraint, "matcher", noted)
    return matchers
