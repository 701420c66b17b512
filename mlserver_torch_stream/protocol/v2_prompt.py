"""Finds the one prompt source among the input tensors of a request and reads its prompts.

Knows nothing of sampling; it reads only the parameters that shape a conversation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol import chat, values
from mlserver_torch_stream.protocol import v2_names as names
from mlserver_torch_stream.protocol.parameters import Merged
from mlserver_torch_stream.protocol.request_options import chat_prompt, refuse_chat_options, require_template
from mlserver_torch_stream.protocol.seldon_chat import MESSAGE_TENSORS, read_messages
from mlserver_torch_stream.protocol.tools import check_tools
from mlserver_torch_stream.protocol.v2_tensors import Tensor
from mlserver_torch_stream.types import ChatPrompt, ModelInfo, Prompt, TextPrompt, TokensPrompt


def prompt_source(tensors: Mapping[str, Tensor]) -> str:
    """The tensor that holds the prompt, in the client's spelling; ``role`` and its like count as one source."""
    sources = [name for name in tensors if name in names.PROMPT_TENSORS and name not in MESSAGE_TENSORS]
    seldon = [name for name in MESSAGE_TENSORS if name in tensors]
    sources += seldon[:1]
    if not sources:
        raise InvalidInput(names.TEXT_INPUT, f"no prompt; send one of {', '.join(names.PROMPT_TENSORS)}")
    if len(sources) > 1:
        raise InvalidInput(sources[1], f"a second prompt beside {sources[0]}; send exactly one")
    return sources[0]


def read_prompts(tensors: Mapping[str, Tensor], given: Merged, info: ModelInfo) -> tuple[Prompt, ...]:
    """The prompts of a request, none of them empty."""
    source = prompt_source(tensors)
    if source in names.TEXT_TENSORS:
        prompts: tuple[Prompt, ...] = _texts(tensors[source])
    elif source == names.INPUT_IDS:
        prompts = (_tokens(tensors[source], info),)
    else:
        return (_chat(source, tensors, given, info),)
    refuse_chat_options(names.TOOLS in tensors, given)
    return prompts


def _texts(tensor: Tensor) -> tuple[TextPrompt, ...]:
    tensor.require({"BYTES"})
    if sum(size != 1 for size in tensor.shape) > 1:
        raise InvalidInput(tensor.name, f"shape must be [B] or [B, 1], got {list(tensor.shape)}")
    if not tensor.elements or not all(tensor.elements):
        raise InvalidInput(tensor.name, "the prompt is empty")
    return tuple(TextPrompt(text) for text in tensor.elements)


def _tokens(tensor: Tensor, info: ModelInfo) -> TokensPrompt:
    tensor.require({"INT64", "INT32"})
    if len(tensor.shape) not in (1, 2) or (len(tensor.shape) == 2 and tensor.shape[0] != 1):
        raise InvalidInput(tensor.name, f"shape must be [S] or [1, S], got {values.shown(list(tensor.shape))}")
    if not tensor.elements:
        raise InvalidInput(tensor.name, "the prompt is empty")
    for position, token_id in enumerate(tensor.elements):
        if not 0 <= token_id < info.vocab_size:
            raise InvalidInput(
                tensor.name,
                f"token id {values.shown(token_id)} at position {position} is outside the vocabulary of "
                f"{info.vocab_size}",
            )
    return TokensPrompt(tuple(tensor.elements))


def _chat(source: str, tensors: Mapping[str, Tensor], given: Merged, info: ModelInfo) -> ChatPrompt:
    require_template(source, info)
    if source == names.MESSAGES:
        parsed = values.named(source, values.parse_json, tensors[source].require({"BYTES"}).single())
        messages = chat.check_messages(source, parsed, values.most_checked(info))
    else:
        columns = {name: tensors[name].require({"BYTES"}).elements for name in MESSAGE_TENSORS if name in tensors}
        messages = read_messages(columns, values.most_checked(info))
    return chat_prompt(messages, _tools(tensors, info), given, info)


def _tools(tensors: Mapping[str, Tensor], info: ModelInfo) -> tuple[Mapping[str, Any], ...] | None:
    """The tools, as a JSON list in one element or one object in each."""
    if names.TOOLS not in tensors:
        return None
    texts = tensors[names.TOOLS].require({"BYTES"}).elements
    tools = [values.named(names.TOOLS, values.parse_json, text) for text in texts]
    if len(tools) == 1 and isinstance(tools[0], list):
        tools = tools[0]
    return check_tools(names.TOOLS, tools, values.most_checked(info))
