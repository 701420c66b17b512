"""JSON of more lists and objects than a server can read beside its streams is refused before it is read."""

from __future__ import annotations

import math
from typing import Any

import orjson
import pytest

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.values import MAX_CONTAINERS, MAX_KEYS, MAX_STRINGS, parse_bounded, parse_json
from mlserver_torch_stream.server.rest.connection import parse_object

_MANY = MAX_CONTAINERS + 1


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a": [' + b"[]," * MAX_CONTAINERS + b"1]}",
        b'{"a": [' + b"{}," * MAX_CONTAINERS + b"1]}",
        b'{"a": ["\\"", ' + b'"[",[],' * MAX_CONTAINERS + b"1]}",
        b"[" * _MANY,  # no JSON at all: the bound comes first
    ],
    ids=["lists", "objects", "among strings", "open"],
)
def test_too_many_lists_and_objects_are_refused_before_they_are_read(raw: bytes) -> None:
    with pytest.raises(ValueError, match=f"holds more than {MAX_CONTAINERS} lists and objects"):
        parse_bounded(raw)
    with pytest.raises(ValueError, match="holds more than"):
        parse_json(raw.decode())
    with pytest.raises(InvalidInput, match=r"^body: holds more than"):
        parse_object(raw)


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b'{"a":' + b'"\\":",' * 9 + b'"' * (2 * MAX_STRINGS + 2 * MAX_KEYS) + b"}", "strings and keys"),
        (b"{" + b'"[":1,' * MAX_KEYS + b'"a":1}', "keys"),
    ],
    ids=["strings", "keys"],
)
def test_too_many_strings_or_keys_are_refused_before_they_are_read(raw: bytes, what: str) -> None:
    with pytest.raises(ValueError, match=f"holds more than [0-9]+ {what}$"):
        parse_bounded(raw)


@pytest.mark.parametrize(
    "value",
    [
        {"a": [[]] * (MAX_CONTAINERS - 2)},
        {"prompt": "[{" * _MANY},
        {"prompt": "a: b, " * _MANY, '":': ['":"'] * (MAX_STRINGS - 1)},
        {"prompt": '\\"[' * _MANY, "b": "\\", "c": ["[", "{"] * 10},
        ["[\\", "\\\\[", "\\\\\\", "["] * MAX_CONTAINERS,
        [],
    ],
    ids=["most", "in a string", "keys in strings", "behind escapes", "in strings", "none"],
)
def test_brackets_in_strings_do_not_count(value: Any) -> None:
    assert parse_bounded(orjson.dumps(value)) == value


@pytest.mark.parametrize("raw", [b"", b"{", b"NaN", b'"\xff"', b'"\\ud800"', b"[" * 5000])
def test_what_is_no_json_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match="is not valid JSON"):
        parse_bounded(raw)


def test_a_lone_surrogate_of_a_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="it is not UTF-8 text"):
        parse_json('"\ud800"')
    assert math.isclose(parse_json("0.5"), 0.5)
