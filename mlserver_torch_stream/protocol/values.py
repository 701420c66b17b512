"""Reads loosely typed values: bounded JSON, numbers that may be strings, and keys that are refused by name.

The size of JSON is bounded, because Python's garbage collector visits each list that a parser creates: parsing 16 MiB
of empty lists takes seconds, and 16 MiB of different keys two seconds.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import orjson

from mlserver_torch_stream.did_you_mean import did_you_mean
from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.types import ModelInfo

MAX_CONTAINERS = 250_000  # lists and objects, which take some 40 ms
MAX_KEYS = 250_000  # keys of all objects, which take some 150 ms if all differ
MAX_STRINGS = 1_250_000  # other strings, which take some 150 ms
_AT_ONCE = 1 << 18  # characters that are counted at once; they fit into a processor's cache

NOT_IMPLEMENTED = "is not implemented by this runtime"


def parse_bounded(raw: bytes) -> Any:
    """Parses JSON within the bounds above. Raises ValueError if the text is not JSON, or has NaN, lone surrogates or
    too deep nesting.
    """
    if len(raw) > min(MAX_CONTAINERS, MAX_KEYS) and _may_hold_too_much(raw):
        _check_counts(raw)
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"is not valid JSON ({error if _is_text(raw) else 'it is not UTF-8 text'})") from None


def _may_hold_too_much(raw: bytes) -> bool:
    """Whether the exact count of ``_check_counts`` is needed. This estimate also counts the marks inside strings."""
    every, opened, keys, quotes = np.frombuffer(raw, np.uint8), 0, 0, 0
    for start in range(0, len(raw), _AT_ONCE):
        characters = every[start : start + _AT_ONCE]
        opened += np.count_nonzero(characters == ord("[")) + np.count_nonzero(characters == ord("{"))
        keys += np.count_nonzero(characters == ord(":"))
        quotes += np.count_nonzero(characters == ord('"'))
    return opened > MAX_CONTAINERS or keys > MAX_KEYS or quotes > 2 * (MAX_STRINGS + MAX_KEYS)


def _check_counts(raw: bytes) -> None:
    """Counts brackets and keys outside strings. A character inside a string is preceded by an odd number of quotes."""
    unescaped = np.frombuffer(raw.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    containers = keys = quotes = 0
    for start in range(0, len(unescaped), _AT_ONCE):
        characters = unescaped[start : start + _AT_ONCE]
        is_quote = characters == ord('"')
        outside = (np.cumsum(is_quote, dtype=np.uint8) + quotes % 2) & 1 == 0
        containers += np.count_nonzero(outside & ((characters == ord("[")) | (characters == ord("{"))))
        keys += np.count_nonzero(outside & (characters == ord(":")))
        quotes += np.count_nonzero(is_quote)
        _refuse_above(MAX_CONTAINERS, containers, "lists and objects")
        _refuse_above(MAX_KEYS, keys, "keys")
        _refuse_above(MAX_STRINGS + MAX_KEYS, quotes // 2, "strings and keys")


def _refuse_above(most: int, count: int, what: str) -> None:
    if count > most:
        raise ValueError(f"has more than {most} {what}")


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


T = TypeVar("T")
Reader = Callable[[Any, ModelInfo], Any]


@dataclass(frozen=True, slots=True)
class Given:
    """A parameter's parsed value, and the name under which the request gave it."""

    spelling: str
    value: Any


Merged = Mapping[str, Given]

_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?")
# The number of prompts or messages that a request may have, even if the model's context is shorter. Four million would
# block the event loop for most of a minute.
_MAX_ELEMENTS = 4096
THINKING = ("enabled", "adaptive", "disabled")  # the types of Anthropic's ``thinking``
MAX_IGNORED = 32  # names of ignored parameters that a request's record keeps
MAX_TOKEN_IDS = 4096  # in one parameter: with a constraint, each costs time in every step
_SEED_MODULUS = 2**63  # torch.Generator.manual_seed accepts smaller seeds


def named(field: str, read: Callable[..., T], *arguments: Any) -> T:
    """Returns the result of a reader. A ValueError becomes an InvalidInput that names ``field``."""
    try:
        return read(*arguments)
    except ValueError as error:
        raise InvalidInput(field, str(error)) from None


def shown(value: Any) -> str:
    """Returns a client's value for an error message, cut to a short text."""
    return reprlib.repr(value)


def printable(key: str) -> str:
    """Returns the beginning of a client's key, without lone surrogates, which a reply cannot contain."""
    return key[:100].encode("utf-8", "backslashreplace").decode() or '""'


def most_elements(max_model_len: int) -> int:
    """Returns the largest number of elements of an input for a model with this context length in tokens."""
    return max(max_model_len, _MAX_ELEMENTS)


def most_checked(info: ModelInfo) -> int:
    """Returns the largest number of messages, parts, biases and other elements that are checked in one value."""
    return max(most_elements(info.max_model_len), info.vocab_size)


def parse_json(text: str) -> Any:
    """Parses bounded JSON, and raises ValueError as ``parse_bounded`` does."""
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
    """Returns the value as an int; it may be given as ``2.0`` or ``"2"``. Raises ValueError for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
        return int(value)
    raise ValueError(f"must be an integer, got {shown(value)}")


def to_number(value: Any) -> float:
    """Returns the value as a finite number; the value may be given as a string. Raises ValueError for anything else."""
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
    """Returns the value as a bool; the value may be given as a string. Raises ValueError for anything else."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ValueError(f"must be true or false, got {shown(value)}")


def integer(low: int, high: int | None = None) -> Reader:
    """Makes a reader of whole numbers from ``low`` to ``high``; None means that there is no upper bound."""

    def read(value: Any, info: ModelInfo) -> int:
        result = to_integer(value)
        if result < low or (high is not None and result > high):
            bounds = f"at least {low}" if high is None else f"between {low} and {high}"
            raise ValueError(f"must be {bounds}, got {shown(value)}")
        return result

    return read


def number(low: float, high: float, *, above_low: bool = False) -> Reader:
    """Makes a reader of numbers from ``low`` to ``high``. ``above_low`` means that ``low`` itself is refused."""

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
    """Reads any signed or unsigned 64-bit integer, and reduces it to the range of the random generator."""
    result = to_integer(value)
    if not -(2**63) <= result < 2**64:
        raise ValueError(f"must fit into 64 bits, got {shown(value)}")
    return result % _SEED_MODULUS


def row_count(value: Any, info: ModelInfo) -> int:
    """Reads a number of answers, from 1 to the model's ``max_num_seqs``."""
    return int(integer(1, info.max_num_seqs)(value, info))


def logprobs(value: Any, info: ModelInfo) -> tuple[bool, int | None]:
    """Reads ``logprobs``: whether log-probabilities are wanted, and how many alternatives.

    The number is None if the value is a boolean, as in OpenAI's chat completions.
    """
    try:
        return boolean(value, info), None
    except ValueError:
        return True, int(integer(0, 20)(value, info))


def token_id(value: Any, info: ModelInfo) -> int:
    """Reads a token id of the model's vocabulary."""
    result = to_integer(value)
    if not 0 <= result < info.vocab_size:
        raise ValueError(f"token id {result} is outside the vocabulary of {info.vocab_size}")
    return result


def token_ids(value: Any, info: ModelInfo) -> tuple[int, ...]:
    """Reads one id or a list of ids; the list may be JSON text."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parse_json(value)
    elements = value if isinstance(value, list) else [value]
    if len(elements) > MAX_TOKEN_IDS:
        raise ValueError(f"must be at most {MAX_TOKEN_IDS} token ids, got {len(elements)}")
    return tuple(token_id(element, info) for element in elements)


def bounded_text(limit: int) -> Reader:
    """Makes a reader of strings of 1 to ``limit`` characters."""

    def read(value: Any, info: ModelInfo) -> str:
        if not is_text(value) or not 0 < len(value) <= limit:
            raise ValueError(f"must be a string of 1 to {limit} characters, got {shown(value)}")
        return str(value)

    return read


def strings(limit: int, max_bytes: int) -> Reader:
    """Makes a reader that accepts one string or a list of up to ``limit`` strings, with at most ``max_bytes`` bytes of
    UTF-8 in total.
    """

    def read(value: Any, info: ModelInfo) -> tuple[str, ...]:
        elements = _string_list(value)
        if len(elements) > limit:
            raise ValueError(f"must be at most {limit} strings, got {len(elements)}")
        for element in elements:
            if not is_text(element) or not element:
                raise ValueError(f"must be a non-empty string or a list of such strings, got {shown(element)}")
        size = sum(len(element.encode()) for element in elements)
        if size > max_bytes:
            raise ValueError(f"must have at most {max_bytes} bytes in all strings together, got {size}")
        return tuple(elements)

    return read


def _string_list(value: Any) -> list[Any]:
    """Returns a list. A list stays as it is, JSON text of a list of strings is parsed, and any other value becomes the
    only element.
    """
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
    """Reads an object, which may be JSON text."""
    if isinstance(value, str):
        value = parse_json(value)
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, got {shown(value)}")
    return value


def tool_choice(value: Any, info: ModelInfo) -> Any:
    """Reads ``auto``, ``none``, ``required``, or an object that names a function; else raises ValueError."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = parse_json(value)
    if isinstance(value, str) and value in ("auto", "none", "required"):
        return value
    if isinstance(value, dict) and value.get("type") not in (None, "function"):
        raise ValueError(f"only functions are implemented, got {shown(value['type'])}")
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"must be auto, none, required or an object that names a function, got {shown(value)}")
    return {"name": function["name"]}


def logit_bias(value: Any, info: ModelInfo) -> Mapping[int, float]:
    """Reads an object that maps token ids, each once, to biases from -100 to 100."""
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


def adapter(value: Any, info: ModelInfo) -> str:
    """Reads the name of a loaded LoRA adapter."""
    if info.adapters is None:
        raise ValueError(NOT_IMPLEMENTED)
    if not isinstance(value, str) or value not in info.adapters:
        raise ValueError(f"no such adapter is loaded: {shown(value)}{did_you_mean(str(value), info.adapters)}")
    return value


def thinking(value: Any, info: ModelInfo) -> bool:
    """Reads Anthropic's ``thinking``; returns whether the model may reason."""
    kind = json_object(value, info).get("type")
    if kind not in THINKING:
        raise ValueError(f"must have a type that is one of {', '.join(THINKING)}, got {shown(kind)}")
    return bool(kind != "disabled")


def one_of(*choices: str) -> Reader:
    """Makes a reader of strings that accepts ``choices`` only."""

    def read(value: Any, info: ModelInfo) -> str:
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}, got {shown(value)}")
        return value

    return read


# Parameters that are not implemented, each with the values that are accepted because they ask for nothing. Some clients
# always send their defaults.
UNIMPLEMENTED: Mapping[str, tuple[Any, ...]] = {
    # OpenAI's
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "suffix": ("",),
    "verbosity": ("medium",),
    "web_search_options": (),
    # Triton's and Hugging Face's
    "details": (False,),
    "lora_name": (),
    # vLLM's
    "allowed_token_ids": ([],),
    "chat_template": (),
    "documents": ([],),
    "early_stopping": (False,),
    "ec_transfer_params": ({},),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "return_mm_kwargs": (True, False),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_prompt_start": (0,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": (),
    "truncation_side": ("left", "right"),  # has no effect without truncate_prompt_tokens
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    # SGLang's
    "ebnf": (),
    "lora_path": (),
    "no_stop_trim": (False,),
    "regex": (),
    "return_hidden_states": (False,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    # llama.cpp's
    "backend_sampling": (False,),
    "dry_multiplier": (0,),
    "dynatemp_exponent": (1,),
    "dynatemp_range": (0,),
    "grammar": ("",),
    "id_slot": (-1,),
    "json_schema": (),
    "lora": ([],),
    "min_keep": (0,),
    "mirostat": (0,),
    "mirostat_eta": (0.1,),
    "mirostat_tau": (5,),
    "n_keep": (0,),
    "n_predict": (-1,),
    "n_probs": (0,),
    "post_sampling_probs": (False,),
    "reasoning_format": ("auto",),
    "repeat_penalty": (1,),
    "return_progress": (False,),
    "return_tokens": (False,),
    "samplers": (),
    "thinking_forced_open": (False,),
    "timings_per_token": (False,),
    "top_n_sigma": (-1,),
    "xtc_probability": (0,),
    "xtc_threshold": (0.1,),
}
# Parameters of OpenAI's bodies on which no answer depends, with the types of their values.
METADATA: Mapping[str, type] = {
    "user": str,
    "metadata": dict,
    "store": bool,
    "safety_identifier": str,
    "prompt_cache_key": str,
    "prompt_cache_options": dict,
    "prompt_cache_retention": str,
    "service_tier": str,
    "client_metadata": dict,  # Codex
    "request_id": str,  # vLLM
    "session_id": str,  # vLLM, Open WebUI
    "chat_id": str,  # Open WebUI
    "rid": str,  # SGLang
    "cache_prompt": bool,  # llama.cpp: prefixes are always cached
    "guided_decoding_backend": str,  # vLLM
    "litellm_session_id": str,
    "litellm_trace_id": str,
}
_UNIMPLEMENTED_PREFIXES = ("sequence_", "shared_memory_")


def harmless_values(key: str) -> tuple[Any, ...]:
    """Returns the values, besides null, that are accepted for a key that is not implemented."""
    return UNIMPLEMENTED.get(key, ())


def refuse_unless_harmless(key: str, value: Any, harmless: Collection[Any]) -> None:
    """Raises InvalidInput for a key that is not implemented, unless its value is null or in ``harmless``."""
    if value is not None and not any(_same(value, each) for each in harmless):
        raise InvalidInput(printable(key), NOT_IMPLEMENTED)


def _same(one: Any, other: Any) -> bool:
    """Compares JSON values: 1 equals 1.0 but not true."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


_ignored: ContextVar[list[str] | None] = ContextVar("ignored", default=None)  # None: unknown names are refused


@contextmanager
def unknown_parameters(*, ignored: bool) -> Iterator[list[str]]:
    """Sets how unknown parameters are treated within the ``with`` block.

    If ``ignored`` is true, unknown parameters are ignored, and their names are added to the list that the context
    manager yields. Otherwise they are refused.
    """
    names: list[str] = []
    token = _ignored.set(names if ignored else None)
    try:
        yield names
    finally:
        _ignored.reset(token)


def ignores(name: str) -> bool:
    """Whether the server ignores unknown parameters; if so, the name is recorded."""
    names = _ignored.get()
    if names is not None and name not in names and len(names) < MAX_IGNORED:
        names.append(name)
    return names is not None


def refuse(key: str, value: Any, known: Collection[str], what: str = "parameter") -> None:
    """Raises InvalidInput for a key that is not in ``known``.

    The key is accepted if its value has no effect, such as null, or if the server ignores unknown parameters.
    """
    if value is None:
        return
    if key in UNIMPLEMENTED or key.startswith(_UNIMPLEMENTED_PREFIXES):
        refuse_unless_harmless(key, value, harmless_values(key))
        return
    name = printable(key)
    if what != "parameter" or not ignores(name):
        raise InvalidInput(name, f"unknown {what}{did_you_mean(name, known, str)}")


SIZE = "binary_data_size"  # the parameter of a tensor whose elements follow the JSON object


def refuse_left_over(count: int) -> None:
    """Raises InvalidInput if ``count`` is not 0. It is the number of bytes after the JSON object that belong to no
    input.
    """
    if count:
        raise InvalidInput("body", f"{count} bytes belong to no input: no input has a {SIZE} for them")
