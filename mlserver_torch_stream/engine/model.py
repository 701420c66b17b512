"""Loads a model and prepares it for an engine, either in this process or on all ranks at once.

The functions block until the model is loaded.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError

from mlserver_torch_stream.engine.cache.pages import page_size_of
from mlserver_torch_stream.engine.checks.decoder_check import check_dense, check_packed
from mlserver_torch_stream.engine.checks.forward_choice import ForwardChoice, choose_forward
from mlserver_torch_stream.engine.checks.logits import ExpectedLogits
from mlserver_torch_stream.engine.checks.overlap import take_pipeline
from mlserver_torch_stream.engine.checks.record import (
    Anew,
    ProvedLoad,
    RecordKey,
    RefusedKernels,
    check_files_hold,
    mapped_tensors,
    outline_of,
    read_record,
    record_key,
    recorded_decoder,
    stored_parameters,
    write_record,
)
from mlserver_torch_stream.engine.checks.selfcheck import SelfCheckResult, check_batching, check_generate
from mlserver_torch_stream.engine.devices import check_devices, device_types, input_device
from mlserver_torch_stream.engine.failures import Unsuitable, in_a_line
from mlserver_torch_stream.engine.fingerprint import file_stamps, weights_folder
from mlserver_torch_stream.engine.loading.checkpoint import weight_files
from mlserver_torch_stream.engine.loading.gguf_packed import WEIGHTS, read_tensors
from mlserver_torch_stream.engine.loading.loader import LoadedWeights, import_model_code, load_weights
from mlserver_torch_stream.engine.loading.locate import check_unchanged, no_packed_weights
from mlserver_torch_stream.engine.loading.model_files import ModelFiles
from mlserver_torch_stream.engine.loading.placement import (
    DeviceShare,
    describe_moves,
    moved_bytes,
    read_placement,
    seconds_per_step,
)
from mlserver_torch_stream.engine.loading.quantised import is_quantised
from mlserver_torch_stream.engine.machine import launched, trim_heap
from mlserver_torch_stream.engine.native.decoder_plan import plan_decoder
from mlserver_torch_stream.engine.native.kernel_library import KernelOptions
from mlserver_torch_stream.engine.native.native_forward import NativeForward
from mlserver_torch_stream.engine.native.panels_file import PanelsFile
from mlserver_torch_stream.engine.native.quantise import ROUNDED
from mlserver_torch_stream.engine.native.structure import read_decoder
from mlserver_torch_stream.engine.pipeline.stages import Pipeline
from mlserver_torch_stream.engine.ranks import LaunchedModel, prepare_ranks
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.engine.tensor_parallel.validate import KEY
from mlserver_torch_stream.engine.watchdog import FairLock
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import ResolvedSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """The values that all steps of a load need.

    ``threads`` is the number of threads both for torch and for our kernels.
    """

    resolved: ResolvedSettings
    threads: int
    resources: ProcessResources

    @property
    def kernels(self) -> KernelOptions:
        """The number of threads and the cache folder of the compiled kernels."""
        return KernelOptions(self.threads, self.resolved.cache_dir)

    def lock_on(self, device: torch.device) -> FairLock:
        """Returns the lock of the engines that share a device.

        Only the engines of one model share the lock of a GPU.
        """
        return self.resources.cpu_lock if device.type == "cpu" else FairLock()


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """Weights with the results of their checks and with their forward.

    Engines that share the weights take turns with ``fair_lock``.
    """

    weights: LoadedWeights
    findings: SelfCheckResult
    choice: ForwardChoice | None  # None: the model cannot be batched
    device: torch.device  # where the token ids are
    fair_lock: FairLock | None  # None: the pipeline's stages have locks of their own
    ranks: LaunchedModel | None = None
    placement: tuple[DeviceShare, ...] = ()
    pipeline: Pipeline | None = None
    files: ModelFiles | None = None  # held, because weights may be mapped from there

    @property
    def has_threads(self) -> bool:
        """Whether the forward computes on threads of its own."""
        return self.choice is not None and self.choice.forward.has_threads

    @property
    def overlaps(self) -> bool:
        """Whether a forward returns while its device still computes; it does if one GPU runs the whole model."""
        return self.device.type == "cuda" and len(self.placement) == 1 and self.placement[0].brought_to is None

    def check_devices(self) -> None:
        """Raises the device's own error if a device is lost."""
        if self.ranks is not None:
            self.ranks.leader.check()
        check_devices({self.device, *self.findings.specs})


def prepare(files: ModelFiles, load: ModelLoad, wait_for_text: Callable[[], object] = lambda: None) -> PreparedModel:
    """Loads, checks and prepares the weights in these files. Raises LoadFailed if any of this fails.

    Another thread may read the tokenizer in the same files meanwhile. ``wait_for_text`` waits for it and raises its
    error; it is called before any work that can take minutes, and before the files are found unchanged.
    """
    check_unchanged(files)
    alone = load.resolved.settings.tensor_parallel_size == 1
    return replace((_prepare_alone if alone else _prepare_ranks)(files, load, wait_for_text), files=files)


def _prepare_alone(files: ModelFiles, load: ModelLoad, wait_for_text: Callable[[], object]) -> PreparedModel:
    resolved = load.resolved
    if launched(os.environ):
        waiting = f"the model is not split over the {os.environ['WORLD_SIZE']} ranks that were started"
        logger.warning("%s is not set for %s: %s", KEY, resolved.source.name, waiting)
    recording = _recording(files, load)
    with torch.inference_mode():
        prepared = _prepare_recorded(files, recording, load) if recording is not None else None
        wait_for_text()
        if not isinstance(prepared, PreparedModel):
            import_model_code()
            if files.packed:
                prepared = _prove_packed(files, load, recording)
            else:
                prepared = _prove(files, load, recording, prepared)
    check_unchanged(files)
    trim_heap()  # the conversion and the packing of the weights leave free blocks
    logger.info("Loaded the weights of %s", resolved.source.name)
    return prepared


@dataclass(frozen=True, slots=True)
class _Recording:
    """The key under which a load is recorded, the ``files`` that contain the weights, and the file for their panels.

    ``stamps()`` returns the names, sizes and times of the model's files; ``first_stamps`` are older than the key.
    """

    key: RecordKey
    files: Sequence[Path]
    panels: PanelsFile | None
    stamps: Callable[[], Hashable]
    first_stamps: Hashable

    @property
    def is_valid(self) -> bool:
        """Whether no file has changed since ``first_stamps``; otherwise the load may have read two versions."""
        return self.stamps() == self.first_stamps


def _recording(files: ModelFiles, load: ModelLoad) -> _Recording | None:
    """Returns the key and files for the record of a load.

    Returns None if the load cannot be recorded, because our kernels do not run the model or it has its own code.
    """
    settings = load.resolved.settings
    if not settings.fits_cpu_kernels or settings.trust_remote_code or settings.allow_pickle or files.gguf_file:
        return None
    try:
        folder = weights_folder(load.resolved, files.location)
        stamps = partial(_stamps, load.resolved, folder, files.packed)
        first_stamps = stamps()
        weights = [folder / WEIGHTS, files.packed] if files.packed else weight_files(folder)
        if not weights:
            return None
        key = record_key(load.resolved, folder, weights, load.kernels)
        panels, content = load.resolved.cache_dir / "panels", folder.name.rpartition("-")[2]
        file = PanelsFile(panels, content, key.weights) if files.packed else None
        return _Recording(key, weights, file, stamps, first_stamps)
    except (Unsuitable, OSError, LoadFailed) as error:  # the load itself reports the error
        logger.debug("The checks of %s are not recorded: %s", load.resolved.source.name, error)
        return None


def _stamps(resolved: ResolvedSettings, folder: Path, packed: Path | None) -> Hashable:
    return file_stamps(resolved, folder), None if packed is None else file_stamps(resolved)


def _record(recording: _Recording | None, result: ProvedLoad | RefusedKernels, load: ModelLoad) -> None:
    """Records the result of a load's checks, if the load can be recorded and its files are still the same."""
    if recording is None:
        return
    if recording.is_valid:
        write_record(recording.key, result, load.resolved.cache_dir)
    else:
        logger.warning("The checks of %s are not recorded: its files have changed", load.resolved.source.name)


def _prepare_recorded(
    files: ModelFiles, recording: _Recording, load: ModelLoad
) -> PreparedModel | RefusedKernels | None:
    """Builds a forward from an earlier load's record, without transformers' model; None if there is no record.

    Returns a record that says that our kernels cannot run the model.
    """
    name = load.resolved.source.name
    try:
        proved = read_record(recording.key, load.resolved.cache_dir)
        if isinstance(proved, RefusedKernels):
            logger.info("%s was checked by an earlier start, which refused our kernels", name)
            return proved
        if isinstance(proved, ProvedLoad):
            place, packed = Path(files.location), files.packed
            tensors = read_tensors(place, packed)[0] if packed else mapped_tensors(recording.files)
            decoder = recorded_decoder(proved, tensors)
            rounding = ROUNDED.get(load.resolved.settings.weights)
            forward = NativeForward(decoder, load.kernels, rounding, compares=False, file=recording.panels)
            if recording.is_valid:
                logger.info("%s was checked by an earlier start: its logits are not compared again", name)
                return _on_kernels(forward, proved, load)
            proved = Anew.WEIGHTS
        anew = proved
    except (Unsuitable, OSError, SafetensorError) as error:
        logger.warning("The record of %s is not used: %s", name, error)
        anew = Anew.DAMAGED
    logger.info("%s is checked%s: %s", name, "" if anew is Anew.NEW else " again", anew.value)
    load.resources.checks[anew.name.lower()] += 1
    return None


def _on_kernels(forward: NativeForward, proved: ProvedLoad, load: ModelLoad) -> PreparedModel:
    device = torch.device("cpu")
    return PreparedModel(
        *(proved.weights, proved.findings, ForwardChoice(forward), device, load.lock_on(device)),
        placement=proved.placement,
    )


def _prove(
    files: ModelFiles, load: ModelLoad, recording: _Recording | None, refused: RefusedKernels | None
) -> PreparedModel:
    resolved, settings = load.resolved, load.resolved.settings
    weights = load_weights(files, resolved)
    placement = read_placement(weights.model)
    if moved_bytes(placement):
        slowness = describe_moves(placement, seconds_per_step(weights.model))
        logger.warning("%s: %s", resolved.source.name, slowness)
    planned = None if recording is None or refused else _planned(weights, placement, recording, resolved)
    if recording is not None and planned is not None:
        if (prepared := _prove_dense(weights, planned, recording, load)) is not None:
            return prepared
        weights = load_weights(files, resolved)
    expected = ExpectedLogits(weights.model)
    findings = SelfCheckResult(problem="set by engine: serial")
    if settings.engine != "serial":
        page_size = page_size_of(device_types(weights.model))
        findings = check_batching(weights.model, expected=expected, page_size=page_size)
    choice, pipeline = None, None
    if findings.problem is not None:
        check_generate(weights.model)
    else:
        choice = choose_forward(expected, findings, settings, load.kernels, None if refused is None else refused.reason)
        if choice.judged and choice.no_kernels is not None:
            _record(recording, RefusedKernels(choice.no_kernels), load)
        if settings.pipeline == "auto" and not choice.forward.has_threads:
            pipeline = take_pipeline(weights.model, load.threads, choice.forward)
    device = input_device(weights.model)
    fair_lock = None if pipeline is not None else load.lock_on(device)
    return PreparedModel(weights, findings, choice, device, fair_lock, placement=placement, pipeline=pipeline)


def _planned(
    weights: LoadedWeights, placement: tuple[DeviceShare, ...], recording: _Recording, resolved: ResolvedSettings
) -> ProvedLoad | None:
    """Plans the decoder of a model, before anything is checked.

    Returns None if our kernels do not support the model, or if the results of its checks cannot be recorded.
    """
    model = weights.model
    if is_quantised(model):
        return None
    try:
        parameters = stored_parameters(model, recording.files)
        plan = plan_decoder(read_decoder(model), parameters)
        check_files_hold(plan, parameters, recording.files)
        outlined = replace(weights, model=outline_of(model))
    except Exception as error:  # the modules of a model of another layout can raise any error
        logger.debug("The checks of %s are not recorded: %s", resolved.source.name, in_a_line(error))
        return None
    return ProvedLoad(plan, outlined, SelfCheckResult(problem="not checked"), placement, model.dtype)


def _prove_dense(
    weights: LoadedWeights, planned: ProvedLoad, recording: _Recording, load: ModelLoad
) -> PreparedModel | None:
    """Proves our kernels over a model's first layers, and records that; returns None if the kernels are refused.

    The weights of transformers' model are then gone.
    """
    resolved, rounding = load.resolved, ROUNDED.get(load.resolved.settings.weights)
    try:
        forward, proved = check_dense(weights.model, planned, recording.files, load.kernels, rounding)
    except LoadFailed:
        raise
    except Exception as error:  # as in ``accepted``
        why = in_a_line(error)
        logger.warning("%s is loaded again and checked in all its layers: %s", resolved.source.name, why)
        return None
    _record(recording, proved, load)
    return _on_kernels(forward, proved, load)


def _prove_packed(files: ModelFiles, load: ModelLoad, recording: _Recording | None) -> PreparedModel:
    try:
        name, longest = load.resolved.source.name, load.resolved.settings.max_model_len
        file = None if recording is None else recording.panels
        assert files.packed is not None
        forward, proved = check_packed(Path(files.location), files.packed, name, load.kernels, longest, file)
    except (Unsuitable, OSError, SafetensorError) as error:
        raise no_packed_weights(str(error)) from error
    check_unchanged(files)  # before the record is written; now the file is mapped
    _record(recording, proved, load)
    return _on_kernels(forward, proved, load)


def _prepare_ranks(files: ModelFiles, load: ModelLoad, wait_for_text: Callable[[], object]) -> PreparedModel:
    wait_for_text()
    ranks = prepare_ranks(files, load.resolved)
    weights, findings = ranks.shard.weights, ranks.shard.findings
    device = input_device(weights.model)
    return PreparedModel(weights, findings, ForwardChoice(ranks.forward), device, load.lock_on(device), ranks=ranks)
