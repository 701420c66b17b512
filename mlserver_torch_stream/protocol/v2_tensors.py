"""Reads the input tensors of a V2 request: names, datatypes, shapes and elements checked, BYTES as text.

Knows nothing of what a tensor means. REST gives nested lists and str, gRPC flat lists and bytes; both are read here.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import Any

from mlserver.types import Parameters, RequestInput

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol import values
from mlserver_torch_stream.protocol.unsupported import refuse
from mlserver_torch_stream.protocol.v2_binary import SIZE

INTEGERS = frozenset({"INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"})
NUMBERS = INTEGERS | {"FP16", "FP32", "FP64"}
_DATATYPES = NUMBERS | {"BOOL", "BYTES"}
# KServe's client gives the size of raw contents over gRPC too; ``server`` has compared them.
_TENSOR_PARAMETERS = frozenset({"headers", "content_type", SIZE})
# Nothing here needs more than two dimensions. The product of 40,000 would hold the event loop for 15 seconds.
_MOST_DIMENSIONS = 8
# Of one request. MLServer takes up to 0.1 ms to convert a tensor, and some microseconds for a parameter.
MAX_TENSORS = 1024  # of its inputs, and as many of its outputs
MAX_PARAMETERS = 4096  # of itself and of all its tensors
MAX_STRINGS = 131_072  # elements of one tensor of BYTES


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input tensor, flattened; the elements of a BYTES tensor are str."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    elements: list[Any]

    def require(self, datatypes: Iterable[str]) -> Tensor:
        if self.datatype not in datatypes:
            raise InvalidInput(self.name, f"datatype must be {' or '.join(sorted(datatypes))}, got {self.datatype}")
        return self

    def single(self) -> Any:
        if len(self.elements) != 1:
            raise InvalidInput(self.name, f"must have exactly one element, got {len(self.elements)}")
        return self.elements[0]


def read_tensors(inputs: Iterable[RequestInput], known: frozenset[str], max_model_len: int) -> dict[str, Tensor]:
    """The tensors by name. One that is not known is refused by name, as is a name that stands twice.

    ``max_model_len``: tokens that the model takes, so that longer lists are not even looked at.
    """
    tensors: dict[str, Tensor] = {}
    for given in inputs:
        if given.name not in known:
            refuse(given.name, ..., known, what="input tensor")
        if given.name in tensors:
            raise InvalidInput(given.name, "given twice")
        tensors[given.name] = _read_tensor(given, values.most_elements(max_model_len))
    return tensors


def parameters_of(holder: Parameters | None) -> Mapping[str, Any]:
    """The parameters that are not MLServer's own two fields."""
    return (holder.model_extra or {}) if holder is not None else {}


def check_count(field: str, count: int, most: int, what: str) -> None:
    """Raises InvalidInput."""
    if count > most:
        raise InvalidInput(field, f"must have at most {most} {what}, got {count}")


def read_elements(given: RequestInput, most: int | None = None) -> tuple[str, list[Any]]:
    """Datatype and elements of any tensor, in row-major order and as they arrived: REST's BYTES are str, gRPC's bytes.

    ``most``: elements that it may have; None: any number, but at most ``MAX_STRINGS`` of BYTES. Raises InvalidInput.
    """
    name = given.name
    if len(given.shape) > _MOST_DIMENSIONS:
        raise InvalidInput(name, f"shape must have at most {_MOST_DIMENSIONS} dimensions, got {len(given.shape)}")
    datatype = str(getattr(given.datatype, "value", given.datatype))
    if datatype not in _DATATYPES:
        raise InvalidInput(name, f"unknown datatype {values.shown(datatype)}")
    if most is None and datatype == "BYTES":
        most = MAX_STRINGS
    elements = _flatten(name, getattr(given.data, "root", given.data), len(given.shape), most)
    if any(size < 0 for size in given.shape) or math.prod(given.shape) != len(elements):
        raise InvalidInput(name, f"shape {values.shown(given.shape)} does not fit {len(elements)} elements")
    return datatype, elements


def raw_element(name: str, element: Any, as_base64: bool) -> bytes:
    """One element of BYTES as bytes. Raises InvalidInput."""
    if not isinstance(element, (str, bytes)):
        raise InvalidInput(name, f"must hold strings, got {values.shown(element)}")
    try:
        raw = element.encode() if isinstance(element, str) else element
        return base64.b64decode(raw, validate=True) if as_base64 else raw
    except binascii.Error:
        raise InvalidInput(name, "is not valid base64") from None
    except UnicodeEncodeError:
        raise InvalidInput(name, "is not text that UTF-8 can carry") from None


def _read_tensor(given: RequestInput, most: int) -> Tensor:
    name = given.name
    datatype, elements = read_elements(given, most)
    for key, value in parameters_of(given.parameters).items():
        if key not in _TENSOR_PARAMETERS:
            refuse(key, value, _TENSOR_PARAMETERS, what=f"parameter of tensor {name}")
    if datatype == "BYTES":
        as_base64 = given.parameters is not None and given.parameters.content_type == "base64"
        elements = [_text(name, element, as_base64) for element in elements]
    else:
        _check_elements(name, datatype, elements)
    return Tensor(name, datatype, tuple(given.shape), elements)


def _flatten(name: str, data: Any, depth: int, most: int | None) -> list[Any]:
    """The elements in row-major order; nesting may be as deep as the shape is long, a bare scalar counts as one.

    ``most``: as of ``read_elements``; elements are counted before they are looked at.
    """
    level = data if isinstance(data, list) else [data]
    _check_elements_count(name, level, most)
    for _ in range(depth - 1):
        if not any(isinstance(element, list) for element in level):
            break
        if not all(isinstance(element, list) and len(element) == len(level[0]) for element in level):
            raise InvalidInput(name, "data is nested unevenly")
        level = [inner for element in level for inner in element]
        _check_elements_count(name, level, most)
    return level


def _check_elements_count(name: str, elements: Sized, most: int | None) -> None:
    if most is not None:
        check_count(name, len(elements), most, "elements")


def _check_elements(name: str, datatype: str, elements: list[Any]) -> None:
    allowed: tuple[type, ...] = (bool,) if datatype == "BOOL" else (int,) if datatype in INTEGERS else (int, float)
    for position, element in enumerate(elements):
        if not isinstance(element, allowed) or (isinstance(element, bool) and datatype != "BOOL"):
            raise InvalidInput(name, f"element {position} is not {datatype}: {values.shown(element)}")


def _text(name: str, element: Any, as_base64: bool) -> str:
    if values.is_text(element) and not as_base64:
        return str(element)
    try:
        return raw_element(name, element, as_base64).decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidInput(name, "is not valid UTF-8") from None
