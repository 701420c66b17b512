"""Loads and checks each rank's part of a model on all ranks at once: it succeeds on all of them or fails on all.

Knows nothing of requests. ``load_shard`` is the same on every rank.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from mlserver_torch_stream.engine.forward.interface import Forward
from mlserver_torch_stream.engine.forward.model_forward import ModelForward, input_device
from mlserver_torch_stream.engine.loading.host_limits import read_host
from mlserver_torch_stream.engine.loading.loader import LoadedWeights, load_weights, locate
from mlserver_torch_stream.engine.loading.selfcheck import SelfCheckResult, check_batching
from mlserver_torch_stream.engine.tensor_parallel.rank_group import RankGroup
from mlserver_torch_stream.engine.tensor_parallel.rendezvous import ranks_here
from mlserver_torch_stream.engine.tensor_parallel.validate import KEY
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.model_source import ModelSource
from mlserver_torch_stream.settings import EngineSettings, ResolvedSettings


@dataclass(frozen=True, slots=True)
class Shard:
    """``room``: the bytes that are free on the fullest of the ranks' devices, once all ranks have loaded.

    ``forward`` runs this rank's part, as the findings say; the other ranks run theirs at the same time.
    """

    weights: LoadedWeights
    findings: SelfCheckResult
    forward: Forward
    room: int


def send_settings(resolved: ResolvedSettings, group: RankGroup) -> None:
    source = resolved.source
    group.send([resolved.settings.model_dump(mode="json"), source.kind, source.location])


def receive_settings(group: RankGroup) -> ResolvedSettings:
    settings, kind, location = group.receive()
    return ResolvedSettings(EngineSettings.model_validate(settings), ModelSource(kind, location), {})


def load_shard(resolved: ResolvedSettings, group: RankGroup) -> Shard:
    """Raises LoadFailed, which names the rank, on all ranks if one of them fails."""
    with torch.inference_mode():
        with group.all_or_none():
            files = locate(resolved)
        with group.all_or_none():
            weights = load_weights(files, resolved)
        room = group.smallest(_room(input_device(weights.model), group.size))  # the ranks check the same lengths
        with group.all_or_none():
            findings = check_batching(weights.model, room)
            if findings.problem is not None:
                raise LoadFailed(f"{KEY}: this model cannot be batched: {findings.problem}")
        if not group.agrees(f"{findings.way}, {findings.chunked}"):
            raise LoadFailed(f"{KEY}: the checks of the ranks differ")
        forward = ModelForward(weights.model, findings.way)
    return Shard(weights, findings, forward, group.smallest(_room(input_device(weights.model), group.size)))


def _room(device: torch.device, size: int) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return read_host().available_bytes // ranks_here(size, os.environ)
