"""Requests and answers with the classes of KServe's own V2 clients.

Runs in the clients' own environment, for any transport.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from features import NOT_IMPLEMENTED, QUESTION
from kserve import InferInput, InferRequest, InferResponse
from kserve.protocol.infer_type import RequestedOutput

_ALL = ["text_output", "finish_reason", "num_input_tokens", "num_output_tokens"]
_PLAIN = {"max_tokens": 5, "ignore_eos": True}


def request(
    *inputs: InferInput, raw: bool = False, model: str = "tiny", outputs: Any = None, **parameters: Any
) -> InferRequest:
    return InferRequest(
        model_name=model,
        infer_inputs=list(inputs or [tensor("text_input", "Grüße", raw=raw)]),
        request_id="mine",
        parameters={**_PLAIN, **parameters},
        request_outputs=outputs,
    )


def tensor(name: str, value: str, *, raw: bool = False) -> InferInput:
    made = InferInput(name, [1], "BYTES")
    made.set_data_from_numpy(np.array([value], dtype=object), binary_data=raw)
    return made


def talk(**parameters: Any) -> InferRequest:
    return request(tensor("messages", json.dumps(QUESTION)), **parameters)


def not_implemented() -> dict[str, InferRequest]:
    """Returns a request with each parameter that is not implemented."""
    return {name: talk(**{name: json.dumps(value)}) for name, value in NOT_IMPLEMENTED.items()}


def output(name: str, raw: bool) -> RequestedOutput:
    return RequestedOutput(name, {"binary_data": raw})


def values(response: InferResponse) -> dict[str, list[Any]]:
    """Returns the outputs by name. Over gRPC, strings outside raw contents arrive as bytes."""
    assert response.id == "mine" and response.model_name == "tiny"
    return {
        each.name: [value.decode() if isinstance(value, bytes) else value for value in each.as_numpy().tolist()]
        for each in response.outputs
    }


def text(found: dict[str, list[Any]]) -> str:
    """Checks an answer that must have all outputs, and returns its text."""
    assert list(found) == _ALL, found
    assert found["num_output_tokens"] == [5] and found["finish_reason"] == ["length"], found
    assert found["text_output"][0]
    return str(found["text_output"][0])
