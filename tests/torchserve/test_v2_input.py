"""Sequences and time limits in V2 requests."""

from __future__ import annotations

import math
from typing import Any

import pytest
from mlserver.types import InferenceRequest

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.handlers.config.model_config import read_config
from mlserver_torch_stream.handlers.pool.handler_request import HandlerRequest
from mlserver_torch_stream.handlers.runtime.v2_messages import read_parts, read_request
from mlserver_torch_stream.protocol.v2_tensors import has_tensors


def _read(parameters: dict[str, Any], **config: Any) -> HandlerRequest:
    tensor = {"name": "body", "datatype": "BYTES", "shape": [1], "data": ["x"]}
    payload = InferenceRequest.model_validate({"inputs": [tensor], "parameters": parameters})
    return read_request(payload, "r", read_config({}, config), "")


def test_a_sequence_that_starts_without_an_id_is_given_one() -> None:
    first, second = (_read({"sequence_start": True}, sequenceBatching=True) for _ in range(2))
    assert first.sequence_id and first.sequence_id != second.sequence_id
    assert first.headers["ts_request_sequence_id"] == first.sequence_id
    assert first.headers["ts_request_sequence_start"] == "true" and "sequence_start" not in first.headers


def test_a_sequence_ends_by_its_id_only() -> None:
    ends = _read({"sequence_id": "s", "sequence_end": True}, sequenceBatching=True)
    assert (ends.sequence_id, ends.sequence_end) == ("s", True)
    assert ends.headers["ts_request_sequence_end"] == "true"
    with pytest.raises(InvalidInput, match="sequence_id: is needed"):
        _read({"sequence_end": True}, sequenceBatching=True)


@pytest.mark.parametrize(
    ("header", "parameters", "ends"),
    [
        ({"X-Last": "True"}, {}, True),
        ({"X-Last": "false"}, {}, False),
        ({"x-last": "true"}, {"sequence_end": False}, False),
        ({"ts_request_sequence_end": "true"}, {}, False),
    ],
)
def test_the_header_of_torchserves_variable_ends_a_sequence_where_no_parameter_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, header: dict[str, str], parameters: dict[str, Any], ends: bool
) -> None:
    monkeypatch.setenv("TS_REQUEST_SEQUENCE_END", "X-Last")
    monkeypatch.setenv("TS_REQUEST_SEQUENCE_ID", "X-Session")
    read = read_parts([], {**header, "X-SESSION": "s"}, "r", read_config({}, {"sequenceBatching": True}), parameters)
    assert (read.sequence_id, read.sequence_end) == ("s", ends)


def test_a_request_without_a_sequence_begins_one() -> None:
    """Only with ``sequenceBatching``; the names are TorchServe's."""
    begun = _read({}, sequenceBatching=True)
    assert begun.sequence_id is not None and begun.sequence_id.startswith("ts-seq-")
    assert begun.headers == {"ts_request_sequence_id": begun.sequence_id, "ts_request_sequence_start": "true"}
    assert _read({}).sequence_id is None


def test_torchserves_variables_name_the_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TS_REQUEST_SEQUENCE_ID", "x-session")
    assert _read({"sequence_id": 7}).headers["x-session"] == "7"


@pytest.mark.parametrize(
    ("timeout", "bound", "seconds"), [(None, 0, None), (500_000, 0, 0.5), ("500000", 300, 0.3), (None, 2000, 2.0)]
)
def test_the_shorter_of_two_time_limits_counts(timeout: Any, bound: int, seconds: float | None) -> None:
    parameters = {} if timeout is None else {"timeout": timeout}
    assert _read(parameters, clientTimeoutInMills=bound).timeout_s == seconds


@pytest.mark.parametrize("timeout", [0, -1, "soon", [1], "9" * 400, "9" * 5000, math.inf, math.nan])
def test_a_time_limit_that_is_none_is_refused(timeout: Any) -> None:
    with pytest.raises(InvalidInput, match="timeout"):
        _read({"timeout": timeout})


def test_only_a_list_of_tensors_makes_a_body_v2() -> None:
    assert has_tensors({"inputs": [{"name": "x", "datatype": "BYTES"}]}) and has_tensors({"inputs": []})
    assert not any(map(has_tensors, ({}, {"inputs": "text"}, {"inputs": [1, 2]}, {"inputs": [{"a": 1}]})))


def test_a_matrix_is_given_as_deep_as_its_shape_however_it_was_sent() -> None:
    for data in ([1, 2, 3, 4], [[1, 2], [3, 4]]):
        payload = InferenceRequest.model_validate(
            {"inputs": [{"name": "m", "datatype": "INT64", "shape": [2, 2], "data": data}]}
        )
        [part] = read_request(payload, "r", read_config({}, {}), "").parts
        assert part.value == b"[[1,2],[3,4]]"


@pytest.mark.parametrize("data", [[[1, 2], [3]], [[1, 2], 3], [[1], [2], [3]]])
@pytest.mark.parametrize("envelope", ["", "kservev2"])
def test_nested_elements_that_do_not_fit_their_shape_are_refused(data: Any, envelope: str) -> None:
    payload = InferenceRequest.model_validate(
        {"inputs": [{"name": "m", "datatype": "INT64", "shape": [2, 2], "data": data}]}
    )
    with pytest.raises(InvalidInput, match=r"^m: "):
        read_request(payload, "r", read_config({}, {}), envelope)
