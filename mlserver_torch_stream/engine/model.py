"""Loads a model and prepares it for an engine, on this process alone or on all ranks at once.

Blocks for as long as loading takes.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from mlserver_torch_stream.engine.cache.pages import page_size_of
from mlserver_torch_stream.engine.checks.forward_choice import ForwardChoice, choose_forward
from mlserver_torch_stream.engine.checks.logits import ExpectedLogits
from mlserver_torch_stream.engine.checks.overlap import take_pipeline
from mlserver_torch_stream.engine.checks.packed_check import check_packed
from mlserver_torch_stream.engine.checks.selfcheck import SelfCheckResult, check_batching, check_generate
from mlserver_torch_stream.engine.child_process import in_process
from mlserver_torch_stream.engine.devices import check_devices, device_types, input_device
from mlserver_torch_stream.engine.failures import Unsuitable
from mlserver_torch_stream.engine.loading.gguf_packed import read_tensors
from mlserver_torch_stream.engine.loading.loader import LoadedWeights, load_weights
from mlserver_torch_stream.engine.loading.model_files import ModelFiles, no_packed_weights
from mlserver_torch_stream.engine.loading.placement import (
    DeviceShare,
    describe_moves,
    moved_bytes,
    read_placement,
    seconds_per_step,
)
from mlserver_torch_stream.engine.machine import launched, trim_heap
from mlserver_torch_stream.engine.native.decoder_pickle import unpickle_decoder
from mlserver_torch_stream.engine.native.kernel_library import KernelOptions
from mlserver_torch_stream.engine.native.native_forward import NativeForward
from mlserver_torch_stream.engine.pipeline.stages import Pipeline
from mlserver_torch_stream.engine.ranks import LaunchedModel, prepare_ranks
from mlserver_torch_stream.engine.shared_pool import Lease, ProcessResources
from mlserver_torch_stream.engine.tensor_parallel.validate import KEY
from mlserver_torch_stream.engine.watchdog import FairLock
from mlserver_torch_stream.settings import ResolvedSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """What all steps of a load need. ``threads``: those of torch and of our kernels."""

    resolved: ResolvedSettings
    threads: int
    resources: ProcessResources

    @property
    def kernels(self) -> KernelOptions:
        return KernelOptions(self.threads, self.resolved.cache_dir)

    def lock_on(self, device: torch.device) -> FairLock:
        """Returns the lock of the engines that share a device. The engines of one model alone share its GPU."""
        return self.resources.cpu_lock if device.type == "cpu" else FairLock()


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """Weights, the results of their checks, and their forward. Engines take turns on them with ``fair_lock``."""

    weights: LoadedWeights
    findings: SelfCheckResult
    choice: ForwardChoice | None  # None: the model cannot be batched
    device: torch.device  # of the token ids
    fair_lock: FairLock | None  # None: the pipeline's stages have locks of their own
    ranks: LaunchedModel | None = None
    placement: tuple[DeviceShare, ...] = ()
    pipeline: Pipeline | None = None

    @property
    def has_threads(self) -> bool:
        """Whether the forward computes on threads of its own."""
        return self.choice is not None and self.choice.forward.has_threads

    @property
    def overlaps(self) -> bool:
        """Whether a forward returns while its device computes: a single GPU holds and computes all of the model."""
        return self.device.type == "cuda" and len(self.placement) == 1 and self.placement[0].brought_to is None

    def check_devices(self) -> None:
        """Raises the device's own error if a device is lost."""
        if self.ranks is not None:
            self.ranks.leader.check()
        check_devices({self.device, *self.findings.specs})


def prepare(files: ModelFiles, load: ModelLoad) -> PreparedModel:
    """Raises LoadFailed."""
    resolved, settings = load.resolved, load.resolved.settings
    if files.packed:
        return _prepare_packed(files, load)
    if settings.tensor_parallel_size > 1:
        return _prepare_ranks(files, load)
    if launched(os.environ):
        waiting = f"{os.environ['WORLD_SIZE']} ranks were started, and only a model that sets it is split over them"
        logger.warning("%s is not set for %s: %s", KEY, resolved.source.name, waiting)
    with torch.inference_mode():
        weights = load_weights(files, resolved)
        placement = read_placement(weights.model)
        if moved_bytes(placement):
            slowness = describe_moves(placement, seconds_per_step(weights.model))
            logger.warning("%s: %s", resolved.source.name, slowness)
        expected = ExpectedLogits(weights.model)
        findings = SelfCheckResult(problem="set by engine: serial")
        if settings.engine != "serial":
            page_size = page_size_of(device_types(weights.model))
            findings = check_batching(weights.model, expected=expected, page_size=page_size)
        choice, pipeline = None, None
        if findings.problem is not None:
            check_generate(weights.model)
        else:
            choice = choose_forward(expected, findings, settings, load.kernels)
            if settings.pipeline == "auto" and not choice.forward.has_threads:
                pipeline = take_pipeline(weights.model, load.threads, choice.forward)
        del expected  # its logits and caches take memory
    device = input_device(weights.model)
    trim_heap()  # the conversion and the packing of the weights leave free blocks
    logger.info("Loaded the weights of %s", resolved.source.name)
    fair_lock = None if pipeline is not None else load.lock_on(device)
    return PreparedModel(weights, findings, choice, device, fair_lock, placement=placement, pipeline=pipeline)


def _prepare_packed(files: ModelFiles, load: ModelLoad) -> PreparedModel:
    """The only way of a load that leaves transformers' modeling code out of this process. Raises LoadFailed."""
    folder, name = Path(files.location), load.resolved.source.name
    try:
        checked = in_process(check_packed, folder, name, load.kernels)
        with torch.inference_mode():
            decoder = unpickle_decoder(checked.decoder, read_tensors(folder)[0].__getitem__)
            forward = NativeForward(decoder, load.kernels)
    except (Unsuitable, OSError, SafetensorError) as error:
        raise no_packed_weights(str(error)) from error
    if forward.variant != checked.variant:
        raise no_packed_weights(f"the kernels ({checked.variant}) were checked, these run here: {forward.variant}")
    del decoder  # with the blocks, of which the kernels have a copy
    trim_heap()
    logger.info("Loaded the weights of %s", name)
    choice, device = ForwardChoice(forward), torch.device("cpu")
    return PreparedModel(
        checked.weights, checked.findings, choice, device, load.lock_on(device), placement=checked.placement
    )


def _prepare_ranks(files: ModelFiles, load: ModelLoad) -> PreparedModel:
    ranks = prepare_ranks(files, load.resolved)
    weights, findings = ranks.shard.weights, ranks.shard.findings
    device = input_device(weights.model)
    return PreparedModel(weights, findings, ForwardChoice(ranks.forward), device, load.lock_on(device), ranks=ranks)


def give_back_weights(lease: Lease[PreparedModel]) -> None:
    ranks = lease.value.ranks
    if lease.end() and ranks is not None:
        ranks.leader.stop()
