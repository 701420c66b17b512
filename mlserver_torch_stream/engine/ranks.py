"""Loads and checks each rank's part of a model on all ranks at once.

A load succeeds on all ranks or fails on all ranks. Rank 0 prepares the model for an engine; every other rank follows
rank 0 until rank 0 tells it to stop. ``load_shard`` runs on every rank.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.cache.pages import page_size_of
from mlserver_torch_stream.engine.checks.forward_choice import with_attention
from mlserver_torch_stream.engine.checks.logits import ExpectedLogits
from mlserver_torch_stream.engine.checks.selfcheck import SelfCheckResult, check_batching
from mlserver_torch_stream.engine.config_fields import read_config
from mlserver_torch_stream.engine.devices import check_devices, device_types, free_memory, input_device
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.loading.loader import LoadedWeights, load_weights, set_threads
from mlserver_torch_stream.engine.loading.locate import check_unchanged, locate
from mlserver_torch_stream.engine.loading.model_files import ModelFiles
from mlserver_torch_stream.engine.machine import ranks_here, read_host
from mlserver_torch_stream.engine.native.compile_kernels import NoKernels
from mlserver_torch_stream.engine.native.kernel_library import open_kernels
from mlserver_torch_stream.engine.native.library import open_library
from mlserver_torch_stream.engine.tensor_parallel.leader import Leader, Operation, decode_operations
from mlserver_torch_stream.engine.tensor_parallel.rank_group import RankGroup
from mlserver_torch_stream.engine.tensor_parallel.ranked_cache import FollowerCaches, RankedCache, RankedForward
from mlserver_torch_stream.engine.tensor_parallel.rendezvous import MODULE, form
from mlserver_torch_stream.engine.tensor_parallel.validate import KEY, check_model, check_settings
from mlserver_torch_stream.engine_settings import EngineSettings
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.model_source import ModelSource
from mlserver_torch_stream.settings import ResolvedSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's part of a model. ``room`` is the number of free bytes on the fullest device of any rank.

    ``forward`` runs this part, with batches in the form that ``findings`` names, while the other ranks run their parts.
    """

    weights: LoadedWeights
    findings: SelfCheckResult
    forward: ModelForward
    room: int


def send_settings(resolved: ResolvedSettings, group: RankGroup) -> None:
    """Sends the leader's settings and the location of the model to all other ranks."""
    source = resolved.source
    group.send([resolved.settings.model_dump(mode="json"), source.kind, source.location])


def receive_settings(group: RankGroup) -> ResolvedSettings:
    """Returns the settings and the location of the model that the leader sends."""
    settings, kind, location = group.receive()
    return ResolvedSettings(EngineSettings.model_validate(settings), ModelSource(kind, location), {})


def load_shard(resolved: ResolvedSettings, group: RankGroup) -> Shard:
    """Loads and checks this rank's part.

    If one rank fails, all ranks raise LoadFailed, which names that rank.
    """
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
            raise LoadFailed(f"{KEY}: the checks at load have different results on the ranks")
        forward = _choose_forward(expected, findings, resolved, group, room)
        del expected  # its logits and caches take memory
    left = group.smallest(_room(input_device(weights.model), group.size))
    return Shard(weights, findings, forward, left)


def _choose_forward(
    expected: ExpectedLogits, findings: SelfCheckResult, resolved: ResolvedSettings, group: RankGroup, room: int
) -> ModelForward:
    """Chooses the attention.

    Either all ranks use the fast attention or no rank does, because the checks run the model on all ranks together.
    """
    with group.all_or_none():
        fast = resolved.settings.fast_path == "auto" and _has_kernels(findings, resolved.cache_dir)
    if not group.smallest(fast):
        return ModelForward(expected.model, findings.way)
    with group.all_or_none():
        return with_attention(
            expected,
            findings,
            resolved.cache_dir,
            room=room,
            together=lambda holds: bool(group.smallest(holds)),
        )


def _has_kernels(findings: SelfCheckResult, cache_dir: Path) -> bool:
    """Returns whether this rank has attention kernels. Raises LoadFailed as ``open_kernels`` does."""
    if {device.type for device in findings.specs} != {"cpu"}:
        return True
    try:
        open_kernels(cache_dir, open_library)
    except NoKernels as error:
        logger.warning("torch computes attention, because the attention kernels are not used: %s", error)
        return False
    return True


def _room(device: torch.device, size: int) -> int:
    if device.type == "cuda":
        return free_memory(device)
    return read_host().available_bytes // ranks_here(size, os.environ)


@dataclass(frozen=True, slots=True)
class LaunchedModel:
    """Rank 0's shard and the leader of the other ranks. ``cache`` makes a cache on all ranks, like ``PagedCache``."""

    shard: Shard
    leader: Leader
    cache: Callable[..., RankedCache]
    forward: RankedForward


def prepare_ranks(files: ModelFiles, resolved: ResolvedSettings, module: str = MODULE) -> LaunchedModel:
    """Loads a model on all ranks, and blocks until it is loaded. Ends all ranks before it raises LoadFailed.

    ``module`` is passed to ``form``.
    """
    settings = resolved.settings
    check_settings(settings)
    if files.gguf_file is not None:
        raise LoadFailed(f"{KEY}: needs a converted copy of {files.gguf_file.name}: set cache_dir to a writable folder")
    revision, trust = settings.revision or "main", settings.trust_remote_code
    config = read_config(resolved.source.name, files.location, revision=revision, trust_remote_code=trust)
    check_model(config, settings.tensor_parallel_size)
    group, other_ranks = form(settings.tensor_parallel_size, os.environ, module)
    try:
        send_settings(resolved, group)
        shard = load_shard(resolved, group)
        check_unchanged(files)
    except BaseException as error:
        fate = other_ranks.fate(0 if isinstance(error, LoadFailed) else 1)
        other_ranks.end(0)
        group.leave()
        if isinstance(error, RuntimeError):
            raise LoadFailed(f"{KEY}: the ranks lost their connection while loading: {fate or error}") from error
        raise
    leader = Leader(group, other_ranks)
    return LaunchedModel(shard, leader, partial(RankedCache, leader), RankedForward(shard.forward, leader))


def follow(find: Callable[[], RankGroup]) -> int:
    """Joins the group that ``find`` returns and follows rank 0.

    Returns the exit status, which is 0 if rank 0 has told this rank to stop.
    """
    logging.basicConfig(format="%(asctime)s [rank] %(levelname)s - %(message)s")
    transformers_logging.disable_progress_bar()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        group = find()
        # From here on only rank 0 ends this rank: a signal to all ranks must not break the streams of rank 0.
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        _serve(group)
        group.leave()
        return 0
    except (LoadFailed, RuntimeError) as error:
        logger.error("rank %s ends: %s", os.environ.get("RANK"), error)
        return 1


def _serve(group: RankGroup) -> None:
    resolved = receive_settings(group)
    set_threads(resolved.settings, read_host())
    shard = load_shard(resolved, group)
    forward = shard.forward
    caches = FollowerCaches(CacheLayout(shard.weights.model.config), forward, group.all_raised)
    with torch.inference_mode():
        while True:
            for operation, numbers in decode_operations(group.receive_operations()):
                if operation is Operation.STOP:
                    return
                if operation is Operation.PULSE:
                    check_devices({forward.device})  # a rank whose device hangs does not answer
                    group.pulse()
                else:
                    caches.run(operation, *numbers)
