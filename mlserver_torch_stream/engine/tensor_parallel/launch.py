"""Loads a model that is split over ranks: checks the settings, forms the group, and loads on all ranks at once.

Knows nothing of engines.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mlserver_torch_stream.engine.loading.config_fields import read_config
from mlserver_torch_stream.engine.loading.model_files import ModelFiles
from mlserver_torch_stream.engine.tensor_parallel.leader import Leader
from mlserver_torch_stream.engine.tensor_parallel.rank_processes import MODULE
from mlserver_torch_stream.engine.tensor_parallel.ranked_cache import RankedCache, RankedForward
from mlserver_torch_stream.engine.tensor_parallel.rendezvous import form
from mlserver_torch_stream.engine.tensor_parallel.shard import Shard, load_shard, send_settings
from mlserver_torch_stream.engine.tensor_parallel.validate import KEY, check_model, check_settings
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import ResolvedSettings


@dataclass(frozen=True, slots=True)
class LaunchedModel:
    """Rank 0's shard and the leader of the other ranks. ``cache`` makes a cache on all ranks, like ``PagedCache``."""

    shard: Shard
    leader: Leader
    cache: Callable[..., RankedCache]
    forward: RankedForward


def prepare_ranks(files: ModelFiles, resolved: ResolvedSettings, module: str = MODULE) -> LaunchedModel:
    """Blocks while all ranks load. Ends all ranks before it raises LoadFailed. ``module`` is that of ``form``."""
    settings = resolved.settings
    check_settings(settings)
    if files.gguf_file is not None:
        raise LoadFailed(f"{KEY}: needs the converted {files.gguf_file.name}: set a writable cache_dir")
    revision, trust = settings.revision or "main", settings.trust_remote_code
    config = read_config(resolved.source.name, files.location, revision=revision, trust_remote_code=trust)
    check_model(config, settings.tensor_parallel_size)
    group, other_ranks = form(settings.tensor_parallel_size, os.environ, module)
    try:
        send_settings(resolved, group)
        shard = load_shard(resolved, group)
    except BaseException as error:
        fate = other_ranks.fate(0 if isinstance(error, LoadFailed) else 1)
        other_ranks.end(0)
        group.leave()
        if isinstance(error, RuntimeError):
            raise LoadFailed(f"{KEY}: the ranks lost their connection while loading: {fate or error}") from error
        raise
    leader = Leader(group, other_ranks)
    return LaunchedModel(shard, leader, partial(RankedCache, leader), RankedForward(shard.forward, leader, group))
