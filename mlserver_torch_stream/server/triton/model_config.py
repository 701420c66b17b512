"""A model's configuration as Triton's clients read it: its tensors, and whether one request gets several responses.

Knows no transport: the object is REST's JSON, and protobuf's JSON form of the gRPC message. What Triton configures and
MLServer does not have is left out.
"""

from __future__ import annotations

from typing import Any

from mlserver.handlers import DataPlane
from mlserver.types import MetadataModelResponse, MetadataTensor

from mlserver_torch_stream.protocol.spelling import JsonObject
from mlserver_torch_stream.server.registered_models import find_model, is_ours


async def read_config(data_plane: DataPlane, name: str, version: str | None) -> JsonObject:
    """Raises MLServerError if there is no such model."""
    metadata = await data_plane.model_metadata(name, version)
    return _config(metadata, ours=is_ours(find_model(data_plane._model_registry, name, version)))


def _config(metadata: MetadataModelResponse, *, ours: bool) -> JsonObject:
    """``ours``: a model of this package, whose inputs are all optional and which streams."""
    optional = {"optional": True} if ours else {}
    return {
        "name": metadata.name,
        "platform": metadata.platform,
        "backend": "mlserver",
        "max_batch_size": 0,
        "input": [{**_tensor(tensor), **optional} for tensor in metadata.inputs or ()],
        "output": [_tensor(tensor) for tensor in metadata.outputs or ()],
        "model_transaction_policy": {"decoupled": ours},
    }


def _tensor(tensor: MetadataTensor) -> dict[str, Any]:
    datatype = str(getattr(tensor.datatype, "value", tensor.datatype))
    return {
        "name": tensor.name,
        "data_type": "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}",
        "dims": list(tensor.shape),
    }
