"""One rank's part of a model: loaded and checked by all ranks in step, or by none.

Knows nothing of requests; it runs alike on every rank.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from mlserver_torch_stream.engine.forward.model_forward import input_device
from mlserver_torch_stream.engine.loading.host_limits import read_host
from mlserver_torch_stream.engine.loading.loader import LoadedWeights, load_weights, locate
from mlserver_torch_stream.engine.loading.selfcheck import SelfCheckResult, check_batching
from mlserver_torch_stream.engine.tensor_parallel.rank_group import RankGroup
from mlserver_torch_stream.engine.tensor_parallel.rendezvous import ranks_here
from mlserver_torch_stream.engine.tensor_parallel.validate import KEY
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import ResolvedSettings


@dataclass(frozen=True, slots=True)
class Shard:
    """``room``: bytes that are free on the fullest of the ranks' devices, once all have loaded."""

    weights: LoadedWeights
    findings: SelfCheckResult
    room: int


def load_shard(resolved: ResolvedSettings, group: RankGroup) -> Shard:
    """Raises LoadFailed on all ranks if one cannot; it names the rank."""
    with torch.inference_mode():
        with group.together():
            place = locate(resolved)
        with group.together():
            weights = load_weights(place, resolved)
        room = group.smallest(_room(input_device(weights.model), group.size))  # all ranks check the same
        with group.together():
            findings = check_batching(weights.model, room)
            if findings.problem is not None:
                raise LoadFailed(f"{KEY}: rows of this model cannot be batched: {findings.problem}")
    return Shard(weights, findings, group.smallest(_room(input_device(weights.model), group.size)))


def _room(device: torch.device, size: int) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return read_host().available_bytes // ranks_here(size, os.environ)
