"""Reads the input tensors of a V2 request, from JSON and from the binary tensor data extension.

Over REST, elements arrive as nested lists, in which BYTES are str; over gRPC, as flat lists, in which BYTES are bytes.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any

from mlserver.types import Parameters, RequestInput

from mlserver_torch_stream.errors import GenerationFailed, InvalidInput
from mlserver_torch_stream.protocol import values
from mlserver_torch_stream.protocol.values import SIZE, refuse, refuse_left_over

_DATA = "data"
ALL_BINARY = "binary_data_output"
_ONE_BINARY = "binary_data"
_LENGTH_BYTES = 4  # the length before each element of BYTES, little-endian
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
    """Whether ``inputs`` is V2's list of tensors; a handler's own format may use the name for something else."""
    inputs = body.get("inputs")
    return isinstance(inputs, list) and all(isinstance(each, dict) and "datatype" in each for each in inputs)


def with_elements(body: Mapping[str, Any], raw: bytes, most: int) -> Mapping[str, Any]:
    """Returns the request's object, with the elements of its binary tensors filled in. ``raw`` holds the binary tensors
    one after another.

    ``most`` bounds the elements of a tensor, before they are created: 16 MiB can hold four million empty strings, which
    would block the event loop for seconds. Raises InvalidInput.
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
            raise InvalidInput(
                _name(tensor), f"{SIZE} is {values.shown(size)}, but only {left} bytes of the body are left"
            )
        tensors.append(_with_elements(tensor, raw[position : position + size], most))
        position += size
    refuse_left_over(len(raw) - position)
    return {**body, "inputs": tensors} if raw or tensors else body


def check_strings(name: str, part: bytes, most: int) -> None:
    """Raises InvalidInput if the raw contents of a tensor of BYTES have more than ``most`` elements."""
    if len(part) > most * _LENGTH_BYTES and next(islice(_texts(name, part), most, None), None) is not None:
        raise InvalidInput(name, f"must have at most {most} elements")


@dataclass(frozen=True, slots=True)
class BinaryOutputs:
    """Which outputs a request wants as raw bytes: ``chosen`` by name, ``default`` for all others."""

    default: bool = False
    chosen: Mapping[str, bool] | None = None

    @classmethod
    def wanted_by(cls, body: Any) -> BinaryOutputs:
        """Reads which outputs a request wants as raw bytes; none if the body is not a V2 request. Raises
        InvalidInput.
        """
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
    """Moves the elements of the binary outputs out of a reply's object.

    Returns the object, and the elements as bytes; the bytes are None if no binary output is wanted. Raises
    GenerationFailed.
    """
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
    """Returns the number of bytes after the JSON object that belong to the tensor; None if its elements are in the
    object.
    """
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
            raise InvalidInput(name, "its last element is cut off")
        yield part[start:position]


def _numbers(name: str, datatype: Any, part: bytes, most: int) -> list[Any]:
    """Returns the first ``most`` + 1 numbers, so that the caller can detect that there are too many."""
    if not isinstance(datatype, str) or datatype not in _FORMATS:
        raise InvalidInput(name, f"unknown datatype {values.shown(datatype)}")
    size = struct.calcsize("<" + _FORMATS[datatype])
    count, rest = divmod(len(part), size)
    if rest:
        raise InvalidInput(name, f"{SIZE} is {len(part)}, not a multiple of the {size} bytes of one {datatype}")
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
        raise GenerationFailed(f"output {output['name']}: its elements are not {datatype}") from None


INTEGERS = frozenset({"INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"})
NUMBERS = INTEGERS | {"FP16", "FP32", "FP64"}
_DATATYPES = NUMBERS | {"BOOL", "BYTES"}
# KServe's client sends the size of raw contents over gRPC too, where ``server`` has checked it.
_TENSOR_PARAMETERS = frozenset({"headers", "content_type", SIZE})
# No input needs more than two dimensions, and multiplying 40,000 of them would block the event loop for 15 seconds.
_MAX_DIMENSIONS = 8
# The bounds of one request. MLServer takes up to 0.1 ms to convert a tensor, and microseconds for a parameter.
MAX_TENSORS = 1024  # inputs, and the same number of outputs
MAX_PARAMETERS = 4096  # parameters of the request and of all its tensors
MAX_STRINGS = 131_072  # elements of one tensor of BYTES


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input tensor, flattened; the elements of a BYTES tensor are str."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    elements: list[Any]

    def require(self, datatypes: Iterable[str]) -> Tensor:
        """Returns the tensor itself. Raises InvalidInput if its datatype is not one of ``datatypes``."""
        if self.datatype not in datatypes:
            raise InvalidInput(self.name, f"datatype must be {' or '.join(sorted(datatypes))}, got {self.datatype}")
        return self

    def single(self) -> Any:
        """Returns the only element. Raises InvalidInput unless there is exactly one."""
        if len(self.elements) != 1:
            raise InvalidInput(self.name, f"must have exactly one element, got {len(self.elements)}")
        return self.elements[0]


def read_tensors(inputs: Iterable[RequestInput], known: frozenset[str], max_model_len: int) -> dict[str, Tensor]:
    """Returns the input tensors by name. Raises InvalidInput, also for an unknown or repeated name.

    ``max_model_len`` is the length of the model's context in tokens; longer lists are refused unread.
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
    """Returns the parameters, without MLServer's own fields ``content_type`` and ``headers``."""
    return (holder.model_extra or {}) if holder is not None else {}


def check_count(field: str, count: int, most: int, what: str) -> None:
    """Raises InvalidInput, which names ``field``, if ``count`` exceeds ``most``. ``what`` is the counted noun."""
    if count > most:
        raise InvalidInput(field, f"must have at most {most} {what}, got {count}")


def read_elements(given: RequestInput, most: int | None = None) -> tuple[str, list[Any]]:
    """Returns the datatype of a tensor and its elements in row-major order. Elements of BYTES are str from REST and
    bytes from gRPC.

    ``most`` bounds the elements; with None any number is allowed, except for BYTES, which have at most ``MAX_STRINGS``.
    Raises InvalidInput.
    """
    name = given.name
    if len(given.shape) > _MAX_DIMENSIONS:
        raise InvalidInput(name, f"shape must have at most {_MAX_DIMENSIONS} dimensions, got {len(given.shape)}")
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
    """Returns one element of BYTES as bytes. Raises InvalidInput."""
    if not isinstance(element, (str, bytes)):
        raise InvalidInput(name, f"must contain strings, got {values.shown(element)}")
    try:
        raw = element.encode() if isinstance(element, str) else element
        return base64.b64decode(raw, validate=True) if as_base64 else raw
    except binascii.Error:
        raise InvalidInput(name, "is not valid base64") from None
    except UnicodeEncodeError:
        raise InvalidInput(name, "is text that UTF-8 cannot encode") from None


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
    """Returns the elements in row-major order. Lists may be nested ``depth`` deep; a bare scalar is one element.

    ``most`` is checked before the elements are.
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
