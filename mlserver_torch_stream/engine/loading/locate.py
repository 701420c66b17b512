"""Finds the files of a model, and refuses models that are not causal language models.

These functions block, and may convert a file, so call them in a thread. Some families of encoders also have a class for
causal language models. With an encoder's weights, the output of that class would be nonsense.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, find_adapter_config_file
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from mlserver_torch_stream.engine.failures import NotPacked, in_a_line
from mlserver_torch_stream.engine.fingerprint import read_stamps, weights_folder
from mlserver_torch_stream.engine.loading.checkpoint import check_folder
from mlserver_torch_stream.engine.loading.embedded import find_embedded
from mlserver_torch_stream.engine.loading.gguf import Turn, converted_folder, hold_folder
from mlserver_torch_stream.engine.loading.model_files import SERVED, ModelFiles, attempt
from mlserver_torch_stream.engine.loading.quantised import wants_packed_gguf
from mlserver_torch_stream.engine_settings import EngineSettings
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import ResolvedSettings

logger = logging.getLogger(__name__)


def download_weights(resolved: ResolvedSettings) -> None:
    """Downloads the safetensors of a hub id into the hub's cache, where ``load_weights`` finds them.

    Nothing is downloaded of a model that ``load_weights`` will refuse by its kind or its adapter. ``load_weights``
    downloads what is still missing then, and reports errors.
    """
    hub_id = resolved.source.location
    if resolved.source.kind != "hub":
        return
    try:
        commit = weights_folder(resolved, hub_id).name  # with it, the cache needs no hub for the files that it has
        code = {"revision": commit, "trust_remote_code": resolved.settings.trust_remote_code}
        config = transformers.AutoConfig.from_pretrained(hub_id, **code)
        refuse_other_kinds(config)
        refuse_adapter(hub_id, commit)
        if getattr(config, "transformers_weights", None) is not None:
            return
        place = {"revision": commit, "_raise_exceptions_for_missing_entries": False}
        if cached_file(hub_id, SAFE_WEIGHTS_NAME, **place) is None:
            index = cached_file(hub_id, SAFE_WEIGHTS_INDEX_NAME, **place)
            if index is not None:
                get_checkpoint_shard_files(hub_id, index, revision=commit)
    except Exception as error:
        logger.debug("The weights of %s are not downloaded before the load: %s", hub_id, in_a_line(error))


def locate(resolved: ResolvedSettings, turn: Turn = nullcontext) -> ModelFiles:
    """Finds a model's files, checks the files of a folder, and converts a GGUF file in a ``turn`` if needed.

    Raises LoadFailed if files are missing or damaged.
    """
    settings, source = resolved.settings, resolved.source
    if source.kind == "folder":
        folder = Path(source.location)
        stamps = read_stamps(folder)  # older than everything that the load reads
        tensors = attempt(source.name, lambda: check_folder(folder))
        return ModelFiles(source.location, None, tensors=tensors, stamps=stamps)
    if source.kind not in ("embedded", "gguf"):
        return ModelFiles(source.location, None)
    file = find_embedded(source.location) if source.kind == "embedded" else Path(source.location)
    stamps = read_stamps(file)
    if attempt(str(file), lambda: wants_packed_gguf(settings.quantization_config)):
        return ModelFiles("", file, stamps=stamps)
    folder = attempt(str(file), lambda: converted_folder(file, resolved.cache_dir, settings.dtype, turn=turn), file)
    if folder is None:
        return ModelFiles("", file, stamps=stamps)
    return ModelFiles(str(folder), None, held=attempt(str(file), lambda: hold_folder(folder)))


def locate_packed(resolved: ResolvedSettings, turn: Turn = nullcontext) -> ModelFiles | None:
    """Finds a GGUF file whose weights should stay packed; returns None if no setting asks for packed weights.

    Raises LoadFailed if the weights cannot stay packed.
    """
    settings, source = resolved.settings, resolved.source
    if settings.weights != "packed":
        return None
    if source.kind not in ("embedded", "gguf"):
        raise no_packed_weights(f"{source.name} is not a GGUF file")
    if not _on_our_kernels(settings):
        raise no_packed_weights(
            "it needs our own kernels on the CPU, which other settings or a GPU exclude (with a GPU, set device_map "
            "to cpu)"
        )
    file = find_embedded(source.location) if source.kind == "embedded" else Path(source.location)
    stamps = read_stamps(file)  # older than the digest that names the folder
    try:
        folder = attempt(str(file), lambda: converted_folder(file, resolved.cache_dir, packed=True, turn=turn), file)
    except NotPacked as error:
        raise no_packed_weights(str(error)) from error
    held = attempt(str(file), lambda: hold_folder(folder))
    return ModelFiles(str(folder), None, packed=file, stamps=stamps, held=held)


def check_unchanged(files: ModelFiles) -> None:
    """Raises LoadFailed if a file of the model has changed since ``files`` were found.

    The load may have read two versions: the tokenizer of one version and the weights of another, or the places of one
    file's blocks and the blocks of another file.
    """
    changed = sorted(files.stamps ^ read_stamps(files.source)) if files.stamps else []
    if changed:
        file = files.source / changed[0][0] if files.source.is_dir() else files.source
        raise LoadFailed(f"cannot load {file}: it has changed while it was loaded")


def no_packed_weights(why: str) -> LoadFailed:
    """Returns the error for a model whose weights cannot stay packed although the settings ask for it."""
    return LoadFailed(f"parameters.extra.weights: packed cannot be used here: {why}")


def _on_our_kernels(settings: EngineSettings) -> bool:
    """Returns whether the settings allow our own kernels and place the model on the CPU.

    Only our own kernels can compute with packed weights here.
    """
    return settings.fits_cpu_kernels and (settings.device_map == "cpu" or not torch.cuda.is_available())


def refuse_adapter(place: str, revision: str | None) -> None:
    """Raises LoadFailed for a folder or a hub id with an adapter, which transformers would ignore without PEFT."""
    if find_adapter_config_file(place, revision=revision) is not None:
        raise LoadFailed(
            "adapter_config.json belongs to an adapter, which this package's engine does not apply: merge it into the "
            "weights and remove the file, or let vLLM apply it (parameters.extra.lora_modules)"
        )


def refuse_other_kinds(config: Any) -> None:
    """Raises LoadFailed for the config of an encoder or of an encoder-decoder model."""
    if getattr(config, "is_encoder_decoder", False):
        raise LoadFailed(f"{_name(config)} is an encoder-decoder model; {SERVED}")
    if getattr(config, "is_decoder", None) is False and not _has_causal_weights(config):
        raise LoadFailed(f"{_name(config)} is an encoder; {SERVED}")


def _has_causal_weights(config: Any) -> bool:
    """Returns whether the config names no class, or names the causal class that would be loaded.

    The field ``is_decoder`` is not enough, because it can be False for decoders, too.
    """
    mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in mapping or not config.architectures:
        return True  # transformers decides
    return mapping[type(config)].__name__ in config.architectures


def _name(config: Any) -> str:
    architecture = next(iter(config.architectures or ()), None)
    return f"model type '{config.model_type}'" + (f" ({architecture})" if architecture else "")
