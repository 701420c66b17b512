"""The table of request parameters, and the rules that merge their levels into one set of sampling parameters.

The reference pages are made of the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol import constraints, values
from mlserver_torch_stream.protocol.values import refuse
from mlserver_torch_stream.types import ModelInfo, SamplingParameters

MAX_STOP_STRINGS = 16
MAX_BAD_WORDS = 64
MAX_STRING_BYTES = 4096  # of all strings of one parameter: the engine's thread searches for them in every answer
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
LEAST_REPETITION_PENALTY = 0.01  # it divides logits, which are infinite when it is next to nothing


@dataclass(frozen=True, slots=True)
class Parameter:
    """One request parameter: its names, how its value is read, and what becomes of the value.

    ``field``: the field of SamplingParameters that has the value; None if no field has it as it is.
    ``tensor``: the datatype of the parameter as an input tensor; None if it cannot be one.
    """

    name: str
    meaning: str  # one cell of docs/settings.md, whose links it may have
    read: values.Reader
    aliases: tuple[str, ...] = ()
    field: str | None = None
    tensor: str | None = None
    several: bool = False  # as a tensor it may have more than one element


def _sampling(
    name: str, meaning: str, read: values.Reader, *aliases: str, tensor: str | None = None, several: bool = False
) -> Parameter:
    return Parameter(name, meaning, read, aliases, name, tensor, several)


def _flag(name: str, meaning: str) -> Parameter:
    return Parameter(name, meaning, values.boolean, tensor="BOOL")


def _stream_mode(value: Any, info: ModelInfo) -> str:
    if value == "session":
        raise ValueError("session is not implemented")
    return str(values.one_of("each", "prompt")(value, info))


PARAMETERS: tuple[Parameter, ...] = (
    _sampling(
        "max_tokens",
        "Most tokens of the answer; 256 unless the model or its settings name another default.",
        values.integer(1),
        "max_new_tokens",
        "max_completion_tokens",
        tensor="INT64",
    ),
    _sampling("min_tokens", "Least tokens of the answer.", values.integer(0)),
    _sampling("temperature", "0 is greedy decoding.", values.number(0, 100), tensor="FP32"),
    _sampling(
        "top_p",
        "1: off. A request with `temperature`, `top_p`, `top_k`, `min_p` or `typical_p` asks for sampling.",
        values.number(0, 1, above_low=True),
        tensor="FP32",
    ),
    _sampling("top_k", "0 or -1: off.", values.top_k, tensor="INT64"),
    _sampling("min_p", "As in transformers; 0: off.", values.number(0, 1)),
    _sampling("typical_p", "As in transformers; 1: off.", values.number(0, 1, above_low=True)),
    _sampling(
        "repetition_penalty",
        "Applies to tokens of the prompt and the answer, as in transformers; 1: off.",
        values.number(LEAST_REPETITION_PENALTY, 100),
    ),
    _sampling("presence_penalty", "Applies to tokens of the answer, as in OpenAI's API.", values.number(-2, 2)),
    _sampling("frequency_penalty", "Applies to tokens of the answer, as in OpenAI's API.", values.number(-2, 2)),
    _sampling("logit_bias", "An object of up to 4,096 token ids and numbers from -100 to 100.", values.logit_bias),
    _sampling(
        "bad_words",
        "Up to 64 strings that are never generated, of 4,096 bytes together.",
        values.strings(MAX_BAD_WORDS, MAX_STRING_BYTES),
        tensor="BYTES",
        several=True,
    ),
    _sampling(
        "stop",
        "Up to 16 strings that end the answer, of 4,096 bytes together.",
        values.strings(MAX_STOP_STRINGS, MAX_STRING_BYTES),
        "stop_words",
        tensor="BYTES",
        several=True,
    ),
    _sampling("stop_token_ids", "Up to 4,096 ids of tokens that end the answer.", values.token_ids),
    _sampling("include_stop_str_in_output", "The answer ends with the stop string.", values.boolean),
    Parameter(
        "eos_token_id",
        "Ids that replace the model's own end token.",
        values.token_ids,
        ("eos_token_ids",),
        field="eos_token_ids",
    ),
    _sampling("ignore_eos", "The model's end token does not end the answer.", values.boolean),
    _sampling("seed", "The same seed gives the same tokens.", values.seed, "random_seed", tensor="INT64"),
    _sampling("n", "Answers per prompt, at most `max_num_seqs`.", values.row_count),
    Parameter("logprobs", "True, or the number of alternatives for each token.", values.logprobs),
    Parameter("top_logprobs", "Number of alternatives for each token, up to 20.", values.integer(0, 20)),
    _sampling("skip_special_tokens", "Leaves special tokens out of the text; default true.", values.boolean),
    Parameter("chat_template_kwargs", "An object for the chat template.", values.json_object),
    Parameter(
        "add_generation_prompt",
        "False: the chat template does not begin an answer; true: it does, also after a message of the assistant.",
        values.boolean,
    ),
    Parameter(
        "continue_final_message",
        "The answer continues the last message; default: if the assistant has said it.",
        values.boolean,
    ),
    Parameter(
        "add_special_tokens",
        "Adds the tokenizer's special tokens; default: to texts that do not begin with one, not to conversations.",
        values.boolean,
    ),
    Parameter(
        "enable_thinking",
        "True: the model may [reason](tools.md#reasoning) first; false: it must not.",
        values.boolean,
    ),
    Parameter(
        "thinking",
        "The same as an object: its `type` is `enabled`, `adaptive` or `disabled`. No budget bounds the reasoning.",
        values.thinking,
    ),
    Parameter(
        "tool_choice",
        "As in OpenAI's API: `auto`, `none`, `required`, or one function ([tools](tools.md)).",
        values.tool_choice,
        tensor="BYTES",
    ),
    Parameter(
        "parallel_tool_calls",
        "False: the answer ends with its first call ([tools](tools.md)).",
        values.boolean,
        tensor="BYTES",
    ),
    Parameter(
        "reasoning_effort",
        "`none`, `minimal`, `low`, `medium`, `high` or `xhigh`, for [templates that read it](tools.md#reasoning).",
        values.one_of(*get_args(Effort)),
    ),
    Parameter(
        "response_format",
        "OpenAI's: with `json_object` or `json_schema` the answer [matches it](structured-output.md).",
        constraints.response_format,
        tensor="BYTES",
    ),
    Parameter(
        "structured_outputs",
        "vLLM's [constraints](structured-output.md): `json`, `json_object`, `regex`, `choice` or `grammar`.",
        constraints.structured_outputs,
    ),
    *(
        Parameter(f"guided_{kind}", f"vLLM's older name of `{kind}` of `structured_outputs`.", constraints.guided(kind))
        for kind in constraints.GUIDED
    ),
    Parameter(
        "guided_decoding_guide",
        "The schema, regular expression or grammar for `guided_decoding_guide_type`.",
        constraints.text,
        tensor="BYTES",
    ),
    Parameter(
        "guided_decoding_guide_type",
        "TensorRT-LLM's: `json`, `json_schema`, `regex` or `ebnf_grammar`.",
        constraints.guide_type,
        tensor="BYTES",
    ),
    Parameter(
        "stream_mode",
        "The meaning of several messages on one gRPC stream: [`each` or `prompt`](protocol.md#grpc).",
        _stream_mode,
    ),
    Parameter("priority", "1 is highest; the default is 100.", values.integer(0, 2**31 - 1)),
    Parameter("timeout", "Most microseconds from arrival to the last token.", values.integer(0, 2**53)),
    Parameter("echo", "True: the prompt is put before the answer; not in a stream.", values.boolean),
    # Asks for what every reply has: a response with triton_final_response, empty or not.
    Parameter(
        "triton_enable_empty_final_response",
        "No effect: every reply ends with a final response.",
        values.boolean,
    ),
    _flag("stream", "False on a stream endpoint asks for one response."),
    _flag("exclude_input_in_output", "False means the same as `echo`."),
    _flag("return_finish_reason", "Adds the output `finish_reason`; default true."),
    _flag("return_cumulative_logprob", "Adds the output `cumulative_logprob`."),
    _flag("return_logprobs", "Adds the output `logprobs`."),
    _flag("return_token_ids", "Adds the output `token_ids`."),
    _flag("return_num_input_tokens", "Adds the output `num_input_tokens`; default true."),
    _flag("return_num_output_tokens", "Adds the output `num_output_tokens`; default true."),
)


_BY_SPELLING: Mapping[str, Parameter] = {
    spelling: parameter for parameter in PARAMETERS for spelling in (parameter.name, *parameter.aliases)
}
TENSORS: Mapping[str, Parameter] = {name: parameter for name, parameter in _BY_SPELLING.items() if parameter.tensor}

_SAMPLING = "sampling_parameters"
_DEFAULTS = "default_sampling"
OPENAI_BODIES = ("llm_parameters", "kwargs")
SILENT = frozenset({"headers", "content_type", "binary_data_output"})
# Parameters of OpenAI's bodies that change no token: they are accepted and have no effect on sampling.
SILENT_IN_BODY = frozenset({"model", "stream_options", *values.METADATA})
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
                continue
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
