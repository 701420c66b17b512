"""Decodes the body of an OpenAI request, with a conversation or a prompt, into a GenerationRequest.

Parameters that are not implemented are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from mlserver_torch_stream.errors import ContextLengthExceeded, InvalidInput
from mlserver_torch_stream.protocol import values
from mlserver_torch_stream.protocol.chat import check_messages, check_tools
from mlserver_torch_stream.protocol.request_options import (
    build_request,
    chat_prompt,
    merge_parameters,
    refuse_chat_options,
    require_template,
    with_usage,
)
from mlserver_torch_stream.protocol.values import Merged
from mlserver_torch_stream.types import GenerationRequest, ModelInfo, Prompt, TextPrompt, TokensPrompt

MESSAGES, PROMPT, TOOLS = "messages", "prompt", "tools"
# Parameters that choose the outputs of a V2 reply. OpenAI's objects are fixed, so only the values here are accepted.
_FIXED = {
    "return_finish_reason": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
    "return_cumulative_logprob": False,
    "return_logprobs": False,
}


def decode_body(
    body: Mapping[str, Any],
    info: ModelInfo,
    request_id: str,
    *,
    streaming: bool = False,
    stream_options: Mapping[str, Any] | None = None,
    client: str = "",
) -> GenerationRequest:
    """Decodes a body; the caller has read the model's name and ``stream`` already.

    ``stream_options`` is the validated parameter. ``client`` names the client for fair shares. Raises InvalidInput.
    """
    parameters = {key: value for key, value in body.items() if key not in (MESSAGES, PROMPT, TOOLS)}
    given = merge_parameters({"llm_parameters": parameters}, (), None, info)
    _refuse_reply_options(given)
    prompts = (_chat(body, given, info),) if MESSAGES in body else _prompts(body, given, info)
    request = build_request(request_id, prompts, given, info, streaming=streaming, client=client, streams_echo=True)
    return with_usage(request, stream_options or {})


def _chat(body: Mapping[str, Any], given: Merged, info: ModelInfo) -> Prompt:
    require_template(MESSAGES, info)
    most = values.most_checked(info)
    tools = None if body.get(TOOLS) is None else check_tools(TOOLS, body[TOOLS])
    return chat_prompt(check_messages(MESSAGES, body[MESSAGES], most), tools, given, info)


def _prompts(body: Mapping[str, Any], given: Merged, info: ModelInfo) -> tuple[Prompt, ...]:
    """Returns the prompts of a completion: a text, a list of texts, a list of ids, or a list of lists of ids."""
    prompt = body.get(PROMPT)
    refuse_chat_options(body.get(TOOLS) is not None, given)
    if not isinstance(prompt, list):
        return (_text(PROMPT, prompt),)
    if not isinstance(prompt[0], (str, list)):
        return (_tokens(PROMPT, prompt, info),)
    most = values.most_elements(info.max_model_len)
    if len(prompt) > most:
        raise InvalidInput(PROMPT, f"must have at most {most} elements, got {len(prompt)}")
    read = _text if isinstance(prompt[0], str) else partial(_tokens, info=info)
    return tuple(read(f"{PROMPT}[{position}]", each) for position, each in enumerate(prompt))


def _text(place: str, text: Any) -> TextPrompt:
    if not values.is_text(text):
        raise InvalidInput(place, f"must be a string, got {values.shown(text)}")
    if not text:
        raise InvalidInput(place, "the prompt is empty")
    return TextPrompt(str(text))


def _tokens(place: str, ids: Any, info: ModelInfo) -> TokensPrompt:
    """Returns a prompt of ids. A list longer than the context is refused before its ids are checked."""
    if not isinstance(ids, list):
        raise InvalidInput(place, f"must be a list of token ids, got {values.shown(ids)}")
    if not ids:
        raise InvalidInput(place, "the prompt is empty")
    if len(ids) >= info.max_model_len:
        raise ContextLengthExceeded(place, len(ids), info.max_model_len)
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < info.vocab_size:  # millions take 0.1 s
        return TokensPrompt(tuple(ids))
    position = next(index for index, token_id in enumerate(ids) if not _is_id(token_id, info))
    wrong = values.shown(ids[position])
    raise InvalidInput(f"{place}[{position}]", f"must be a token id below {info.vocab_size}, got {wrong}")


def _is_id(token_id: Any, info: ModelInfo) -> bool:
    return type(token_id) is int and 0 <= token_id < info.vocab_size


def _refuse_reply_options(given: Merged) -> None:
    for name, only in _FIXED.items():
        if name in given and bool(given[name].value) is not only:
            raise InvalidInput(given[name].spelling, "applies only to V2 replies; an OpenAI object has a fixed shape")
    if "stream" in given and given["stream"].value:
        raise InvalidInput("stream", "cannot be true, because this request is answered as a whole")
