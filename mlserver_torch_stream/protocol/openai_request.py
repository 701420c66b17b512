"""Decodes the body of an OpenAI request, a conversation or a prompt, into a GenerationRequest.

Knows nothing of endpoints or batches. What is not implemented is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol import values
from mlserver_torch_stream.protocol.chat import check_messages, check_tools
from mlserver_torch_stream.protocol.parameters import Merged, merge_parameters, resolve_sampling
from mlserver_torch_stream.protocol.request_options import (
    chat_prompt,
    check_echo,
    read_echo,
    read_priority,
    read_stream_mode,
    read_timeout,
    refuse_chat_options,
    require_template,
)
from mlserver_torch_stream.types import GenerationRequest, ModelInfo, Prompt, ReplyOptions, TextPrompt

MESSAGES, PROMPT, TOOLS = "messages", "prompt", "tools"
# What V2 replies can be told to hold. An OpenAI object has a fixed shape: the other value of each is refused.
_FIXED = {
    "return_finish_reason": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
    "return_cumulative_logprob": False,
    "return_logprobs": False,
    "return_token_ids": False,
}


def decode_body(body: Mapping[str, Any], info: ModelInfo, request_id: str) -> GenerationRequest:
    """A request that is answered as a whole. Raises InvalidInput.

    Which model it names is the caller's to check.
    """
    parameters = {key: value for key, value in body.items() if key not in (MESSAGES, PROMPT, TOOLS)}
    given = merge_parameters({"llm_parameters": parameters}, (), None, info)
    _refuse_reply_options(given)
    prompt = _chat(body, given, info) if MESSAGES in body else _text(body, given)
    echo = read_echo(given)
    if echo:
        check_echo(given, (prompt,), streaming=False)
    return GenerationRequest(
        request_id=request_id,
        prompts=(prompt,),
        sampling=resolve_sampling(given, info),
        reply=ReplyOptions(echo_prompt=echo),
        stream_mode=read_stream_mode(given, streaming=False),
        priority=read_priority(given),
        timeout_s=read_timeout(given),
    )


def _chat(body: Mapping[str, Any], given: Merged, info: ModelInfo) -> Prompt:
    require_template(MESSAGES, info)
    tools = body.get(TOOLS)
    checked = None if tools is None else check_tools(TOOLS, tools)
    return chat_prompt(check_messages(MESSAGES, body[MESSAGES]), checked, given)


def _text(body: Mapping[str, Any], given: Merged) -> Prompt:
    text = body.get(PROMPT)
    if not values.is_text(text):
        raise InvalidInput(PROMPT, f"must be a string, got {values.shown(text)}")
    if not text:
        raise InvalidInput(PROMPT, "the prompt is empty")
    refuse_chat_options(body.get(TOOLS) is not None, given)
    return TextPrompt(str(text))


def _refuse_reply_options(given: Merged) -> None:
    for name, only in _FIXED.items():
        if name in given and bool(given[name].value) is not only:
            raise InvalidInput(given[name].spelling, "is for V2 replies; an OpenAI object has a fixed shape")
    if "stream" in given and given["stream"].value:
        raise InvalidInput("stream", "true: this request is answered as a whole")
