"""The binary tensor data extension of V2 over REST: elements as raw bytes after the JSON object.

Knows nothing of what a tensor means, nor of HTTP: it is given the object and the bytes that followed it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from mlserver_torch_stream.errors import GenerationFailed, InvalidInput
from mlserver_torch_stream.protocol import values

SIZE = "binary_data_size"
_DATA = "data"
ALL_BINARY = "binary_data_output"
_ONE_BINARY = "binary_data"
_LENGTH_BYTES = 4  # before each element of BYTES, little-endian
_FORMATS = {
    "BOOL": "?",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}


def has_tensors(body: Mapping[str, Any]) -> bool:
    """True if the body has V2's ``inputs``, a list of tensors; a handler's own object may have other ``inputs``."""
    inputs = body.get("inputs")
    return isinstance(inputs, list) and all(isinstance(each, dict) and "datatype" in each for each in inputs)


def with_elements(body: Mapping[str, Any], raw: bytes, most: int) -> Mapping[str, Any]:
    """The request's object with the elements of its binary tensors, which follow each other in ``raw``.

    ``most``: elements that a tensor may have. More are refused before they are made: the four million empty strings
    of 16 MiB would keep the event loop for seconds.
    """
    inputs = body.get("inputs")
    tensors = []
    position = 0
    for tensor in inputs if isinstance(inputs, list) else []:
        size = _size(tensor)
        if size is None:
            tensors.append(tensor)
            continue
        if size > len(raw) - position:
            left = len(raw) - position
            raise InvalidInput(_name(tensor), f"{SIZE} is {values.shown(size)}, {left} bytes are left of the body")
        tensors.append(_with_elements(tensor, raw[position : position + size], most))
        position += size
    refuse_left_over(len(raw) - position)
    return {**body, "inputs": tensors} if raw or tensors else body


def check_strings(name: str, part: bytes, most: int) -> None:
    """Raises InvalidInput if the raw contents of a tensor of BYTES have more than ``most`` elements."""
    if len(part) > most * _LENGTH_BYTES and next(islice(_texts(name, part), most, None), None) is not None:
        raise InvalidInput(name, f"must have at most {most} elements")


def refuse_left_over(count: int) -> None:
    """Raises InvalidInput if ``count`` bytes after the JSON object are no input's elements."""
    if count:
        raise InvalidInput("body", f"{count} bytes belong to no input: no input has a {SIZE} for them")


@dataclass(frozen=True, slots=True)
class BinaryOutputs:
    """Which outputs a request wants as raw bytes. ``chosen`` is by name; ``default`` holds for all other outputs."""

    default: bool = False
    chosen: Mapping[str, bool] | None = None

    @classmethod
    def wanted_by(cls, body: Any) -> BinaryOutputs:
        """Reads a request. A body that is no V2 request wants no binary outputs. Raises InvalidInput."""
        if not isinstance(body, Mapping) or not has_tensors(body):
            return cls()
        outputs = body.get("outputs")
        chosen = {}
        for output in outputs if isinstance(outputs, list) else []:
            flag = _flag(output, _ONE_BINARY)
            if flag is not None:
                chosen[str(output.get("name"))] = flag
        return cls(bool(_flag(body, ALL_BINARY)), chosen)

    @property
    def asked(self) -> str | None:
        """The name of the parameter that asks for binary outputs; None if no parameter does."""
        if self.default:
            return ALL_BINARY
        return _ONE_BINARY if any((self.chosen or {}).values()) else None

    def __call__(self, name: str) -> bool:
        return (self.chosen or {}).get(name, self.default)


def attach_binary(body: dict[str, Any], wanted: BinaryOutputs) -> tuple[dict[str, Any], bytes | None]:
    """A reply's object without the elements of its binary outputs, and these as bytes, which are None if the request
    wants no binary output. Raises GenerationFailed."""
    if not wanted.asked:
        return body, None
    outputs, parts = [], []
    for output in body["outputs"]:
        if not wanted(output["name"]):
            outputs.append(output)
            continue
        part = _packed(output)
        kept = {key: value for key, value in output.items() if key != _DATA}
        outputs.append({**kept, "parameters": {**output.get("parameters", {}), SIZE: len(part)}})
        parts.append(part)
    return {**body, "outputs": outputs}, b"".join(parts)


def _name(tensor: Mapping[str, Any]) -> str:
    name = tensor.get("name")
    return str(name) if values.is_text(name) else "inputs"


def _size(tensor: Any) -> int | None:
    """The number of bytes of the tensor's elements after the object; None if the elements are in the object."""
    parameters = tensor.get("parameters") if isinstance(tensor, dict) else None
    if not isinstance(parameters, dict) or SIZE not in parameters:
        return None
    size = parameters[SIZE]
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise InvalidInput(_name(tensor), f"{SIZE} must be a number of bytes, got {values.shown(size)}")
    if _DATA in tensor:
        raise InvalidInput(_name(tensor), f"has both {_DATA} and {SIZE}")
    return size


def _with_elements(tensor: dict[str, Any], part: bytes, most: int) -> dict[str, Any]:
    name, datatype = _name(tensor), tensor.get("datatype")
    if datatype == "BYTES":
        elements: list[Any] = list(islice(_texts(name, part), most + 1))
    else:
        elements = _numbers(name, datatype, part, most)
    if len(elements) > most:
        raise InvalidInput(name, f"must have at most {most} elements")
    parameters = {key: value for key, value in tensor["parameters"].items() if key != SIZE}
    return {**tensor, "parameters": parameters, _DATA: elements}


def _texts(name: str, part: bytes) -> Iterator[bytes]:
    position = 0
    while position < len(part):
        start = position + _LENGTH_BYTES
        position = start + int.from_bytes(part[position:start], "little")
        if start > len(part) or position > len(part):
            raise InvalidInput(name, "its last element is longer than the bytes that are left of it")
        yield part[start:position]


def _numbers(name: str, datatype: Any, part: bytes, most: int) -> list[Any]:
    """The numbers, but at most one more than ``most``."""
    if not isinstance(datatype, str) or datatype not in _FORMATS:
        raise InvalidInput(name, f"unknown datatype {values.shown(datatype)}")
    size = struct.calcsize("<" + _FORMATS[datatype])
    count, rest = divmod(len(part), size)
    if rest:
        raise InvalidInput(name, f"{SIZE} is {len(part)}, no multiple of the {size} bytes of one {datatype}")
    return list(struct.unpack_from(f"<{min(count, most + 1)}{_FORMATS[datatype]}", part))


def _flag(holder: Any, name: str) -> bool | None:
    parameters = holder.get("parameters") if isinstance(holder, dict) else None
    flag = parameters.get(name) if isinstance(parameters, dict) else None
    if flag is not None and not isinstance(flag, bool):
        raise InvalidInput(name, f"must be true or false, got {values.shown(flag)}")
    return flag


def _packed(output: Mapping[str, Any]) -> bytes:
    datatype, elements = output["datatype"], output[_DATA]
    try:
        if datatype == "BYTES":
            raw = [element if isinstance(element, bytes) else element.encode() for element in elements]
            return b"".join(len(element).to_bytes(_LENGTH_BYTES, "little") + element for element in raw)
        numbers = [math.nan if element is None else element for element in elements]
        return struct.pack(f"<{len(numbers)}{_FORMATS[datatype]}", *numbers)
    except (AttributeError, KeyError, OverflowError, struct.error):
        raise GenerationFailed(f"output {output['name']}: its elements are no {datatype}") from None
