"""A stop string is found however the text is split, and no part of it is sent."""

from __future__ import annotations

import asyncio
import gc
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlserver_torch_stream.engine.api import EngineRequest, Mailbox
from mlserver_torch_stream.engine.request_state import RequestState
from mlserver_torch_stream.engine.text.answer_writer import StopMatcher, StopStrings
from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from mlserver_torch_stream.types import SamplingParameters
from tests.engine.tiny_tokenizers import byte_level
from tests.examples import examples


def _reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Returns the text up to the first complete stop string, the longest if several end there. Checks every prefix."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if found:
            hit = max(found, key=len)
            return text[: end if include else end - len(hit)], hit
    return text, None


def _run(chunks: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    matcher = StopMatcher(StopStrings(stops), include)
    released = "".join([matcher.push(chunk) for chunk in chunks])
    return released + matcher.flush(), matcher.hit


def _splits(text: str) -> list[list[str]]:
    cuts = [cut for size in range(len(text)) for cut in combinations(range(1, len(text)), size)]
    return [[text[a:b] for a, b in zip((0, *cut), (*cut, len(text)), strict=True)] for cut in cuts]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("xabcy", ["ab", "abc"]),
        ("xabcy", ["abc", "bc"]),
        ("xabcd", ["abcd", "bc"]),
        ("aaab", ["aab"]),
        ("ababac", ["abac"]),
        ("no stop", ["stops"]),
        ("a€🙂é", ["🙂"]),
        ("Grüße", ["üß", "ße"]),
        ("\n\n\nx", ["\n\n"]),
        ("end</s", ["</s>"]),
        ("abc", []),
        ("abc", [""]),
    ],
)
def test_every_split_gives_the_same(text: str, stops: list[str], include: bool) -> None:
    expected = _reference(text, stops, include)
    for chunks in _splits(text):
        assert _run(chunks, stops, include) == expected


_alphabet = st.text(alphabet="ab€", max_size=40)


@given(
    chunks=st.lists(_alphabet, max_size=12),
    stops=st.lists(st.text(alphabet="ab€", max_size=6), max_size=5),
    include=st.booleans(),
)
@examples(1000)
def test_it_agrees_with_the_reference(chunks: list[str], stops: list[str], include: bool) -> None:
    assert _run(chunks, stops, include) == _reference("".join(chunks), stops, include)


@given(text=_alphabet, stops=st.lists(st.text(alphabet="ab€", min_size=1, max_size=6), min_size=1, max_size=4))
@examples(500)
def test_it_holds_back_no_more_than_could_become_a_stop(text: str, stops: list[str]) -> None:
    matcher, released, seen = StopMatcher(StopStrings(stops), False), "", ""
    for char in text:
        released += matcher.push(char)
        seen += char
        if matcher.hit is not None:
            return
        held = seen[len(released) :]
        longest = max((n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0)
        assert len(held) == longest


def test_with_include_nothing_is_held() -> None:
    matcher = StopMatcher(StopStrings(["</s>"]), include=True)
    assert [matcher.push(chunk) for chunk in ("a<", "/s", ">b", "c")] == ["a<", "/s", ">", ""]
    assert matcher.hit == "</s>"


def test_flush_releases_a_part_that_never_became_a_stop() -> None:
    matcher = StopMatcher(StopStrings(["STOP"]), include=False)
    assert matcher.push("x STO") == "x "
    assert matcher.hit is None
    assert matcher.flush() == "STO"
    assert matcher.flush() == ""


def test_after_a_hit_nothing_comes() -> None:
    matcher = StopMatcher(StopStrings(["b"]), include=False)
    assert matcher.push("abc") == "a"
    assert matcher.push("more") == ""
    assert matcher.flush() == ""


def test_the_sequences_of_a_request_share_what_is_built_from_its_stop_strings() -> None:
    def built() -> int:
        return sum(type(each) is StopStrings for each in gc.get_objects())

    before, loop = built(), asyncio.new_event_loop()
    asked = EngineRequest((1,), SamplingParameters(stop=("a" * 1000, "b" * 1000), n=16))
    request = RequestState(asked, Mailbox(loop, 16, lambda mailbox: None), TextCodec(byte_level()), (), 100)
    assert len(request.sequences) == 16 and built() == before + 1
    loop.close()
