"""Merges the parameters that a request has at several levels, and reads the options that all spellings share.

Every function may raise InvalidInput, which names the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol import v2_names as names
from mlserver_torch_stream.protocol.bodies import validate
from mlserver_torch_stream.protocol.chat import check_template_arguments, chosen_tools
from mlserver_torch_stream.protocol.constraints import GUIDE, GUIDE_TYPE, GUIDED, of_guide
from mlserver_torch_stream.protocol.openai_models import StreamOptions
from mlserver_torch_stream.protocol.parameters import (
    BY_SPELLING,
    DEFAULT_MAX_TOKENS,
    OPENAI_BODIES,
    PARAMETERS,
    SILENT,
    SILENT_IN_BODY,
)
from mlserver_torch_stream.protocol.values import Given, Merged, json_object, named, refuse
from mlserver_torch_stream.types import (
    ChatPrompt,
    Constraint,
    GenerationRequest,
    ModelInfo,
    Prompt,
    ReplyOptions,
    SamplingParameters,
    StreamMode,
    TextPrompt,
)

# Every response of a stream repeats the id up to three times, within lines of 48 KiB.
MAX_ID_CHARACTERS = 256
_STREAM_OPTIONS, _CONTINUOUS = "stream_options", "continuous_usage_stats"
_STREAM_OPTIONS_MODEL = TypeAdapter(StreamOptions)
_EFFORT, _SWITCH = "reasoning_effort", "enable_thinking"
_CONSTRAINTS = ("response_format", "structured_outputs", *(f"guided_{kind}" for kind in GUIDED), GUIDE_TYPE)
_GENERATION_PROMPT, _CONTINUE, _SPECIAL = "add_generation_prompt", "continue_final_message", "add_special_tokens"
_CHAT_ONLY = (
    *("chat_template_kwargs", "tool_choice", "parallel_tool_calls", _EFFORT, _SWITCH, "thinking"),
    *(_GENERATION_PROMPT, _CONTINUE),
)

_SAMPLING = "sampling_parameters"
_DEFAULTS = "default_sampling"
_MEANS_SAMPLING = ("top_p", "top_k", "min_p", "typical_p")

Objects = tuple[Mapping[str, Any], ...]


def merge_parameters(
    request: Mapping[str, Any], tensors: Sequence[tuple[str, Any]], sampling_tensor: str | None, info: ModelInfo
) -> Merged:
    """Returns the parameters of a request by canonical name. If a parameter is at several levels, the most specific
    level wins.

    ``request`` holds the request's parameters, ``tensors`` its scalar tensors, ``sampling_tensor`` the JSON of its
    tensor ``sampling_parameters``. Every level is validated, even if a more specific one has the same parameter.
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


def resolve_sampling(
    given: Merged,
    info: ModelInfo,
    *,
    max_tokens: int | None = None,
    need_logprobs: bool = False,
    echo: bool = False,
) -> SamplingParameters:
    """Returns the sampling parameters of a request. Missing ones are taken from the model's defaults.

    ``max_tokens`` applies if neither the request nor the model sets one. With ``need_logprobs`` the reply shows
    log-probabilities; with ``echo`` it repeats the prompt.
    """
    default = read_defaults(info)
    effective = {**default, **given}
    fields = {
        parameter.field: effective[parameter.name].value
        for parameter in PARAMETERS
        if parameter.field is not None and parameter.name in effective
    }
    fields.setdefault("max_tokens", max_tokens)
    fields["temperature"] = _temperature(given, default, info)
    fields["logprobs"], fields["top_logprobs"] = _logprobs(given, default, need_logprobs)
    sampling = SamplingParameters(**fields)
    if sampling.max_tokens == 0 and sampling.prompt_logprobs is None and not echo:
        raise InvalidInput(
            effective["max_tokens"].spelling, "0 needs echo or prompt_logprobs: the answer would be empty"
        )
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        if "min_tokens" not in given:
            return replace(sampling, min_tokens=sampling.max_tokens)
        raise InvalidInput(effective["min_tokens"].spelling, f"must be at most max_tokens ({sampling.max_tokens})")
    return sampling


def check_defaults(info: ModelInfo) -> None:
    """Raises InvalidInput if the model's defaults are wrong, so that every request without parameters would be refused.

    ``load`` calls it, so that the operator sees the error and not the clients.
    """
    try:
        resolve_sampling({}, info)
    except InvalidInput as error:
        raise error if error.field == _DEFAULTS else InvalidInput(_DEFAULTS, error.message) from None


def read_defaults(info: ModelInfo) -> Merged:
    """Returns the model's default sampling parameters, validated."""
    pairs = [(key, value) for key, value in info.default_sampling.items() if key != "do_sample"]
    try:
        return _read_level(pairs, info)
    except InvalidInput as err:
        raise InvalidInput(_DEFAULTS, err.message) from None


def object_pairs(name: str, value: Any, info: ModelInfo) -> list[tuple[str, Any]]:
    """Returns the entries of a parameter that is an object or the JSON text of an object. Raises InvalidInput
    otherwise.
    """
    return [] if value is None else list(named(name, json_object, value, info).items())


def _as_in_openai(key: str, value: Any) -> Any:
    """Puts a string from an OpenAI body into a list if the parameter may be a list.

    Otherwise the reader would parse the string, which in other spellings may be a list in JSON.
    """
    parameter = BY_SPELLING.get(key)
    return [value] if isinstance(value, str) and parameter is not None and parameter.several else value


def _refuse_null(pairs: Sequence[tuple[str, Any]]) -> None:
    """Raises InvalidInput for null, because MLServer turns a gRPC parameter of an unknown type, such as double, into
    null.
    """
    for key, value in pairs:
        if value is None:
            if key not in BY_SPELLING:
                refuse(key, ..., BY_SPELLING)
                continue
            raise InvalidInput(key, "has no value; over gRPC a fractional number must be sent as a string")


def _read_level(pairs: Sequence[tuple[str, Any]], info: ModelInfo) -> dict[str, Given]:
    """Returns the parameters of one level by canonical name. As in OpenAI's API, null means that the parameter is
    absent.
    """
    level: dict[str, Given] = {}
    for spelling, value in pairs:
        if value is None:
            continue
        parameter = BY_SPELLING.get(spelling)
        if parameter is None:
            refuse(spelling, value, BY_SPELLING)
            continue
        result = named(spelling, parameter.read, value, info)
        earlier = level.setdefault(parameter.name, Given(spelling, result))
        if earlier.value != result:
            raise InvalidInput(spelling, _differing(earlier.spelling, spelling))
    return level


def _differing(one: str, other: str) -> str:
    return "given twice with different values" if one == other else f"contradicts {one}, which is the same parameter"


def _temperature(given: Merged, default: Merged, info: ModelInfo) -> float:
    """Returns the temperature. It is 0, which means greedy, unless the request or the model's defaults set a sampling
    parameter.

    If the defaults contain ``do_sample``, as generation configs may, it decides whether the model samples by default.
    """
    if "temperature" in given:
        return float(given["temperature"].value)
    usual = float(default["temperature"].value) if "temperature" in default else 1.0
    if any(name in given for name in _MEANS_SAMPLING):
        return usual if usual > 0 else 1.0
    named = any(name in default for name in ("temperature", *_MEANS_SAMPLING))
    return usual if info.default_sampling.get("do_sample", named) else 0.0


def _logprobs(given: Merged, default: Merged, needed: bool) -> tuple[bool, int]:
    """Returns whether log-probabilities are shown, and the number of alternatives.

    If the request's ``logprobs`` is false or a number, it overrides a default ``top_logprobs``.
    """
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


def build_request(
    request_id: str,
    prompts: tuple[Prompt, ...],
    given: Merged,
    info: ModelInfo,
    *,
    streaming: bool,
    client: str,
    outputs: frozenset[str] = frozenset(),
    details: bool = False,
    streams_echo: bool = False,
) -> GenerationRequest:
    """Builds the request from its prompts and its merged parameters.

    ``outputs`` are the values that the request names; if it names none, the reply shows all. ``details`` is a field of
    ``ReplyOptions``. ``streams_echo`` says whether a streamed reply of this spelling can repeat the prompt.
    """
    mode = _read_stream_mode(given, streaming)
    if mode is StreamMode.PROMPT:
        _check_pieces(prompts)
    stream = _read_stream(given, streaming)
    reply = replace(_reply_options(outputs, given), details=details)
    need_logprobs = reply.logprobs or reply.cumulative_logprob or details
    if reply.echo_prompt:
        _check_echo(given, prompts, streaming=streaming and stream is not False and not streams_echo)
    if reply.prompt_logprobs and any(isinstance(prompt, ChatPrompt) for prompt in prompts):
        raise InvalidInput("prompt_logprobs", "is not implemented for conversations; send a text or its ids")
    if _SPECIAL in given:
        adds = bool(given[_SPECIAL].value)
        prompts = tuple(
            replace(each, add_special_tokens=adds) if isinstance(each, TextPrompt) else each for each in prompts
        )
    converses = all(isinstance(prompt, ChatPrompt) for prompt in prompts)
    max_tokens = None if converses else DEFAULT_MAX_TOKENS
    microseconds = _read_positive(given, "timeout")
    return GenerationRequest(
        request_id=request_id,
        prompts=prompts,
        sampling=resolve_sampling(
            given, info, max_tokens=max_tokens, need_logprobs=need_logprobs, echo=reply.echo_prompt
        ),
        reply=reply,
        stream=stream,
        stream_mode=mode,
        priority=_read_positive(given, "priority"),
        timeout_s=None if microseconds is None else microseconds / 1e6,
        client=client,
        constraint=_read_constraint(given),
        adapter=given["lora_name"].value if "lora_name" in given else None,
    )


def check_id(request_id: str | None) -> None:
    """Raises InvalidInput if a request's id is too long."""
    if len(request_id or "") > MAX_ID_CHARACTERS:
        raise InvalidInput("id", f"must have at most {MAX_ID_CHARACTERS} characters")


def read_client(headers: Mapping[str, str]) -> str:
    """Returns the client's name in a request's HTTP headers or gRPC metadata, by which the queue is shared fairly."""
    return next((str(value) for key, value in headers.items() if key.lower() == names.CLIENT_HEADER), "")


def chat_prompt(messages: Objects, tools: Objects | None, given: Merged, info: ModelInfo) -> ChatPrompt:
    """Returns the conversation for the chat template, without its tools if ``tool_choice`` is ``none``."""
    arguments = given.get("chat_template_kwargs")
    chosen, choice = chosen_tools(tools, given, info)
    begins, continues = _read_flag(given, _GENERATION_PROMPT), _read_flag(given, _CONTINUE)
    if begins and continues:
        raise InvalidInput(given[_CONTINUE].spelling, f"cannot be true if {_GENERATION_PROMPT} is true")
    checked = check_template_arguments(arguments.spelling, arguments.value) if arguments else {}
    return ChatPrompt(
        messages=messages,
        tools=chosen,
        tool_choice=choice,
        template_kwargs={**_reasoning_arguments(given, info), **checked},
        add_generation_prompt=begins,
        continue_final_message=continues,
        add_special_tokens=bool(_read_flag(given, _SPECIAL)),
    )


def _reasoning_arguments(given: Merged, info: ModelInfo) -> Mapping[str, Any]:
    """Returns the arguments that switch a chat template's reasoning on or off."""
    effort = _effort_argument(given, info)
    switch = given.get(_SWITCH) or given.get("thinking")
    if switch is None:
        return effort
    if _SWITCH in info.template_arguments:
        return {**effort, _SWITCH: switch.value}
    if info.reasons and not switch.value:
        raise InvalidInput(switch.spelling, "the model's chat template cannot switch its reasoning off")
    return effort


def _effort_argument(given: Merged, info: ModelInfo) -> Mapping[str, Any]:
    """Returns the arguments for ``reasoning_effort``: the effort or, for a template without efforts, a switch."""
    if _EFFORT not in given:
        return {}
    effort = given[_EFFORT].value
    if _EFFORT in info.template_arguments:
        return {_EFFORT: effort}
    if _SWITCH in info.template_arguments:
        return {_SWITCH: effort != "none"}
    if effort == "none" and not info.reasons:
        return {}
    raise InvalidInput(given[_EFFORT].spelling, "the model's chat template has no reasoning effort")


def require_template(field: str, info: ModelInfo) -> None:
    """Raises InvalidInput, which names the field, if the model has no chat template."""
    if not info.has_chat_template:
        raise InvalidInput(field, "the model has no chat template")


def refuse_chat_options(tools: bool, given: Merged) -> None:
    """Raises InvalidInput if a request without a conversation has tools or other options that are only for chats."""
    spellings = ["tools"] if tools else []
    spellings += [given[name].spelling for name in _CHAT_ONLY if name in given]
    if spellings:
        raise InvalidInput(spellings[0], "is for conversations only; send messages")


def _read_positive(given: Merged, name: str) -> int | None:
    """Returns a positive number; None for 0, which means the default, as in Triton."""
    return int(given[name].value) or None if name in given else None


def with_usage(request: GenerationRequest, stream_options: Mapping[str, Any]) -> GenerationRequest:
    """Returns the request, changed to report usage as the validated ``stream_options`` ask. Raises InvalidInput."""
    usage_message, continuous = (bool(stream_options.get(name)) for name in ("include_usage", _CONTINUOUS))
    if continuous and not usage_message:  # for this combination vLLM sends no usage at all
        raise InvalidInput(f"{_STREAM_OPTIONS}.{_CONTINUOUS}", "needs include_usage: true")
    return replace(request, reply=replace(request.reply, usage_message=usage_message, continuous_usage=continuous))


def read_stream_options(parameters: Mapping[str, Any], info: ModelInfo, *, streaming: bool) -> Mapping[str, Any]:
    """Validates and returns the ``stream_options`` among a V2 request's parameters, which is where Seldon's proxy puts
    them.
    """
    for name in OPENAI_BODIES:
        options = dict(object_pairs(name, parameters.get(name), info)).get(_STREAM_OPTIONS)
        if options is not None:
            validate(_STREAM_OPTIONS, _STREAM_OPTIONS_MODEL, options)
            if not streaming:
                raise InvalidInput(_STREAM_OPTIONS, "needs stream: true")
            return dict(options)
    return {}


def _read_constraint(given: Merged) -> Constraint | None:
    """Returns the constraint on a request's answers, or None. Raises InvalidInput if there are several."""
    ways = [name for name in _CONSTRAINTS if name in given and given[name].value is not None]
    if len(ways) > 1:
        first = given[ways[0]].spelling
        raise InvalidInput(given[ways[1]].spelling, f"cannot be combined with {first}: give only one of them")
    guide = str(given[GUIDE].value) if GUIDE in given else None
    if GUIDE_TYPE in ways:
        return of_guide(given[GUIDE_TYPE].value, guide)
    if guide is not None:
        raise InvalidInput(GUIDE, f"needs {GUIDE_TYPE}")
    constraint: Constraint | None = given[ways[0]].value if ways else None
    return constraint


def _read_stream_mode(given: Merged, streaming: bool) -> StreamMode:
    mode = StreamMode(given["stream_mode"].value) if "stream_mode" in given else StreamMode.EACH
    if mode is StreamMode.PROMPT and not streaming:
        raise InvalidInput("stream_mode", "prompt needs a stream, but this endpoint is unary")
    return mode


def _read_flag(given: Merged, name: str) -> bool | None:
    return bool(given[name].value) if name in given else None


def _read_echo(given: Merged) -> bool:
    echo, exclude = _read_flag(given, "echo"), _read_flag(given, "exclude_input_in_output")
    if echo is not None and echo == exclude:
        raise InvalidInput("echo", "contradicts exclude_input_in_output")
    return bool(echo) or exclude is False


def _check_echo(given: Merged, prompts: Sequence[Prompt], *, streaming: bool) -> None:
    """Raises InvalidInput if the reply cannot begin with the prompt. Called only if the request asks for that."""
    spelling = "echo" if "echo" in given else "exclude_input_in_output"
    if streaming:
        raise InvalidInput(spelling, "the prompt cannot be part of a streamed reply")
    if any(isinstance(prompt, ChatPrompt) for prompt in prompts):
        raise InvalidInput(spelling, "a conversation cannot be part of the reply")


def _check_pieces(prompts: tuple[Prompt, ...]) -> None:
    if isinstance(prompts[0], ChatPrompt):
        raise InvalidInput("stream_mode", "a conversation cannot come in pieces; send text_input or input_ids")
    if len(prompts) != 1:
        raise InvalidInput("stream_mode", f"prompt accepts the pieces of one prompt, got {len(prompts)} prompts")


def _read_stream(given: Merged, streaming: bool) -> bool | None:
    stream = _read_flag(given, "stream")
    if stream and not streaming:
        raise InvalidInput("stream", "cannot be true on an endpoint that answers once; use the stream endpoint")
    return stream


def _reply_options(outputs: frozenset[str], given: Merged) -> ReplyOptions:
    def wanted(flag: str, default: bool) -> bool:
        value = _read_flag(given, flag)
        return default if value is None else value

    asked_for_logprobs = "logprobs" in given and given["logprobs"].value[0]
    return ReplyOptions(
        finish_reason=wanted("return_finish_reason", True),
        num_input_tokens=wanted("return_num_input_tokens", True),
        num_output_tokens=wanted("return_num_output_tokens", True),
        cumulative_logprob=wanted("return_cumulative_logprob", names.CUMULATIVE_LOGPROB in outputs),
        logprobs=wanted("return_logprobs", names.LOGPROBS in outputs or asked_for_logprobs),
        prompt_logprobs="prompt_logprobs" in given,
        token_ids=wanted("return_token_ids", names.TOKEN_IDS in outputs),
        echo_prompt=_read_echo(given),
        outputs=outputs or None,
    )
