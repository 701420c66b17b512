"""Decodes a V2 inference request into a GenerationRequest, or says which field is wrong.

Knows nothing of the transport: a request from REST and one from gRPC are decoded by the same rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mlserver.types import InferenceRequest, RequestOutput

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol import v2_names as names
from mlserver_torch_stream.protocol.parameters import TENSORS, Merged, merge_parameters, resolve_sampling
from mlserver_torch_stream.protocol.request_options import (
    check_echo,
    read_echo,
    read_flag,
    read_priority,
    read_stream_mode,
    read_timeout,
)
from mlserver_torch_stream.protocol.seldon_chat import MESSAGE_TENSORS
from mlserver_torch_stream.protocol.unsupported import refuse
from mlserver_torch_stream.protocol.v2_prompt import read_prompts
from mlserver_torch_stream.protocol.v2_tensors import INTEGERS, NUMBERS, Tensor, parameters_of, read_tensors
from mlserver_torch_stream.protocol.v2_unreadable import refuse_unreadable
from mlserver_torch_stream.types import (
    ChatPrompt,
    GenerationRequest,
    ModelInfo,
    Prompt,
    ReplyOptions,
    StreamMode,
)

_DATATYPES = {"INT64": INTEGERS, "FP32": NUMBERS, "BOOL": frozenset({"BOOL"}), "BYTES": frozenset({"BYTES"})}
# Every response of a stream repeats it up to three times, within lines of 48 KiB.
_MOST_ID_CHARACTERS = 256
_OUTPUT_PARAMETERS = frozenset({"headers", "content_type", "binary_data"})


def decode_request(
    payload: InferenceRequest, info: ModelInfo, *, streaming: bool, request_id: str
) -> GenerationRequest:
    """``streaming``: the endpoint that received the request answers with a stream."""
    refuse_unreadable(payload)
    if len(payload.id or "") > _MOST_ID_CHARACTERS:
        raise InvalidInput("id", f"must have at most {_MOST_ID_CHARACTERS} characters")
    tensors = read_tensors(payload.inputs, names.INPUT_TENSORS, info.max_model_len)
    given = merge_parameters(
        parameters_of(payload.parameters), _scalar_tensors(tensors), _sampling_tensor(tensors), info
    )
    mode = read_stream_mode(given, streaming)
    prompts = read_prompts(tensors, given, info)
    if mode is StreamMode.PROMPT:
        _check_pieces(prompts)
    stream = _stream(given, streaming)
    reply = _reply_options(payload.outputs, given, chat_tensors=_seldon_spelled(tensors))
    if reply.echo_prompt:
        check_echo(given, prompts, streaming=streaming and stream is not False)
    sampling = resolve_sampling(given, info, need_logprobs=reply.logprobs or reply.cumulative_logprob)
    return GenerationRequest(
        request_id=request_id,
        prompts=prompts,
        sampling=sampling,
        reply=reply,
        stream=stream,
        stream_mode=mode,
        priority=read_priority(given),
        timeout_s=read_timeout(given),
        client=_client(payload),
    )


def _client(payload: InferenceRequest) -> str:
    """Whose backlog a request belongs to: what its sender says in a header or in gRPC metadata."""
    headers = (payload.parameters.headers if payload.parameters else None) or {}
    return next((str(value) for key, value in headers.items() if key.lower() == names.CLIENT_HEADER), "")


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


def _seldon_spelled(tensors: Mapping[str, Tensor]) -> bool:
    return any(name in tensors for name in MESSAGE_TENSORS)


def _check_pieces(prompts: tuple[Prompt, ...]) -> None:
    if isinstance(prompts[0], ChatPrompt):
        raise InvalidInput("stream_mode", "a conversation cannot come in pieces; send text_input or input_ids")
    if len(prompts) != 1:
        raise InvalidInput("stream_mode", f"prompt takes the pieces of one prompt, got {len(prompts)} prompts")


def _stream(given: Merged, streaming: bool) -> bool | None:
    stream = read_flag(given, "stream")
    if stream and not streaming:
        raise InvalidInput("stream", "true on an endpoint that answers once; use the stream endpoint")
    return stream


def _reply_options(outputs: Iterable[RequestOutput] | None, given: Merged, *, chat_tensors: bool) -> ReplyOptions:
    named = _output_names(outputs or (), chat_tensors)

    def wanted(flag: str, default: bool) -> bool:
        value = read_flag(given, flag)
        return default if value is None else value

    asked_for_logprobs = "logprobs" in given and given["logprobs"].value[0]
    return ReplyOptions(
        finish_reason=wanted("return_finish_reason", True),
        num_input_tokens=wanted("return_num_input_tokens", True),
        num_output_tokens=wanted("return_num_output_tokens", True),
        cumulative_logprob=wanted("return_cumulative_logprob", names.CUMULATIVE_LOGPROB in named),
        logprobs=wanted("return_logprobs", names.LOGPROBS in named or asked_for_logprobs),
        token_ids=wanted("return_token_ids", names.TOKEN_IDS in named),
        echo_prompt=read_echo(given),
        outputs=named or None,
        chat_tensors=chat_tensors,
    )


def _output_names(outputs: Iterable[RequestOutput], chat_tensors: bool) -> frozenset[str]:
    known = {*names.OUTPUT_DATATYPES, *(names.CHAT_OUTPUT_DATATYPES if chat_tensors else ())}
    named = []
    for output in outputs:
        if output.name not in known:
            refuse(output.name, ..., known, what="output")
        for key, value in parameters_of(output.parameters).items():
            if key not in _OUTPUT_PARAMETERS:
                refuse(key, value, _OUTPUT_PARAMETERS, what=f"parameter of output {output.name}")
        named.append(output.name)
    return frozenset(named)
