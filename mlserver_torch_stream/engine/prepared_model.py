"""Loads weights onto their devices and checks them, once for all engines that share them.

Knows nothing of requests or of the engines. Blocks for as long as loading takes.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch

from mlserver_torch_stream.engine.devices import check_devices
from mlserver_torch_stream.engine.forward.interface import Forward
from mlserver_torch_stream.engine.forward.model_forward import ModelForward, input_device
from mlserver_torch_stream.engine.forward.prepacked_linear import pack_linears
from mlserver_torch_stream.engine.loading.heap import trim_heap
from mlserver_torch_stream.engine.loading.loader import LoadedWeights, ModelFiles, load_weights
from mlserver_torch_stream.engine.loading.placement import (
    DeviceShare,
    describe_moves,
    moved_bytes,
    read_placement,
    seconds_per_step,
)
from mlserver_torch_stream.engine.loading.quantised import is_quantised
from mlserver_torch_stream.engine.loading.selfcheck import SelfCheckResult, check_batching, check_generate
from mlserver_torch_stream.engine.loading.shared_pool import Lease
from mlserver_torch_stream.engine.loading.stage_log import stage
from mlserver_torch_stream.engine.native.verify_native import take_fast_path, take_int8
from mlserver_torch_stream.engine.pipeline.stage_locks import Pipeline
from mlserver_torch_stream.engine.pipeline.verify_concurrency import take_pipeline
from mlserver_torch_stream.engine.process_resources import FairLock, ProcessResources
from mlserver_torch_stream.engine.tensor_parallel.launch import LaunchedModel, prepare_ranks
from mlserver_torch_stream.engine.tensor_parallel.rendezvous import launched
from mlserver_torch_stream.engine.tensor_parallel.validate import KEY
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import ResolvedSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """Weights, the results of their checks, and their forward. Engines take turns on them with ``fair_lock``."""

    weights: LoadedWeights
    findings: SelfCheckResult
    forward: Forward | None
    packed: int  # linear layers of the model that oneDNN has laid out
    device: torch.device  # of the token ids
    fair_lock: FairLock | None  # None: the pipeline's stages have locks of their own
    ranks: LaunchedModel | None = None
    placement: tuple[DeviceShare, ...] = ()
    pipeline: Pipeline | None = None
    no_kernels: str | None = None  # why our own kernels, which are faster, do not run

    def check_devices(self) -> None:
        """Raises the device's own error if a device is lost."""
        if self.ranks is not None:
            self.ranks.leader.check()
        check_devices({self.device, *self.findings.specs})


def prepare(files: ModelFiles, resolved: ResolvedSettings, threads: int, resources: ProcessResources) -> PreparedModel:
    """Raises LoadFailed."""
    settings = resolved.settings
    if settings.tensor_parallel_size > 1:
        return _prepare_ranks(files, resolved, resources)
    if launched(os.environ):
        waiting = f"{os.environ['WORLD_SIZE']} ranks were started, and only a model that sets it is split over them"
        logger.warning("%s is not set for %s: %s", KEY, resolved.source.name, waiting)
    with torch.inference_mode():
        weights = load_weights(files, resolved)
        placement = read_placement(weights.model)
        if moved_bytes(placement):
            slowness = describe_moves(placement, seconds_per_step(weights.model))
            logger.warning("%s: %s", resolved.source.name, slowness)
        findings = SelfCheckResult(problem="set by engine: serial")
        if settings.engine != "serial":
            with stage(logger, f"Checking that {resolved.source.name} gives a batch the logits of each sequence alone"):
                findings = check_batching(weights.model)
        if findings.problem is not None:
            check_generate(weights.model)
        forward: Forward | None = None
        no_kernels = None
        quantised = is_quantised(weights.model)
        if settings.weights == "int8":
            if quantised:
                raise LoadFailed("parameters.extra.weights: int8 is for dense weights, this checkpoint is quantised")
            forward = take_int8(weights.model, findings, threads, resolved.cache_dir)
        elif findings.problem is None and settings.fast_path == "auto" and not quantised:
            taken = take_fast_path(weights.model, threads, resolved.cache_dir)
            forward, no_kernels = (None, taken) if isinstance(taken, str) else (taken, None)
        packed = pack_linears(weights.model) if forward is None and settings.fast_path == "auto" else 0
        pipeline = None
        if forward is None and findings.problem is None and settings.pipeline == "auto":
            pipeline = take_pipeline(weights.model, threads, ModelForward(weights.model, findings.way))
    device = input_device(weights.model)
    trim_heap()  # the conversion and the packing of the weights leave free blocks
    logger.info("Loaded the weights of %s", resolved.source.name)
    fair_lock = None if pipeline is not None else resources.cpu_lock if device.type == "cpu" else FairLock()
    return PreparedModel(
        *(weights, findings, forward, packed, device, fair_lock),
        placement=placement,
        pipeline=pipeline,
        no_kernels=no_kernels if device.type == "cpu" else None,
    )


def _prepare_ranks(files: ModelFiles, resolved: ResolvedSettings, resources: ProcessResources) -> PreparedModel:
    ranks = prepare_ranks(files, resolved)
    weights, findings = ranks.shard.weights, ranks.shard.findings
    device = input_device(weights.model)
    fair_lock = resources.cpu_lock if device.type == "cpu" else FairLock()
    return PreparedModel(weights, findings, forward=None, packed=0, device=device, fair_lock=fair_lock, ranks=ranks)


def give_back_weights(lease: Lease[PreparedModel]) -> None:
    ranks = lease.value.ranks
    if lease.end() and ranks is not None:
        ranks.leader.stop()
