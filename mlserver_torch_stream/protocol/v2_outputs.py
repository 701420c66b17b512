"""Builds V2 output tensors and responses, and decides which outputs a request is shown.

A response is the plain object that REST writes as JSON, and MLServer's model of it for gRPC is made from that. Knows
nothing of when a response is due.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from mlserver.types import InferenceResponse

from mlserver_torch_stream.protocol import v2_names as names
from mlserver_torch_stream.protocol.chat_completion import finite
from mlserver_torch_stream.protocol.usage import UsageCounter
from mlserver_torch_stream.types import ReplyOptions, TokenLogprob

Body = dict[str, Any]
"""A response, or one of its output tensors, as REST spells it; the elements of BYTES are str."""

_DATATYPES = {**names.OUTPUT_DATATYPES, **names.CHAT_OUTPUT_DATATYPES}


def shown_outputs(reply: ReplyOptions) -> frozenset[str]:
    """The outputs that a reply carries: those that were asked for, within the request's own list of names."""
    asked = {
        names.TEXT_OUTPUT: True,
        names.FINISH_REASON: reply.finish_reason,
        names.NUM_INPUT_TOKENS: reply.num_input_tokens,
        names.NUM_OUTPUT_TOKENS: reply.num_output_tokens,
        names.CUMULATIVE_LOGPROB: reply.cumulative_logprob,
        names.LOGPROBS: reply.logprobs,
        names.TOKEN_IDS: reply.token_ids,
        **dict.fromkeys(names.CHAT_OUTPUT_DATATYPES, reply.chat_tensors),
    }
    return frozenset(
        name for name, wanted in asked.items() if wanted and (reply.outputs is None or name in reply.outputs)
    )


def output(name: str, data: list[Any], shape: list[int] | None = None) -> Body:
    return {"name": name, "shape": shape or [len(data)], "datatype": _DATATYPES[name], "data": data}


def response(
    model_name: str, model_version: str | None, request_id: str, parameters: Mapping[str, Any], outputs: list[Body]
) -> Body:
    """One response; gRPC drops parameters that are no string, integer or boolean."""
    if model_version is None:
        return {"model_name": model_name, "id": request_id, "parameters": parameters, "outputs": outputs}
    return {
        "model_name": model_name,
        "model_version": model_version,
        "id": request_id,
        "parameters": parameters,
        "outputs": outputs,
    }


def as_response(body: Body) -> InferenceResponse:
    """MLServer's model of a response: BYTES are bytes, as gRPC needs; validated, in Rust, which is the cheap way."""
    return InferenceResponse.model_validate({**body, "outputs": [_as_bytes(tensor) for tensor in body["outputs"]]})


def _as_bytes(tensor: Body) -> Body:
    if tensor["datatype"] != "BYTES":
        return tensor
    return {**tensor, "data": [element.encode() for element in tensor["data"]]}


def totals(tally: UsageCounter) -> dict[str, int]:
    """The response parameters that only the very last response carries."""
    return {
        "usage_prompt_tokens": tally.prompt_tokens,
        "usage_completion_tokens": tally.completion_tokens,
        "ttft_ms": tally.ttft_ms,
        "queue_ms": tally.queue_ms,
    }


def logprobs_json(entries: Sequence[TokenLogprob]) -> str:
    return orjson.dumps(
        [
            {
                "token_id": entry.token_id,
                "logprob": finite(entry.logprob),
                "top": [[token_id, finite(logprob)] for token_id, logprob in entry.top],
            }
            for entry in entries
        ]
    ).decode()
