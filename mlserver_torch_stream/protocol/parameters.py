"""Turns the levels of a request's parameters into one set of sampling parameters.

Knows nothing of MLServer's types: a level is names and values, whatever carried them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol import values
from mlserver_torch_stream.protocol.parameter_table import PARAMETERS, Parameter
from mlserver_torch_stream.protocol.unsupported import refuse
from mlserver_torch_stream.types import ModelInfo, SamplingParameters

_BY_SPELLING: Mapping[str, Parameter] = {
    spelling: parameter for parameter in PARAMETERS for spelling in (parameter.name, *parameter.aliases)
}
TENSORS: Mapping[str, Parameter] = {name: parameter for name, parameter in _BY_SPELLING.items() if parameter.tensor}

_SAMPLING = "sampling_parameters"
_DEFAULTS = "default_sampling"
OPENAI_BODIES = ("llm_parameters", "kwargs")
SILENT = frozenset({"headers", "content_type", "binary_data_output"})
# Parameters of OpenAI's bodies that change no token: they are accepted and have no effect on sampling.
SILENT_IN_BODY = frozenset(
    {"model", "user", "metadata", "store", "stream_options", "safety_identifier"}
    | {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
)
_MEANS_SAMPLING = ("top_p", "top_k", "min_p", "typical_p")


@dataclass(frozen=True, slots=True)
class Given:
    """A value that was read, and the name by which the request gave it."""

    spelling: str
    value: Any


Merged = Mapping[str, Given]


def merge_parameters(
    request: Mapping[str, Any], tensors: Sequence[tuple[str, Any]], sampling_tensor: str | None, info: ModelInfo
) -> Merged:
    """The parameters of a request by canonical name. If several levels have one, the most specific level counts.

    ``request`` are its parameters, ``tensors`` its scalar tensors, ``sampling_tensor`` the JSON of the tensor
    ``sampling_parameters``. Every level is validated, also where a higher one has the same parameter.
    """
    sampling = [
        *object_pairs(_SAMPLING, sampling_tensor, info),
        *object_pairs(_SAMPLING, request.get(_SAMPLING), info),
    ]
    bodies = [pair for name in OPENAI_BODIES for pair in object_pairs(name, request.get(name), info)]
    body = [(key, _as_in_openai(key, value)) for key, value in bodies if key not in SILENT_IN_BODY]
    own = [(key, value) for key, value in request.items() if key not in (_SAMPLING, *OPENAI_BODIES, *SILENT)]
    _refuse_null(own)
    merged: dict[str, Given] = {}
    for level in (body, own, tensors, sampling):
        merged.update(_read_level(level, info))
    return merged


def resolve_sampling(given: Merged, info: ModelInfo, *, need_logprobs: bool = False) -> SamplingParameters:
    """The sampling parameters of a request, or the model's defaults where it gives none. ``need_logprobs``: the reply
    shows log-probabilities."""
    default = read_defaults(info)
    effective = {**default, **given}
    fields = {
        parameter.field: effective[parameter.name].value
        for parameter in PARAMETERS
        if parameter.field is not None and parameter.name in effective
    }
    fields["temperature"] = _temperature(given, default, info)
    fields["logprobs"], fields["top_logprobs"] = _logprobs(given, default, need_logprobs)
    sampling = SamplingParameters(**fields)
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        if "min_tokens" not in given:
            return replace(sampling, min_tokens=sampling.max_tokens)
        raise InvalidInput(effective["min_tokens"].spelling, f"must be at most max_tokens ({sampling.max_tokens})")
    return sampling


def check_defaults(info: ModelInfo) -> None:
    """Raises InvalidInput if a request without parameters would be refused. ``load`` calls it before any client can."""
    try:
        resolve_sampling({}, info)
    except InvalidInput as error:
        raise error if error.field == _DEFAULTS else InvalidInput(_DEFAULTS, error.message) from None


def read_defaults(info: ModelInfo) -> Merged:
    """The model's default sampling, validated."""
    pairs = [(key, value) for key, value in info.default_sampling.items() if key != "do_sample"]
    try:
        return _read_level(pairs, info)
    except InvalidInput as err:
        raise InvalidInput(_DEFAULTS, err.message) from None


def object_pairs(name: str, value: Any, info: ModelInfo) -> list[tuple[str, Any]]:
    return [] if value is None else list(values.named(name, values.json_object, value, info).items())


def _as_in_openai(key: str, value: Any) -> Any:
    """A string of an OpenAI body as a list of one where lists are read: elsewhere it may be a list, written as JSON."""
    parameter = _BY_SPELLING.get(key)
    return [value] if isinstance(value, str) and parameter is not None and parameter.several else value


def _refuse_null(pairs: Sequence[tuple[str, Any]]) -> None:
    """MLServer turns every gRPC parameter it cannot represent, such as a double, into null."""
    for key, value in pairs:
        if value is None:
            if key not in _BY_SPELLING:
                refuse(key, ..., _BY_SPELLING)
            raise InvalidInput(key, "has no value; over gRPC a fractional number must be sent as a string")


def _read_level(pairs: Sequence[tuple[str, Any]], info: ModelInfo) -> dict[str, Given]:
    """One level by canonical name; null means not given, as in OpenAI's API."""
    level: dict[str, Given] = {}
    for spelling, value in pairs:
        if value is None:
            continue
        parameter = _BY_SPELLING.get(spelling)
        if parameter is None:
            refuse(spelling, value, _BY_SPELLING)
            continue
        result = values.named(spelling, parameter.read, value, info)
        earlier = level.setdefault(parameter.name, Given(spelling, result))
        if earlier.value != result:
            raise InvalidInput(spelling, _differing(earlier.spelling, spelling))
    return level


def _differing(one: str, other: str) -> str:
    return "given twice with different values" if one == other else f"contradicts {one}, which is the same parameter"


def _temperature(given: Merged, default: Merged, info: ModelInfo) -> float:
    """0, which is greedy, unless the request or the model's defaults have a parameter of sampling.

    If the defaults have ``do_sample``, as a generation config has it, that decides for them.
    """
    if "temperature" in given:
        return float(given["temperature"].value)
    usual = float(default["temperature"].value) if "temperature" in default else 1.0
    if any(name in given for name in _MEANS_SAMPLING):
        return usual if usual > 0 else 1.0
    named = any(name in default for name in ("temperature", *_MEANS_SAMPLING))
    return usual if info.default_sampling.get("do_sample", named) else 0.0


def _logprobs(given: Merged, default: Merged, needed: bool) -> tuple[bool, int]:
    """Whether log-probabilities are given, and of how many alternatives. A request that says no, or that gives a number
    as its ``logprobs``, overrides a default ``top_logprobs``."""
    both = {**default, **given}
    wanted, counted = both["logprobs"].value if "logprobs" in both else (False, None)
    said_all = "logprobs" in given and "top_logprobs" not in given and (not wanted or counted is not None)
    if said_all or "top_logprobs" not in both:
        return wanted or needed, counted or 0
    top = both["top_logprobs"]
    of_one_level = ("logprobs" in given) == ("top_logprobs" in given)
    if counted is not None and counted != top.value and of_one_level:
        raise InvalidInput(top.spelling, f"contradicts {both['logprobs'].spelling}")
    if top.value and not (wanted or needed):
        raise InvalidInput(top.spelling, "needs logprobs")
    return wanted or needed, int(top.value)
