"""Reads one loosely typed value: numbers that may be strings, lists and objects that may be JSON.

Knows nothing of which parameter it reads: every reader raises ValueError, to whose text ``named`` adds the name.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.bounded_json import parse_bounded
from mlserver_torch_stream.types import ModelInfo

T = TypeVar("T")
Reader = Callable[[Any, ModelInfo], Any]

_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?")
# A request may have this many prompts or messages, however short the model's context is. Four million would hold the
# event loop for most of a minute.
_MOST_ELEMENTS = 4096
MAX_TOKEN_IDS = 4096  # in one parameter: with a constraint, each costs time in every step
_SEED_MODULUS = 2**63  # what torch.Generator.manual_seed takes without wrapping


def named(field: str, read: Callable[..., T], *arguments: Any) -> T:
    """The result of a reader. Its ValueError becomes the InvalidInput of ``field``."""
    try:
        return read(*arguments)
    except ValueError as error:
        raise InvalidInput(field, str(error)) from None


def shown(value: Any) -> str:
    """The value as an error message quotes it: short, whatever the client sent."""
    return reprlib.repr(value)


def printable(key: str) -> str:
    """The beginning of a client's key, without lone surrogates, which a reply cannot contain."""
    return key[:100].encode("utf-8", "backslashreplace").decode() or '""'


def most_elements(max_model_len: int) -> int:
    """The most elements that an input may have for a model of this context."""
    return max(max_model_len, _MOST_ELEMENTS)


def most_checked(info: ModelInfo) -> int:
    """The most elements that are looked at in one value of a request: messages and their parts, biases of tokens."""
    return max(most_elements(info.max_model_len), info.vocab_size)


def parse_json(text: str) -> Any:
    """Raises ValueError."""
    return parse_bounded(text.encode("utf-8", "surrogatepass"))


def is_text(value: Any) -> bool:
    """True for a str that UTF-8 can encode. Lone surrogates, which some JSON parsers accept, cannot be encoded."""
    if not isinstance(value, str):
        return False
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def to_integer(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
        return int(value)
    raise ValueError(f"must be an integer, got {shown(value)}")


def to_number(value: Any) -> float:
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"must be a number, got {shown(value)}")
    try:
        as_float = float(value)
    except OverflowError:
        as_float = math.inf
    if not math.isfinite(as_float):
        raise ValueError("must be a finite number")
    return as_float


def boolean(value: Any, info: ModelInfo) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ValueError(f"must be true or false, got {shown(value)}")


def integer(low: int, high: int | None = None) -> Reader:
    def read(value: Any, info: ModelInfo) -> int:
        result = to_integer(value)
        if result < low or (high is not None and result > high):
            bounds = f"at least {low}" if high is None else f"between {low} and {high}"
            raise ValueError(f"must be {bounds}, got {shown(value)}")
        return result

    return read


def number(low: float, high: float, *, above_low: bool = False) -> Reader:
    def read(value: Any, info: ModelInfo) -> float:
        result = to_number(value)
        if result < low or result > high or (above_low and result == low):
            bounds = f"above {low} and at most {high}" if above_low else f"between {low} and {high}"
            raise ValueError(f"must be {bounds}, got {shown(value)}")
        return result

    return read


def top_k(value: Any, info: ModelInfo) -> int:
    """Reads ``top_k``; 0, and -1 as in vLLM, mean off."""
    result = to_integer(value)
    if result < -1:
        raise ValueError(f"must be at least 0, or -1 for off, got {shown(value)}")
    return max(result, 0)


def seed(value: Any, info: ModelInfo) -> int:
    """Any signed or unsigned 64-bit integer, taken modulo the range of the random generator."""
    result = to_integer(value)
    if not -(2**63) <= result < 2**64:
        raise ValueError(f"must fit 64 bits, got {shown(value)}")
    return result % _SEED_MODULUS


def row_count(value: Any, info: ModelInfo) -> int:
    return int(integer(1, info.max_num_seqs)(value, info))


def logprobs(value: Any, info: ModelInfo) -> tuple[bool, int | None]:
    """Whether log-probabilities are wanted and, if the value is a number as in OpenAI's completions, of how many
    alternatives."""
    try:
        return boolean(value, info), None
    except ValueError:
        return True, int(integer(0, 20)(value, info))


def token_id(value: Any, info: ModelInfo) -> int:
    result = to_integer(value)
    if not 0 <= result < info.vocab_size:
        raise ValueError(f"token id {result} is outside the vocabulary of {info.vocab_size}")
    return result


def token_ids(value: Any, info: ModelInfo) -> tuple[int, ...]:
    """One id, or a list of ids, which may be written as JSON."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parse_json(value)
    elements = value if isinstance(value, list) else [value]
    if len(elements) > MAX_TOKEN_IDS:
        raise ValueError(f"must be at most {MAX_TOKEN_IDS} token ids, got {len(elements)}")
    return tuple(token_id(element, info) for element in elements)


def strings(limit: int, max_bytes: int) -> Reader:
    """Reads one string or a list of at most ``limit`` strings, which have at most ``max_bytes`` in UTF-8 together."""

    def read(value: Any, info: ModelInfo) -> tuple[str, ...]:
        elements = _string_list(value)
        if len(elements) > limit:
            raise ValueError(f"must be at most {limit} strings, got {len(elements)}")
        for element in elements:
            if not is_text(element) or not element:
                raise ValueError(f"must be a non-empty string or a list of them, got {shown(element)}")
        size = sum(len(element.encode()) for element in elements)
        if size > max_bytes:
            raise ValueError(f"must have at most {max_bytes} bytes in all strings together, got {size}")
        return tuple(elements)

    return read


def _string_list(value: Any) -> list[Any]:
    """A list as it is; a string that is a JSON list of strings as that list; any other value as its only element."""
    if isinstance(value, list):
        return value
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            parsed = parse_json(value)
        except ValueError:
            return [value]
        if isinstance(parsed, list) and parsed and all(isinstance(element, str) for element in parsed):
            return parsed
    return [value]


def json_object(value: Any, info: ModelInfo) -> dict[str, Any]:
    """An object, which may be written as JSON."""
    if isinstance(value, str):
        value = parse_json(value)
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, got {shown(value)}")
    return value


def tool_choice(value: Any, info: ModelInfo) -> Any:
    """``auto``, ``none``, ``required``, or an object that names a function. Raises ValueError."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = parse_json(value)
    if isinstance(value, str) and value in ("auto", "none", "required"):
        return value
    if isinstance(value, dict) and value.get("type") not in (None, "function"):
        raise ValueError(f"only functions are implemented, got {shown(value['type'])}")
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"must be auto, none, required or a function with its name, got {shown(value)}")
    return {"name": function["name"]}


def logit_bias(value: Any, info: ModelInfo) -> Mapping[int, float]:
    read_bias = number(-100, 100)
    given, biases = json_object(value, info), dict[int, float]()
    if len(given) > MAX_TOKEN_IDS:
        raise ValueError(f"must be at most {MAX_TOKEN_IDS} token ids, got {len(given)}")
    for key, bias in given.items():
        identifier = token_id(key, info)
        if identifier in biases:
            raise ValueError(f"names token id {identifier} twice")
        biases[identifier] = read_bias(bias, info)
    return biases


def one_of(*choices: str) -> Reader:
    def read(value: Any, info: ModelInfo) -> str:
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}, got {shown(value)}")
        return value

    return read
