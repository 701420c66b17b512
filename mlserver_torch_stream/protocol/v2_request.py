"""Decodes a V2 inference request, or one piece of a prompt, and finds the tensor that holds the prompt.

A message that cannot be read becomes an ``Unreadable``. Decoding the ``Unreadable`` raises the error, so the message is
refused and recorded like any bad request.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from mlserver.types import InferenceRequest, RequestOutput
from pydantic import PrivateAttr, ValidationError

from mlserver_torch_stream.errors import ContextLengthExceeded, InvalidInput
from mlserver_torch_stream.protocol import chat, values
from mlserver_torch_stream.protocol import v2_names as names
from mlserver_torch_stream.protocol.chat import check_tools
from mlserver_torch_stream.protocol.parameters import SILENT, TENSORS
from mlserver_torch_stream.protocol.request_options import (
    build_request,
    chat_prompt,
    check_id,
    merge_parameters,
    read_client,
    read_stream_options,
    refuse_chat_options,
    require_template,
    with_usage,
)
from mlserver_torch_stream.protocol.v2_names import MESSAGE_TENSORS, read_messages
from mlserver_torch_stream.protocol.v2_tensors import INTEGERS, NUMBERS, Tensor, parameters_of, read_tensors
from mlserver_torch_stream.protocol.values import Merged, refuse
from mlserver_torch_stream.types import ChatPrompt, GenerationRequest, ModelInfo, Prompt, TextPrompt, TokensPrompt


def prompt_source(tensors: Mapping[str, Tensor]) -> str:
    """Returns the name of the tensor that holds the prompt. Seldon's parallel tensors count as one tensor.

    Raises InvalidInput.
    """
    sources = [name for name in tensors if name in names.PROMPT_TENSORS and name not in MESSAGE_TENSORS]
    seldon = [name for name in MESSAGE_TENSORS if name in tensors]
    sources += seldon[:1]
    if not sources:
        raise InvalidInput(names.TEXT_INPUT, f"no prompt; send one of {', '.join(names.PROMPT_TENSORS)}")
    if len(sources) > 1:
        raise InvalidInput(sources[1], f"is a second prompt in addition to {sources[0]}; send exactly one")
    return sources[0]


def read_prompts(tensors: Mapping[str, Tensor], given: Merged, info: ModelInfo) -> tuple[Prompt, ...]:
    """Returns the prompts of a request. Raises InvalidInput, also for an empty prompt."""
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
    if len(tensor.elements) >= info.max_model_len:
        raise ContextLengthExceeded(tensor.name, len(tensor.elements), info.max_model_len)
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
    """Returns the tools, which are a JSON list in one element, or one JSON object in each element."""
    if names.TOOLS not in tensors:
        return None
    texts = tensors[names.TOOLS].require({"BYTES"}).elements
    tools = [values.named(names.TOOLS, values.parse_json, text) for text in texts]
    if len(tools) == 1 and isinstance(tools[0], list):
        tools = tools[0]
    return check_tools(names.TOOLS, tools)


class Unreadable(InferenceRequest):  # type: ignore[misc]
    """A request that cannot be read. Decoding it raises the error."""

    _error: InvalidInput = PrivateAttr()

    @classmethod
    def because(cls, error: InvalidInput, request_id: str) -> Unreadable:
        """Makes a request that represents an unreadable message."""
        unreadable = cls(id=request_id, inputs=[])
        unreadable._error = error
        return unreadable


def refuse_unreadable(payload: InferenceRequest) -> None:
    """Raises the error of an ``Unreadable``; accepts every other request."""
    if isinstance(payload, Unreadable):
        raise payload._error


_DATATYPES = {"INT64": INTEGERS, "FP32": NUMBERS, "BOOL": frozenset({"BOOL"}), "BYTES": frozenset({"BYTES"})}
_OUTPUT_PARAMETERS = frozenset({"headers", "content_type", "binary_data"})


def decode_request(
    payload: InferenceRequest,
    info: ModelInfo,
    *,
    streaming: bool,
    request_id: str,
    outputs: Collection[str] = frozenset(names.OUTPUT_DATATYPES),
) -> GenerationRequest:
    """Decodes a V2 request. ``streaming`` says whether its endpoint answers with a stream.

    ``outputs`` are the output tensors that the request may name. Raises InvalidInput.
    """
    refuse_unreadable(payload)
    check_id(payload.id)
    tensors = read_tensors(payload.inputs, names.INPUT_TENSORS, info.max_model_len)
    parameters = parameters_of(payload.parameters)
    given = merge_parameters(parameters, _scalar_tensors(tensors), _sampling_tensor(tensors), info)
    prompts = read_prompts(tensors, given, info)
    named = _output_names(payload.outputs or (), outputs)
    client = read_client((payload.parameters.headers if payload.parameters else None) or {})
    request = build_request(request_id, prompts, given, info, streaming=streaming, client=client, outputs=named)
    return with_usage(request, read_stream_options(parameters, info, streaming=streaming))


def validated(body: Mapping[str, Any]) -> InferenceRequest:
    """Validates a JSON object and returns it as MLServer's request class. Raises InvalidInput."""
    try:
        return InferenceRequest.model_validate(body)
    except ValidationError as error:
        raise first_complaint(error) from None


def first_complaint(error: ValidationError) -> InvalidInput:
    """Returns the first of pydantic's errors, with the path of the field and the message."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return InvalidInput(".".join(str(part) for part in first["loc"]) or "body", first["msg"])


def _scalar_tensors(tensors: Mapping[str, Tensor]) -> list[tuple[str, Any]]:
    pairs = []
    for name, tensor in tensors.items():
        parameter = TENSORS.get(name)
        if parameter is not None and parameter.tensor is not None:
            tensor.require(_DATATYPES[parameter.tensor])
            pairs.append((name, tensor.elements if parameter.several else tensor.single()))
    return pairs


def _sampling_tensor(tensors: Mapping[str, Tensor]) -> str | None:
    tensor = tensors.get(names.SAMPLING_PARAMETERS)
    return str(tensor.require({"BYTES"}).single()) if tensor is not None else None


def _output_names(outputs: Iterable[RequestOutput], known: Collection[str]) -> frozenset[str]:
    named = []
    for output in outputs:
        if output.name not in known:
            refuse(output.name, ..., known, what="output")
        for key, value in parameters_of(output.parameters).items():
            if key not in _OUTPUT_PARAMETERS:
                refuse(key, value, _OUTPUT_PARAMETERS, what=f"parameter of output {output.name}")
        named.append(output.name)
    return frozenset(named)


def decode_piece(payload: InferenceRequest, first: GenerationRequest, info: ModelInfo) -> Prompt:
    """Returns the next piece of the prompt whose first piece is ``first``.

    The message must have the same kind of tensor as ``first``, with at least one element, and no parameters. Raises
    InvalidInput.
    """
    refuse_unreadable(payload)
    for key in parameters_of(payload.parameters):
        if key not in SILENT:
            raise InvalidInput(key, "only the first message of a prompt in pieces may have parameters")
    if payload.outputs:
        raise InvalidInput("outputs", "only the first message of a prompt in pieces may name outputs")
    tensors = read_tensors(payload.inputs, names.INPUT_TENSORS, info.max_model_len)
    source = prompt_source(tensors)
    allowed = names.TEXT_TENSORS if isinstance(first.prompts[0], TextPrompt) else (names.INPUT_IDS,)
    if source not in allowed:
        raise InvalidInput(source, f"the first piece of this prompt was {allowed[0]}, so all pieces must be")
    for name in tensors:
        if name != source:
            raise InvalidInput(name, "only the first message of a prompt in pieces may have it")
    prompts = read_prompts(tensors, {}, info)
    if len(prompts) != 1:
        raise InvalidInput(source, f"a piece must have one element, got {len(prompts)}")
    return prompts[0]
