"""Request parameters of gRPC messages as Triton's clients write them: fractions, and integers without a sign.

Knows nothing of what they mean. MLServer's message has neither field, so protobuf keeps them as unknown ones.
"""

from __future__ import annotations

import struct

from google.protobuf.unknown_fields import UnknownFieldSet
from mlserver.grpc import dataplane_pb2 as pb
from mlserver.types import InferenceRequest

# Their numbers in Triton's InferParameter, and how protobuf encodes them.
_DOUBLE = (4, 1)
_UINT64 = (5, 0)


def fill_in(payload: InferenceRequest, message: pb.ModelInferRequest) -> None:
    """Gives the request the values that MLServer has not read."""
    for name, parameter in message.parameters.items():
        if parameter.WhichOneof("parameter_choice") is None:
            value = _value(parameter)
            if value is not None:
                setattr(payload.parameters, name, value)


def _value(parameter: pb.InferParameter) -> float | int | None:
    for field in UnknownFieldSet(parameter):
        kind = (field.field_number, field.wire_type)
        if kind == _DOUBLE:
            return float(struct.unpack("<d", struct.pack("<Q", field.data))[0])
        if kind == _UINT64:
            return int(field.data)
    return None
