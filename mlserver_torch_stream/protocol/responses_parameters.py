"""The table of the parameters of bodies of OpenAI's Responses API.

Knows nothing of what an input means. A parameter that means the same in a chat has the chat's row.
"""

from __future__ import annotations

from mlserver_torch_stream.protocol.json_schema import NULLABLE_STRING, STRING, Schema
from mlserver_torch_stream.protocol.openai_parameters import CHAT_PARAMETERS, Table, needs, refuses, takes
from mlserver_torch_stream.protocol.parameter_table import REASONING_EFFORTS
from mlserver_torch_stream.protocol.tools import FUNCTION, MOST_TOOLS

INPUT = "input"
LOGPROBS = "message.output_text.logprobs"
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
        "name": NULLABLE_STRING,
        "description": NULLABLE_STRING,
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
_METADATA: Schema = {"type": "object", "additionalProperties": STRING}
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
_OWN = (
    needs(INPUT, _ITEMS),
    takes("instructions", STRING),
    takes("max_output_tokens", {"type": "integer", "minimum": 1}),
    takes("tools", _TOOLS),
    takes("text", _TEXT),
    takes("reasoning", _REASONING),
    takes("include", _INCLUDE),
    takes("metadata", _METADATA),
    takes("stream_options", _STREAM_OPTIONS),
    # The server keeps no responses.
    refuses("store", False),
    refuses("background", False),
    refuses("truncation", "disabled"),
    refuses("previous_response_id"),
    refuses("conversation"),
    refuses("prompt"),
    refuses("max_tool_calls"),
    refuses("context_management"),
    refuses("access_programs"),
    refuses("background_options"),
    refuses("image"),
)
RESPONSE_PARAMETERS: Table = {each.name: each for each in (*_OWN, *(CHAT_PARAMETERS[name] for name in _AS_IN_CHATS))}
