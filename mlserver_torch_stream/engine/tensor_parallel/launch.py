"""From settings to rank 0 of a loaded model: refuse, gather the ranks, load in step.

Knows nothing of engines.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig

from mlserver_torch_stream.engine.loading.loader import ModelFiles
from mlserver_torch_stream.engine.tensor_parallel.leader import Leader
from mlserver_torch_stream.engine.tensor_parallel.load_message import write_order
from mlserver_torch_stream.engine.tensor_parallel.mirrored_cache import MirroredForward, MirroredLayout
from mlserver_torch_stream.engine.tensor_parallel.rank_processes import MODULE
from mlserver_torch_stream.engine.tensor_parallel.rendezvous import form
from mlserver_torch_stream.engine.tensor_parallel.shard import Shard, load_shard
from mlserver_torch_stream.engine.tensor_parallel.validate import KEY, check_model, check_settings
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import ResolvedSettings


@dataclass(frozen=True, slots=True)
class LaunchedModel:
    """Rank 0's part of a model, what makes the others do as it does, and their end."""

    shard: Shard
    leader: Leader
    layout: MirroredLayout
    forward: MirroredForward

    def __str__(self) -> str:
        return f"{self.leader.size} ranks, "


def prepare_ranks(place: ModelFiles, resolved: ResolvedSettings, module: str = MODULE) -> LaunchedModel:
    """Blocks while all ranks load. Raises LoadFailed, with no rank left behind. ``module``: as of ``form``."""
    settings = resolved.settings
    check_settings(settings)
    if place.gguf_file is not None:
        raise LoadFailed(f"{KEY}: needs the converted {place.gguf_file.name}: set a writable cache_dir")
    check_model(_config(place, resolved), settings.tensor_parallel_size)
    group, crew = form(settings.tensor_parallel_size, os.environ, module)
    try:
        group.tell(write_order(resolved))
        shard = load_shard(resolved, group)
    except BaseException as error:
        fate = crew.fate(0 if isinstance(error, LoadFailed) else 1)
        crew.end(0)
        group.leave()
        if isinstance(error, RuntimeError):
            raise LoadFailed(f"{KEY}: the ranks lost each other while loading: {fate or error}") from error
        raise
    leader = Leader(group, crew)
    model = shard.weights.model
    return LaunchedModel(shard, leader, MirroredLayout(model, leader), MirroredForward(model, leader))


def _config(place: ModelFiles, resolved: ResolvedSettings) -> Any:
    settings = resolved.settings
    try:
        return AutoConfig.from_pretrained(
            place.location, revision=settings.revision or "main", trust_remote_code=settings.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise LoadFailed(f"cannot read the config of {resolved.source.name}: {error}") from error
