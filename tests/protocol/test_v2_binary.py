"""Binary tensors: elements are decoded as they were encoded, and an error names the tensor that is malformed."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlserver_torch_stream.errors import GenerationFailed, InvalidInput
from mlserver_torch_stream.protocol.v2_tensors import BinaryOutputs, attach_binary, with_elements

_ALL = BinaryOutputs(True)
_MOST = 1000


def _tensor(name: str, datatype: str, size: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [1], "parameters": {"binary_data_size": size}, **more}


def _read(*tensors: dict[str, Any], raw: bytes = b"") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = with_elements({"inputs": list(tensors)}, raw, _MOST)["inputs"]
    return found


_INTEGERS = {f"{sign}INT{bits}": (sign, bits) for sign in ("", "U") for bits in (8, 16, 32, 64)}


def _elements(datatype: str) -> st.SearchStrategy[Any]:
    if datatype in _INTEGERS:
        sign, bits = _INTEGERS[datatype]
        return st.integers(0, 2**bits - 1) if sign else st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    if datatype in ("FP16", "FP32", "FP64"):
        return st.floats(width=int(datatype[2:]), allow_nan=False)  # type: ignore[call-overload]
    return st.booleans() if datatype == "BOOL" else st.binary()


@pytest.mark.parametrize("datatype", [*_INTEGERS, "FP16", "FP32", "FP64", "BOOL", "BYTES"])
@given(data=st.data())
def test_elements_come_back_as_they_were_sent(datatype: str, data: st.DataObject) -> None:
    elements = data.draw(st.lists(_elements(datatype)))
    output = {"name": "a", "datatype": datatype, "shape": [len(elements)], "data": elements}
    sent, raw = attach_binary({"id": "x", "outputs": [output]}, _ALL)
    (tensor,) = sent["outputs"]
    assert "data" not in tensor and tensor["parameters"] == {"binary_data_size": len(raw)}
    assert _read(tensor, raw=raw) == [{**output, "parameters": {}}]


def test_bytes_are_each_behind_their_length_in_four_little_endian_bytes() -> None:
    body = {"outputs": [{"name": "a", "datatype": "BYTES", "shape": [2], "data": ["ü", b"\xff"]}]}
    assert attach_binary(body, _ALL)[1] == b"\x02\0\0\0\xc3\xbc" + b"\x01\0\0\0\xff"


def test_binary_tensors_and_others_stand_in_any_order() -> None:
    plain = {"name": "plain", "datatype": "INT32", "shape": [1], "data": [7]}
    found = _read(_tensor("a", "UINT8", 2), plain, _tensor("b", "INT32", 4), raw=b"\x01\x02" + struct.pack("<i", -3))
    assert [tensor["data"] for tensor in found] == [[1, 2], [7], [-3]]


@pytest.mark.parametrize(
    ("tensor", "raw", "said"),
    [
        (_tensor("a", "INT32", 8), b"\0" * 4, "a: binary_data_size is 8, but only 4 bytes of the body are left"),
        (_tensor("a", "INT32", 4), b"\0" * 9, "5 bytes belong to no input"),
        (_tensor("a", "INT32", 6), b"\0" * 6, "a: binary_data_size is 6, not a multiple of the 4 bytes"),
        (_tensor("a", "BYTES", 6), b"\x03\0\0\0ab", "a: its last element is cut off"),
        (_tensor("a", "BYTES", 3), b"\x03\0\0", "a: its last element is cut off"),
        (_tensor("a", "BF16", 2), b"\0\0", "a: unknown datatype 'BF16'"),
        (_tensor("a", {}, 2), b"\0\0", "a: unknown datatype {}"),
        (_tensor("a", "INT32", -4), b"", "a: binary_data_size must be a number of bytes, got -4"),
        (_tensor("a", "INT32", True), b"\0", "a: binary_data_size must be a number of bytes, got True"),
        (_tensor("a", "INT32", "4"), b"\0" * 4, "a: binary_data_size must be a number of bytes, got '4'"),
        (_tensor("a", "INT32", 10**30), b"", "a: binary_data_size is 1000"),
        (_tensor("a", "INT32", 4, data=[1]), b"\0" * 4, "a: has both data and binary_data_size"),
    ],
)
def test_what_does_not_fit_is_refused_by_the_tensors_name(tensor: dict[str, Any], raw: bytes, said: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        _read(tensor, raw=raw)
    assert said in caught.value.message


@pytest.mark.parametrize(("datatype", "size"), [("BYTES", 4), ("INT8", 1), ("FP64", 8)])
def test_no_more_elements_are_made_than_a_tensor_may_have(datatype: str, size: int) -> None:
    assert len(_read(_tensor("a", datatype, _MOST * size), raw=bytes(_MOST * size))[0]["data"]) == _MOST
    tensor = _tensor("a", datatype, 2**24)
    tracemalloc.start()
    with pytest.raises(InvalidInput, match=f"a: must have at most {_MOST} elements"):
        _read(tensor, raw=bytes(2**24))
    most_memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most_memory < 3 * 2**24  # the body, and its copy without the other tensors


@pytest.mark.parametrize("body", [{}, {"inputs": 3}, {"inputs": [3, {"parameters": 4}]}, {"text_input": "a"}])
def test_what_is_no_request_is_left_to_those_who_read_it(body: dict[str, Any]) -> None:
    assert with_elements(body, b"", _MOST) == body
    with pytest.raises(InvalidInput, match="3 bytes belong to no input"):
        with_elements(body, b"abc", _MOST)


def _wanted(parameters: dict[str, Any], *outputs: dict[str, Any]) -> BinaryOutputs:
    return BinaryOutputs.wanted_by({"inputs": [], "parameters": parameters, "outputs": list(outputs)})


def test_what_is_said_of_one_output_beats_what_is_said_of_all() -> None:
    plain, binary = ({"name": name, "parameters": {"binary_data": name == "yes"}} for name in ("no", "yes"))
    for default in (True, False):
        wanted = _wanted({"binary_data_output": default}, plain, binary, {"name": "neither"})
        assert [wanted(name) for name in ("no", "yes", "neither", "unnamed")] == [False, True, default, default]
    assert _wanted({}, plain).asked is None
    assert _wanted({}, plain, binary).asked == "binary_data"
    assert _wanted({"binary_data_output": True}, plain).asked == "binary_data_output"
    assert BinaryOutputs.wanted_by({"parameters": {"binary_data_output": True}}).asked is None


@pytest.mark.parametrize("value", [1, "true", []])
def test_a_wish_is_true_or_false(value: Any) -> None:
    for given_at in ({"binary_data_output": value}, {}):
        with pytest.raises(InvalidInput, match="must be true or false"):
            _wanted(given_at, {"name": "a", "parameters": {"binary_data": value}})


def test_elements_that_are_not_of_their_datatype_fail_by_the_outputs_name() -> None:
    for datatype, elements in (("INT32", ["a"]), ("INT32", [2**40]), ("BYTES", [3]), ("ODD", [1]), ("INT32", [[1]])):
        with pytest.raises(GenerationFailed, match="output a: its elements are not"):
            attach_binary({"outputs": [{"name": "a", "datatype": datatype, "shape": [1], "data": elements}]}, _ALL)
