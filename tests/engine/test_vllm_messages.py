"""What vLLM's worker sends is checked field by field: a value that the server could not use is a broken message."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from mlserver_torch_stream.engine.vllm.messages import STATS, Logprobs, Output, Ready, decode_outputs, encode_outputs
from mlserver_torch_stream.handlers.frames import BrokenFrame

_ROW: list[Any] = [1, [5, 6], "stop", 3, None, None, None]
_STATS: dict[str, Any] = dict.fromkeys(STATS, 0)
_READY = {"vocab_size": 400, "max_model_len": 64, "max_num_seqs": 8, "kv_cache_tokens": 0, "kv_cache_bytes": 0}


def _row(place: int, value: Any) -> dict[str, Any]:
    return {"of": [[*_ROW[:place], value, *_ROW[place + 1 :]]], "stats": None}


def test_outputs_go_through_the_wire_as_they_were() -> None:
    outputs = [
        Output(1, [5, 2**32 - 1], "length", 3, [Logprobs(-0.5, [(5, -0.5)]), Logprobs(-1.0, [(6, -math.inf)])]),
        Output(2, (), "error", error="too long", field="max_tokens"),
    ]
    frame = encode_outputs(outputs, None)
    found, stats = decode_outputs(json.loads(frame[8:]))
    assert stats is None
    assert [list(vars(each).values()) for each in found] == [
        [1, [5, 2**32 - 1], "length", 3, outputs[0].logprobs, None, None],
        [2, [], "error", None, None, "too long", "max_tokens"],
    ]


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"of": 5, "stats": None},
        {"of": [5], "stats": None},
        {"of": ["1234567"], "stats": None},
        {"of": [_ROW[:6]], "stats": None},
        *(_row(0, value) for value in (None, "1", True, 1.0, -1, 10**400)),
        *(_row(1, value) for value in (None, 5, "56", [True], [-1], [2**32], [10**30], [5.0], [[5]])),
        *(_row(2, value) for value in (1, "for fun", ["stop"], "stop\n" * 10_000)),
        *(_row(3, value) for value in ("3", -1, 3.0, 10**400)),
        *(_row(4, value) for value in ([], [[-1.0, []]], 5, [[-1.0, [[5]]], [-1.0, []]])),
        *(_row(4, 2 * [[value, []]]) for value in ("-1", None, [], 10**400)),
        *(_row(4, 2 * [[-1.0, [pair]]]) for pair in ([-1, -1.0], [2**32, -1.0], ["5", -1.0], [5, "-1"])),
        {"of": [], "stats": []},
        {"of": [], "stats": {}},
        *({"of": [], "stats": {**_STATS, "kv_usage": value}} for value in (None, math.nan, math.inf, 10**400)),
        *({"of": [], "stats": {**_STATS, "steps": value}} for value in (None, "1", True, 0.5, -1, 2**53, 10**400)),
    ],
    ids=lambda header: json.dumps(header)[:60],
)
def test_outputs_with_a_wrong_value_are_a_broken_message(header: dict[str, Any]) -> None:
    with pytest.raises(BrokenFrame, match="a malformed 'outputs' message: ") as broken:
        decode_outputs(header)
    assert "\n" not in str(broken.value) and len(str(broken.value)) < 3000


@pytest.mark.parametrize(("sent", "shown"), [(1e308, 1.0), (-0.1, 0.0), (0.5, 0.5)])
def test_the_share_of_the_cache_is_one_at_most(sent: float, shown: float) -> None:
    _, stats = decode_outputs({"of": [], "stats": {**_STATS, "kv_usage": sent}})
    assert stats is not None and stats.kv_usage == shown


@pytest.mark.parametrize("name", _READY)
@pytest.mark.parametrize("value", [None, "8", True, 8.0, -1, math.inf, 2**53])
def test_a_report_with_an_impossible_number_is_a_broken_message(name: str, value: Any) -> None:
    Ready.of(_READY, "0.32.0")
    with pytest.raises(BrokenFrame, match="a malformed 'ready' message: "):
        Ready.of({**_READY, name: value}, "0.32.0")
    with pytest.raises(BrokenFrame, match="a malformed 'ready' message: KeyError"):
        Ready.of({key: number for key, number in _READY.items() if key != name}, "0.32.0")


@pytest.mark.parametrize("missing", [5, [5], [["1", "why"]], [[1]], [[-1, "why"]], None])
def test_a_report_with_an_impossible_list_of_adapters_is_a_broken_message(missing: Any) -> None:
    assert Ready.of({**_READY, "missing": [[1, "why\nnot"]]}, "0.32.0").missing == {1: r"why\nnot"}
    with pytest.raises(BrokenFrame, match="a malformed 'ready' message: "):
        Ready.of({**_READY, "missing": missing}, "0.32.0")
