"""The table of the parameters of bodies of OpenAI's Responses API.

Knows nothing of what an input comes to mean. What means the same in a chat is the chat's row.
"""

from __future__ import annotations

from typing import Any

from mlserver_torch_stream.protocol.json_schema import Schema
from mlserver_torch_stream.protocol.openai_parameters import CHAT_PARAMETERS, BodyParameter, Table, Treatment
from mlserver_torch_stream.protocol.parameter_table import REASONING_EFFORTS
from mlserver_torch_stream.protocol.tools import FUNCTION, MOST_TOOLS

INPUT = "input"
LOGPROBS = "message.output_text.logprobs"
_STRING: Schema = {"type": "string"}
_BOOLEAN: Schema = {"type": "boolean"}
_OPTIONAL_STRING: Schema = {"type": ["string", "null"]}
_ITEMS: Schema = {
    "type": ["string", "array"],
    "minLength": 1,
    "minItems": 1,
    "items": {"type": "object"},
    "description": "a text, or items: message, function_call, function_call_output, reasoning",
}
_TOOLS: Schema = {
    "type": "array",
    "maxItems": MOST_TOOLS,
    "items": {
        "type": "object",
        "required": ["type", "name"],
        "properties": {
            "type": {"type": "string", "enum": ["function"], "description": "only functions are implemented"},
            **FUNCTION["properties"],
        },
    },
}
_FORMAT: Schema = {
    "type": ["object", "null"],
    "required": ["type"],
    "properties": {
        "type": {"type": "string", "enum": ["text", "json_object", "json_schema"]},
        "name": _OPTIONAL_STRING,
        "description": _OPTIONAL_STRING,
        "schema": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
    "additionalProperties": False,
}
_TEXT: Schema = {
    "type": "object",
    "properties": {"format": _FORMAT, "verbosity": {"enum": ["medium", None]}},
    "additionalProperties": False,
}
# No summary is made: "auto" leaves that to the server.
_REASONING: Schema = {
    "type": "object",
    "properties": {
        "effort": {"enum": [*REASONING_EFFORTS, None]},
        "summary": {"enum": ["auto", None]},
        "generate_summary": {"enum": ["auto", None]},
        "context": {"enum": ["auto", None]},
        "mode": {"enum": ["standard", None]},
    },
    "additionalProperties": False,
}
# An item of reasoning has its text, so that nothing has to be encrypted to come back.
_INCLUDE: Schema = {
    "type": "array",
    "items": {"type": "string", "enum": [LOGPROBS, "reasoning.encrypted_content"]},
    "maxItems": 16,
}
_METADATA: Schema = {"type": "object", "additionalProperties": _STRING}
_STREAM_OPTIONS: Schema = {
    "type": "object",
    "properties": {"include_obfuscation": {"type": ["boolean", "null"]}},
    "additionalProperties": False,
}
_AS_IN_CHATS = (
    *("model", "stream", "temperature", "top_p", "top_logprobs", "parallel_tool_calls", "tool_choice", "user"),
    *("safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *("service_tier", "moderation"),
    # What OpenAI's own API lacks.
    *("stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "structured_outputs"),
    *("top_k", "min_p", "typical_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "skip_special_tokens", "chat_template_kwargs"),
    *("priority", "timeout", "model_version"),
)


def _takes(name: str, schema: Schema, required: bool = False) -> BodyParameter:
    return BodyParameter(name, Treatment.TAKEN, schema, required)


def _refuses(name: str, *harmless: Any) -> BodyParameter:
    return BodyParameter(name, Treatment.REFUSED, {"enum": list(harmless)})


_OWN = (
    _takes(INPUT, _ITEMS, required=True),
    _takes("instructions", _STRING),
    _takes("max_output_tokens", {"type": "integer", "minimum": 1}),
    _takes("tools", _TOOLS),
    _takes("text", _TEXT),
    _takes("reasoning", _REASONING),
    _takes("include", _INCLUDE),
    _takes("metadata", _METADATA),
    _takes("stream_options", _STREAM_OPTIONS),
    # The server keeps no responses.
    _refuses("store", False),
    _refuses("background", False),
    _refuses("truncation", "disabled"),
    _refuses("previous_response_id"),
    _refuses("conversation"),
    _refuses("prompt"),
    _refuses("max_tool_calls"),
    _refuses("context_management"),
    _refuses("access_programs"),
    _refuses("background_options"),
    _refuses("image"),
)
RESPONSE_PARAMETERS: Table = {each.name: each for each in (*_OWN, *(CHAT_PARAMETERS[name] for name in _AS_IN_CHATS))}
