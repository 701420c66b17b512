"""The requests that Open WebUI 0.12.4 sends to an OpenAI-compatible connection, written after its source.

The source is the package ``open-webui`` on PyPI: ``generate_chat_completion`` and ``convert_to_responses_payload`` in
``routers/openai.py``, ``apply_model_params_to_body_openai`` in ``utils/payload.py``, ``convert_output_to_messages`` in
``utils/misc.py``, ``process_chat_payload`` in ``utils/middleware.py``, ``generate_title`` in ``routers/tasks.py``.
``main.py`` asks for the usage; the router takes ``metadata`` out of each body.
"""

from __future__ import annotations

from typing import Any

_MODEL: dict[str, Any] = {"model": "tiny"}
_STREAMED: dict[str, Any] = {**_MODEL, "stream": True, "stream_options": {"include_usage": True}}
_QUESTION = {"role": "user", "content": "Where is it?"}
_SPEC = {
    "name": "look",
    "description": "Looks at a place.",
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string", "description": "where to look"}},
        "required": ["place"],
    },
}
_TOOLS = [{"type": "function", "function": _SPEC}]
# The parameters of its settings that utils/payload.py passes on.
_PARAMETERS: dict[str, Any] = {
    "temperature": 0.8, "top_p": 0.9, "min_p": 0.05, "max_tokens": 12, "frequency_penalty": 0.1,
    "presence_penalty": 0.1, "seed": 1, "stop": ["\n\n\n"], "logit_bias": {"7": -5},
}  # fmt: skip
_CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"place": "home"}'}}
_RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "no"}
_CALLED = {"role": "assistant", "content": "", "tool_calls": [_CALL]}

# A body whose answer is a call that ends. Open WebUI sends neither tool_choice nor additionalProperties; a random model
# calls nothing by itself, and would add arguments without end.
_PLACES = {"place": {"type": "string", "enum": ["home", "work"]}}
_ENDS = {"type": "object", "properties": _PLACES, "required": ["place"], "additionalProperties": False}
FORCED: dict[str, Any] = {
    **_STREAMED, "messages": [_QUESTION], "max_tokens": 200, "tool_choice": "required", "parallel_tool_calls": False,
    "tools": [{"type": "function", "function": {**_SPEC, "parameters": _ENDS}}],
}  # fmt: skip

CHATS: dict[str, dict[str, Any]] = {
    "a chat": {**_STREAMED, "messages": [{"role": "system", "content": "Be brief."}, _QUESTION], **_PARAMETERS},
    "a chat with tools": {**_STREAMED, "messages": [_QUESTION], "tools": _TOOLS, "max_tokens": 12},
    "the result of a tool": {
        **_STREAMED, "messages": [_QUESTION, _CALLED, _RESULT], "tools": _TOOLS, "max_tokens": 12,
    },
    "a turn after reasoning, of a connection to llama.cpp": {
        **_STREAMED, "messages": [_QUESTION, {**_CALLED, "reasoning_content": "Hm."}, _RESULT, _QUESTION],
        "max_tokens": 12,
    },
    "Continue, of a connection to llama.cpp": {
        **_STREAMED, "messages": [_QUESTION, {"role": "assistant", "content": "It is"}], "max_tokens": 12,
        "continue_final_message": True, "add_generation_prompt": False,
    },
    "a title": {**_MODEL, "messages": [_QUESTION], "stream": False, "max_tokens": 100},
}  # fmt: skip

RESPONSES: dict[str, Any] = {
    **_MODEL,
    "stream": True,
    "instructions": "Be brief.",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Where is it?"}]},
        {"type": "function_call", "call_id": "call_1", **_CALL["function"]},
        {"type": "function_call_output", "call_id": "call_1", "output": "no"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Not at home."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And now?"}]},
    ],
    "tools": [{"type": "function", **_SPEC, "strict": False}],
    "temperature": 0.8,
    "top_p": 0.9,
    "max_output_tokens": 12,
}
