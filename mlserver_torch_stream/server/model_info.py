"""Describes a model to Triton's clients: its tensors, its configuration and its statistics.

Triton's settings that MLServer does not have are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mlserver import MLModel
from mlserver.types import MetadataModelResponse, MetadataTensor

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.spelling import JsonObject
from mlserver_torch_stream.server.host import ServerHost, all_models, find_model
from mlserver_torch_stream.server.observability.request_observer import Duration
from mlserver_torch_stream.server.request import is_ours
from mlserver_torch_stream.server.state import ServerState


async def read_config(host: ServerHost, state: ServerState, name: str, version: str | None) -> JsonObject:
    """Returns a model's configuration in Triton's form. Raises MLServerError if there is no such model."""
    metadata = await host.data_plane.model_metadata(name, version)
    return _config(metadata, ours=is_ours(find_model(host.registry, name, version)))


def _config(metadata: MetadataModelResponse, *, ours: bool) -> JsonObject:
    """Returns the configuration. If ``ours``, the model streams, and all its inputs are optional."""
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


async def read_statistics(host: ServerHost, state: ServerState, name: str, version: str | None) -> JsonObject:
    """Returns the statistics of one model or, without a name, of all models of this package.

    Raises MLServerError if there is no such model, and InvalidInput if it belongs to another runtime.
    """
    if not name:
        return _all_statistics(state, filter(is_ours, all_models(host.registry)))
    model = await host.registry.get_model(name, version)
    if not is_ours(model):
        raise InvalidInput("name", f"{name} belongs to another runtime, whose requests are not counted")
    return _all_statistics(state, [model])


def _all_statistics(state: ServerState, models: Iterable[MLModel]) -> JsonObject:
    """Returns the statistics in Triton's form.

    An execution is a decode step; for models without an engine, it is a request.
    """
    steps = {labels: stats.decode_steps for labels, stats in state.engine_metrics.counters().items()}
    return {"model_stats": [_statistics(state, model.name, model.version or "", steps) for model in models]}


def _statistics(state: ServerState, name: str, version: str, steps: dict[tuple[str, str], int]) -> JsonObject:
    counts = state.request_metrics.of(name, version)
    none = Duration()
    durations = {
        "success": counts.success,
        "fail": counts.fail,
        "queue": counts.queued,
        "compute_input": none,
        "compute_infer": counts.computed,
        "compute_output": none,
        "cache_hit": none,
        "cache_miss": none,
    }
    return {
        "name": name,
        "version": version,
        "last_inference": int(counts.last_request * 1000),
        "inference_count": counts.inferences,
        "execution_count": steps.get((name, version), counts.inferences),
        "inference_stats": {key: _duration(value) for key, value in durations.items()},
    }


def _duration(duration: Duration) -> JsonObject:
    return {"count": duration.count, "ns": int(duration.seconds * 1e9)}
