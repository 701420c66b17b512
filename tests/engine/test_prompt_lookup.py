"""Prompt lookup: what it drafts, and when it drafts nothing."""

import asyncio
from functools import partial
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mlserver_torch_stream.engine.api import EngineRequest, Mailbox
from mlserver_torch_stream.engine.request_state import RequestState, SequenceState
from mlserver_torch_stream.engine.step.drafts import NgramIndex, PromptLookup
from mlserver_torch_stream.engine.text.tokenizer import WindowDetokenizer
from mlserver_torch_stream.types import SamplingParameters

LOOP = asyncio.new_event_loop()
LOOP.close()
KEPT: list[RequestState] = []  # a sequence does not keep its request alive


class Codec:
    special_ids: frozenset[int] = frozenset()

    def detokenizer(self, skip_special_tokens: bool, marks: frozenset[int]) -> WindowDetokenizer:
        return WindowDetokenizer(partial(self.decode, skip_special_tokens=skip_special_tokens), marks)

    def decode(self, ids: Any, skip_special_tokens: bool) -> str:
        return "x" * len(ids)


def index_of(*tokens: int) -> NgramIndex:
    index = NgramIndex()
    index.extend(tokens)
    return index


def test_what_followed_the_latest_occurrence_is_drafted() -> None:
    assert index_of(1, 2, 3, 1, 2, 4, 9, 1, 2).lookup(3) == [4, 9, 1]


def test_the_longest_beginning_decides() -> None:
    assert index_of(5, 1, 2, 3, 6, 1, 2, 4, 5, 1, 2).lookup(1) == [3]


def test_new_tokens_have_no_drafts() -> None:
    assert index_of(1, 2, 3, 4).lookup(4) == []
    assert index_of().lookup(4) == []


def test_a_loop_goes_on() -> None:
    assert index_of(1, 2, 3, 1, 2, 3, 1, 2, 3).lookup(7) == [1, 2, 3, 1, 2, 3, 1]


@given(st.lists(st.lists(st.integers(0, 3), max_size=40), max_size=8), st.integers(5, 20), st.integers(1, 8))
def test_the_index_is_that_of_the_window(pieces: list[list[int]], window: int, most: int) -> None:
    index = NgramIndex(window)
    tokens: list[int] = []
    for piece in pieces:
        index.extend(piece)
        tokens += piece
        assert len(index) == len(tokens)
        assert index.lookup(most) == index_of(*tokens[-window:]).lookup(most)


def test_an_index_of_a_long_sequence_is_bounded() -> None:
    index = index_of(*range(100_000))
    for token in range(50_000):
        index.extend([token])
    assert sum(len(each) for each in vars(index).values() if isinstance(each, list | dict)) < 5 * 8192


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 8))
def test_drafts_followed_the_same_two_tokens_somewhere(tokens: list[int], most: int) -> None:
    drafts = index_of(*tokens).lookup(most)
    assert len(drafts) in (0, most)
    if drafts:
        newest = tokens[-2:]
        assert any(tokens[at : at + 2] == newest and tokens[at + 2] == drafts[0] for at in range(len(tokens) - 2))


def sequence(prompt: list[int], tokens: list[int], max_tokens: int = 100) -> SequenceState:
    request = EngineRequest(tuple(prompt), SamplingParameters(max_tokens=max_tokens))
    state = RequestState(request, Mailbox(LOOP, 1, lambda mailbox: None), Codec(), (), 1000)  # type: ignore[arg-type]
    KEPT.append(state)
    state.sequences[0].tokens += tokens
    return state.sequences[0]


def timed(most: int, base: float, per_token: float) -> PromptLookup:
    lookup = PromptLookup(most)
    for tokens in (1, 4, 8, 16, 33):
        lookup.cost.note(0, tokens, base + per_token * tokens)
    return lookup


def test_a_sequence_drafts_from_its_prompt_and_its_answer() -> None:
    lookup, asked = PromptLookup(3), sequence([1, 2, 3, 4, 5], [1, 2])
    assert lookup.drafts(asked, 1) == [3, 4, 5]
    asked.tokens += [3, 9, 9, 3]
    assert lookup.drafts(asked, 1) == []
    asked.tokens += [9]
    assert lookup.drafts(asked, 1) == [9, 3, 9]


def test_no_draft_is_beyond_the_last_token() -> None:
    assert PromptLookup(8).drafts(sequence([1, 2, 3, 4, 5], [1, 2], max_tokens=4), 1) == [3]


def test_rejected_drafts_end_drafting_and_a_later_try_begins_it_again() -> None:
    lookup, asked = timed(4, 0.010, 0.001), sequence([1, 2, 3, 4, 5], [1, 2])
    assert lookup.drafts(asked, 1)
    tries = 0
    while lookup.drafts(asked, 1):
        lookup.verified(asked, 4, 0)
        tries += 1
    assert tries < 20
    for _ in range(1000):
        if lookup.drafts(asked, 1):
            break
    else:
        raise AssertionError("never tried again")


def test_accepted_drafts_are_worth_it_beside_few_and_not_beside_many() -> None:
    lookup, asked = timed(4, 0.010, 0.001), sequence([1, 2, 3, 4, 5], [1, 2])
    for _ in range(5):
        lookup.verified(asked, 4, 1)
    few = lookup.drafts(asked, 1)
    for _ in range(20):
        lookup.verified(asked, 4, 0)
        lookup.verified(asked, 4, 1)
    assert len(lookup.drafts(asked, 100)) < len(few)


def test_a_forgotten_sequence_begins_anew() -> None:
    lookup, asked = timed(4, 0.010, 0.001), sequence([1, 2, 3, 4, 5], [1, 2])
    assert lookup.drafts(asked, 1)
    lookup.forget([asked])
    asked.tokens[:] = [9, 1]
    assert lookup.drafts(asked, 1) == []


def rejected(lookup: PromptLookup, times: int) -> None:
    """Lets ``times`` sequences have drafts, all of which are wrong."""
    for _ in range(times):
        asked = sequence([1, 2, 3, 4, 5], [1, 2])
        if drafts := lookup.drafts(asked, 1):
            lookup.verified(asked, len(drafts), 0)
        lookup.forget([asked])


def test_a_new_sequence_begins_with_what_the_others_have_measured() -> None:
    lookup = timed(4, 0.010, 0.001)
    assert lookup.drafts(sequence([1, 2, 3, 4, 5], [1, 2]), 1)
    rejected(lookup, 30)
    assert not lookup.drafts(sequence([1, 2, 3, 4, 5], [1, 2]), 1)


def test_what_follows_longer_beginnings_is_measured_for_itself() -> None:
    lookup = timed(4, 0.010, 0.001)
    rejected(lookup, 30)
    assert lookup.drafts(sequence([1, 2, 3, 4, 5], [1, 2, 3]), 1)
