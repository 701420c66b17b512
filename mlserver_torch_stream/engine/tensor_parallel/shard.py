"""Loads and checks each rank's part of a model on all ranks at once: it succeeds on all of them or fails on all.

``load_shard`` is the same on every rank.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from mlserver_torch_stream.engine.cache.cache_spec import page_size_of
from mlserver_torch_stream.engine.checks.expected_logits import ExpectedLogits
from mlserver_torch_stream.engine.checks.selfcheck import SelfCheckResult, check_batching
from mlserver_torch_stream.engine.devices import device_types, input_device
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.forward_choice import with_attention
from mlserver_torch_stream.engine.loading.loader import LoadedWeights, load_weights
from mlserver_torch_stream.engine.loading.model_files import locate
from mlserver_torch_stream.engine.machine import ranks_here, read_host
from mlserver_torch_stream.engine.native.compile_kernels import NoKernels
from mlserver_torch_stream.engine.native.kernel_library import open_kernels
from mlserver_torch_stream.engine.native.library import open_library
from mlserver_torch_stream.engine.tensor_parallel.rank_group import RankGroup
from mlserver_torch_stream.engine.tensor_parallel.validate import KEY
from mlserver_torch_stream.engine_settings import EngineSettings
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.model_source import ModelSource
from mlserver_torch_stream.settings import ResolvedSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shard:
    """``room``: the bytes that are free on the fullest of the ranks' devices, once all ranks have loaded.

    ``forward`` runs this rank's part, as the findings say; the other ranks run theirs at the same time. ``attention``
    is that of ``ForwardChoice``.
    """

    weights: LoadedWeights
    findings: SelfCheckResult
    forward: ModelForward
    attention: str | None
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
        expected = ExpectedLogits(weights.model)
        with group.all_or_none():
            findings = check_batching(
                weights.model, room, expected=expected, page_size=page_size_of(device_types(weights.model))
            )
            if findings.problem is not None:
                raise LoadFailed(f"{KEY}: this model cannot be batched: {findings.problem}")
        if not group.agrees(f"{findings.way}, {findings.chunked}, {findings.page_size}"):
            raise LoadFailed(f"{KEY}: the checks of the ranks differ")
        forward, attention = _choose_forward(expected, findings, resolved, group, room)
        del expected  # its logits and caches take memory
    left = group.smallest(_room(input_device(weights.model), group.size))
    return Shard(weights, findings, forward, attention, left)


def _choose_forward(
    expected: ExpectedLogits, findings: SelfCheckResult, resolved: ResolvedSettings, group: RankGroup, room: int
) -> tuple[ModelForward, str | None]:
    """All ranks take the fast attention, or none: its checks run the model, which the ranks can only do together."""
    with group.all_or_none():
        fast = resolved.settings.fast_path == "auto" and _has_kernels(findings, resolved.cache_dir)
    if not group.smallest(fast):
        return ModelForward(expected.model, findings.way), None
    with group.all_or_none():
        return with_attention(
            expected,
            findings,
            resolved.cache_dir,
            room=room,
            together=lambda holds: bool(group.smallest(holds)),
        )


def _has_kernels(findings: SelfCheckResult, cache_dir: Path) -> bool:
    """Raises LoadFailed as ``open_kernels`` does."""
    if {device.type for device in findings.specs} != {"cpu"}:
        return True
    try:
        open_kernels(cache_dir, open_library)
    except NoKernels as error:
        logger.warning("the attention kernels are not used, torch computes attention: %s", error)
        return False
    return True


def _room(device: torch.device, size: int) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return read_host().available_bytes // ranks_here(size, os.environ)
