"""Characters of several bytes and stop strings, split everywhere, through the whole server.

The model generates a byte per token, so that every character and every stop string is split at every position.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.reliability.calls import PLAIN_ENDPOINTS, Endpoint, Result, ask
from tests.reliability.reciter import LOOP, TEXT, recital
from tests.server.harness import Server

_WHOLE = recital(2 * LOOP)
_LENGTHS = (1, 2, 3, 7)
_FAST = (Endpoint.REST_STREAM, Endpoint.REST_UNARY, Endpoint.GRPC_UNARY)


def _each(*endpoints: Endpoint) -> pytest.MarkDecorator:
    """In the fast tests, only one stream and both unary endpoints."""
    given = [each if each in _FAST else pytest.param(each, marks=pytest.mark.slow) for each in endpoints]
    return pytest.mark.parametrize("endpoint", given)


def _ask(server: Server, endpoint: Endpoint, **parameters: Any) -> Result:
    result = ask(endpoint, server, "recite", ignore_eos=True, **parameters)
    assert result.code is None, result.said
    for reply in result.replies:
        assert "�" not in reply.text or reply is result.replies[-1], "no character is ever split"
    return result


@_each(*PLAIN_ENDPOINTS)
def test_an_answer_may_end_inside_any_character(plain: Server, endpoint: Endpoint) -> None:
    for tokens in range(1, LOOP + 1):
        result = _ask(plain, endpoint, max_tokens=tokens)
        assert (result.text, result.reasons) == (recital(tokens), ["length"])
        assert result.replies[-1].outputs["num_output_tokens"] == [tokens]


@pytest.mark.long
@_each(*PLAIN_ENDPOINTS)
def test_an_answer_may_begin_after_any_character(plain: Server, endpoint: Endpoint) -> None:
    for character in TEXT:
        result = ask(endpoint, plain, "recite", character, max_tokens=LOOP, ignore_eos=True)
        assert result.text == recital(LOOP, after=character)


@pytest.mark.long
@pytest.mark.parametrize("length", _LENGTHS)
@_each(Endpoint.REST_STREAM, Endpoint.GRPC_STREAM)
def test_a_stop_string_anywhere_ends_the_answer_before_it(plain: Server, endpoint: Endpoint, length: int) -> None:
    for begin in range(len(TEXT)):
        stop = _WHOLE[begin : begin + length]
        result = _ask(plain, endpoint, max_tokens=2 * LOOP, stop=stop)
        assert (result.text, result.reasons) == (_WHOLE[: _WHOLE.index(stop)], ["stop"]), stop


@_each(Endpoint.REST_UNARY, Endpoint.GRPC_UNARY)
def test_a_stop_string_ends_an_answer_at_once_too(plain: Server, endpoint: Endpoint) -> None:
    for begin in range(len(TEXT)):
        stop = _WHOLE[begin : begin + 3]
        result = _ask(plain, endpoint, max_tokens=2 * LOOP, stop=stop)
        assert (result.text, result.reasons) == (_WHOLE[: _WHOLE.index(stop)], ["stop"]), stop


@_each(Endpoint.REST_STREAM, Endpoint.GRPC_STREAM)
def test_what_only_begins_like_a_stop_string_is_said(plain: Server, endpoint: Endpoint) -> None:
    for begin, length in itertools.product(range(0, len(TEXT), 3), (2, 5)):
        near = _WHOLE[begin : begin + length] + "≠"  # shares the lead byte of € too
        result = _ask(plain, endpoint, max_tokens=LOOP, stop=near)
        assert (result.text, result.reasons) == (recital(LOOP), ["length"]), near


@_each(Endpoint.REST_STREAM, Endpoint.GRPC_STREAM)
def test_a_stop_string_may_be_said_if_asked_for(plain: Server, endpoint: Endpoint) -> None:
    for begin in range(0, len(TEXT), 4):
        stop = _WHOLE[begin : begin + 2]
        result = _ask(plain, endpoint, max_tokens=2 * LOOP, stop=stop, include_stop_str_in_output=True)
        assert result.text == _WHOLE[: _WHOLE.index(stop) + 2]
