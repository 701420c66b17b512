"""The table of the parameters of OpenAI's bodies, and of their treatment: taken, ignored, or refused by name.

The decoder and the OpenAPI document both read this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.chat import MESSAGE_METADATA, TOOLS
from mlserver_torch_stream.protocol.constraints import (
    NULLABLE_STRING,
    RESPONSE_FORMAT,
    STRING,
    STRUCTURED_OUTPUTS,
    ElementBudget,
    Schema,
    check,
)
from mlserver_torch_stream.protocol.parameters import (
    LEAST_REPETITION_PENALTY,
    MAX_BAD_WORDS,
    MAX_STOP_STRINGS,
    REASONING_EFFORTS,
)
from mlserver_torch_stream.protocol.values import harmless_values, refuse, refuse_unless_harmless


class Treatment(str, Enum):
    TAKEN = "taken"
    IGNORED = "ignored"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class BodyParameter:
    """``schema``: of the values that are accepted, beside null, which means "not given" unless it is ``required``."""

    name: str
    treatment: Treatment
    schema: Schema
    required: bool = False

    @property
    def harmless(self) -> tuple[Any, ...]:
        """Of a refused parameter: the values with which it asks for nothing."""
        return tuple(self.schema.get("enum", ()))


_BOOLEAN: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}
_TOKEN_ID: Schema = {"type": "integer", "minimum": 0}
_TOKEN_IDS: Schema = {"type": "array", "items": _TOKEN_ID}
_ABSENT: Schema = {"type": "null"}
_ANY: Schema = {"description": "metadata of a proxy, which has no effect"}
_PART: Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {
        "type": {"type": "string", "enum": ["text"], "description": "only parts of text are implemented"},
        "text": STRING,
    },
}
_MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string", "minLength": 1},
        "content": {"type": ["string", "array", "null"], "items": _PART},
        "name": NULLABLE_STRING,
        "tool_calls": {"type": ["array", "null"], "items": _OBJECT},
        "tool_call_id": NULLABLE_STRING,
        "refusal": NULLABLE_STRING,
        "reasoning": NULLABLE_STRING,
        "reasoning_content": NULLABLE_STRING,
        # Of an answer that a client sends back as the SDK has dumped it.
        "annotations": {"type": ["array", "null"], "items": {"type": "object"}},
        "audio": _ABSENT,
        "function_call": _ABSENT,
        **dict.fromkeys(MESSAGE_METADATA, _ANY),
    },
    "additionalProperties": False,
}
_PROMPT: Schema = {
    "type": ["string", "array"],
    "minLength": 1,
    "minItems": 1,
    "items": {
        "type": ["string", "integer", "array"],
        "minLength": 1,
        "minimum": 0,
        "minItems": 1,
        "items": _TOKEN_ID,
    },
    "description": "a text, several texts, the ids of tokens, or several lists of them",
}
_STREAM_OPTIONS: Schema = {
    "type": "object",
    "properties": {
        "include_usage": {"type": ["boolean", "null"]},
        "include_obfuscation": {"type": ["boolean", "null"]},
        "continuous_usage_stats": {"type": ["boolean", "null"]},
    },
    "additionalProperties": False,
}


def _integer(low: int, high: int | None = None) -> Schema:
    return {"type": "integer", "minimum": low, **({} if high is None else {"maximum": high})}


def _number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def _positive(high: float) -> Schema:
    return {"type": "number", "exclusiveMinimum": 0, "maximum": high}


def _strings(most: int) -> Schema:
    return {
        "type": ["string", "array"],
        "minLength": 1,
        "maxItems": most,
        "items": {"type": "string", "minLength": 1},
    }


def needs(name: str, schema: Schema) -> BodyParameter:
    return BodyParameter(name, Treatment.TAKEN, schema, required=True)


def takes(name: str, schema: Schema) -> BodyParameter:
    return BodyParameter(name, Treatment.TAKEN, schema)


def _ignores(name: str, schema: Schema) -> BodyParameter:
    return BodyParameter(name, Treatment.IGNORED, schema)


def refuses(name: str, *harmless: Any) -> BodyParameter:
    return BodyParameter(name, Treatment.REFUSED, {"enum": list(harmless or harmless_values(name))})


_OF_BOTH = (
    needs("model", {"type": "string", "minLength": 1}),
    takes("stream", _BOOLEAN),
    takes("stream_options", _STREAM_OPTIONS),
    takes("max_tokens", _integer(1)),
    takes("temperature", _number(0, 100)),
    takes("top_p", _positive(1)),
    takes("n", _integer(1)),
    takes("stop", _strings(MAX_STOP_STRINGS)),
    takes("seed", _integer(-(2**63), 2**64 - 1)),
    takes("presence_penalty", _number(-2, 2)),
    takes("frequency_penalty", _number(-2, 2)),
    takes("logit_bias", {"type": "object", "additionalProperties": _number(-100, 100)}),
    _ignores("user", STRING),
    # What vLLM's clients send beside OpenAI's own.
    takes("top_k", _integer(-1)),
    takes("min_p", _number(0, 1)),
    takes("typical_p", _positive(1)),
    takes("repetition_penalty", _number(LEAST_REPETITION_PENALTY, 100)),
    takes("min_tokens", _integer(0)),
    takes("stop_token_ids", _TOKEN_IDS),
    takes("ignore_eos", _BOOLEAN),
    takes("include_stop_str_in_output", _BOOLEAN),
    takes("skip_special_tokens", _BOOLEAN),
    takes("response_format", RESPONSE_FORMAT),
    takes("structured_outputs", STRUCTURED_OUTPUTS),
    takes("bad_words", _strings(MAX_BAD_WORDS)),
    takes("priority", _integer(0, 2**31 - 1)),
    # Of this runtime alone.
    takes("timeout", _integer(0, 2**53)),
    takes("model_version", {"type": "string", "minLength": 1}),
)
_OF_CHATS = (
    needs("messages", {"type": "array", "minItems": 1, "items": _MESSAGE}),
    takes("max_completion_tokens", _integer(1)),
    takes("logprobs", _BOOLEAN),
    takes("top_logprobs", _integer(0, 20)),
    takes("chat_template_kwargs", _OBJECT),
    takes("tools", TOOLS),
    takes("tool_choice", {"type": ["string", "object"]}),
    takes("parallel_tool_calls", _BOOLEAN),
    takes("reasoning_effort", {"type": "string", "enum": list(REASONING_EFFORTS)}),
    _ignores("metadata", _OBJECT),
    _ignores("store", _BOOLEAN),
    _ignores("safety_identifier", STRING),
    _ignores("prompt_cache_key", STRING),
    _ignores("prompt_cache_options", _OBJECT),
    _ignores("prompt_cache_retention", STRING),
    refuses("audio"),
    refuses("function_call", "none", "auto"),
    refuses("functions"),
    refuses("modalities"),
    refuses("moderation"),
    refuses("prediction"),
    refuses("service_tier"),
    refuses("verbosity"),
    refuses("web_search_options"),
)
_OF_PROMPTS = (
    needs("prompt", _PROMPT),
    takes("echo", _BOOLEAN),
    takes("logprobs", _integer(0, 20)),
    refuses("best_of"),
    refuses("suffix"),
)

Table = Mapping[str, BodyParameter]
CHAT_PARAMETERS: Table = {each.name: each for each in (*_OF_CHATS, *_OF_BOTH)}
COMPLETION_PARAMETERS: Table = {each.name: each for each in (*_OF_PROMPTS, *_OF_BOTH)}


def taken_values(body: Mapping[str, Any], table: Table, most_elements: int) -> dict[str, Any]:
    """The parameters of a body. Raises InvalidInput, which names the one that is missing, wrong, unknown or not
    implemented.

    ``most_elements``: of one parameter.
    """
    taken = {}
    for key, value in body.items():
        if value is None:
            continue
        parameter = table.get(key)
        if parameter is None:
            refuse(key, value, table)
        elif parameter.treatment is Treatment.REFUSED:
            refuse_unless_harmless(key, value, parameter.harmless)
        else:
            check(key, value, parameter.schema, ElementBudget(most_elements))
            if parameter.treatment is Treatment.TAKEN:
                taken[key] = value
    for name, parameter in table.items():
        if parameter.required and name not in taken:
            raise InvalidInput(name, "is needed")
    return taken
