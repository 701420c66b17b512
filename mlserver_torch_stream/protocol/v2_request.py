"""Decodes a V2 inference request into a GenerationRequest, or names the field that is wrong.

Knows nothing of the transport: a request from REST and one from gRPC are decoded by the same rules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from mlserver.types import InferenceRequest, RequestOutput
from pydantic import ValidationError

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol import v2_names as names
from mlserver_torch_stream.protocol.parameters import TENSORS, merge_parameters
from mlserver_torch_stream.protocol.request_options import (
    build_request,
    check_id,
    read_client,
    read_stream_options,
    with_usage,
)
from mlserver_torch_stream.protocol.unsupported import refuse
from mlserver_torch_stream.protocol.v2_prompt import read_prompts
from mlserver_torch_stream.protocol.v2_tensors import INTEGERS, NUMBERS, Tensor, parameters_of, read_tensors
from mlserver_torch_stream.protocol.v2_unreadable import refuse_unreadable
from mlserver_torch_stream.types import GenerationRequest, ModelInfo

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
    """``streaming``: the endpoint that received the request answers with a stream. ``outputs``: the output tensors that
    the request may name."""
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
    """MLServer's model of a request. Raises InvalidInput."""
    try:
        return InferenceRequest.model_validate(body)
    except ValidationError as error:
        raise first_complaint(error) from None


def first_complaint(error: ValidationError) -> InvalidInput:
    """The first field that pydantic finds wrong, with its message."""
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
