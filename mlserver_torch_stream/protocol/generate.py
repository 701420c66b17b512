"""The flat spelling of Triton's generate extension: one JSON object with ``text_input``, one with ``text_output``.

Knows nothing that V2 does not: a flat request is rewritten as the V2 request that it stands for, a flat reply is a V2
response whose outputs and parameters lie side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from mlserver.types import InferenceRequest

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol import v2_names as names
from mlserver_torch_stream.protocol import values
from mlserver_torch_stream.protocol.parameters import SILENT
from mlserver_torch_stream.protocol.v2_binary import ALL_BINARY
from mlserver_torch_stream.protocol.v2_outputs import Body

_ID = "id"
_PARAMETERS = "parameters"
_NO_PARAMETERS = SILENT | {_ID, _PARAMETERS, names.TEXT_INPUT}
_ALWAYS_LISTS = frozenset({names.TOKEN_IDS})


def is_flat(body: Mapping[str, Any]) -> bool:
    return names.TEXT_INPUT in body


def as_v2_request(body: Mapping[str, Any]) -> InferenceRequest:
    """Parameters may stand at the top level or in ``parameters``. Raises InvalidInput."""
    texts = _texts(body[names.TEXT_INPUT])
    tensor = {"name": names.TEXT_INPUT, "datatype": "BYTES", "shape": [len(texts)], "data": texts}
    return InferenceRequest.model_validate(
        {"id": _request_id(body.get(_ID)), "parameters": _parameters(body), "inputs": [tensor]}
    )


def as_flat_reply(body: Body) -> dict[str, Any]:
    """A V2 response made flat: an output of one element is that element, any other a list."""
    reply = {key: value for key, value in body.items() if key not in ("parameters", "outputs")}
    for tensor in body["outputs"]:
        name, data = tensor["name"], tensor["data"]
        if name == names.LOGPROBS:
            data = [orjson.Fragment(element) for element in data]  # JSON in a tensor's string is an object here
        reply[name] = data[0] if len(data) == 1 and name not in _ALWAYS_LISTS else data
    for key, value in body["parameters"].items():
        if key != "request_id":  # it is the id
            reply.setdefault(key, value)
    return reply


def _texts(value: Any) -> list[str]:
    texts = value if isinstance(value, list) else [value]
    for text in texts:
        if not values.is_text(text):
            raise InvalidInput(names.TEXT_INPUT, f"must be a string or a list of strings, got {values.shown(text)}")
    return texts


def _request_id(value: Any) -> str | None:
    if value is not None and not values.is_text(value):
        raise InvalidInput(_ID, f"must be a string, got {values.shown(value)}")
    return value or None


def _parameters(body: Mapping[str, Any]) -> dict[str, Any]:
    nested = body.get(_PARAMETERS)
    if nested is not None and not isinstance(nested, dict):
        raise InvalidInput(_PARAMETERS, f"must be a JSON object, got {values.shown(nested)}")
    if (nested or {}).get(ALL_BINARY) or body.get(ALL_BINARY):
        raise InvalidInput(ALL_BINARY, "flat JSON has no binary outputs; send V2 tensors")
    merged = {key: value for key, value in (nested or {}).items() if key not in SILENT}
    for key, value in body.items():
        if key in _NO_PARAMETERS:
            continue
        if key in names.PROMPT_TENSORS:
            raise InvalidInput(key, f"a second prompt beside {names.TEXT_INPUT}; send exactly one")
        if key == names.TOOLS:
            raise InvalidInput(key, f"only a conversation takes it; send {names.MESSAGES}")
        if merged.setdefault(key, value) != value:
            raise InvalidInput(key, f"differs from the one in {_PARAMETERS}")
    return merged
