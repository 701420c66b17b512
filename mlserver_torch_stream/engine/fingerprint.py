"""Makes keys that distinguish loaded weights, and checksums that distinguish files.

Keys identify a file by its name, size and time, because it takes a minute to hash 40 GB.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Hashable
from pathlib import Path

from transformers.utils.hub import cached_file

from mlserver_torch_stream.engine.config_fields import check_hub
from mlserver_torch_stream.engine.loading.embedded import find_embedded
from mlserver_torch_stream.settings import ResolvedSettings

_SHAPING = {
    *("revision", "dtype", "device_map", "max_memory", "offload_folder", "pipeline", "attn_implementation"),
    *("quantization_config", "tensor_parallel_size", "trust_remote_code", "allow_pickle", "fast_path", "weights"),
}
# Of configs, tokenizers, templates, code and weights.
_READ_SUFFIXES = {
    *(".json", ".jinja", ".model", ".tiktoken", ".txt", ".py"),
    *(".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".pkl"),
}

Stamp = tuple[str, int, int]  # a file's name, size and time


def weights_key(resolved: ResolvedSettings, threads: int) -> Hashable:
    """Returns a key for settings. Settings with the same key can share one copy of the weights in memory.

    Unless the engine is serial, the key includes the number of threads, because our own kernels are prepared for that
    number. The key does not include ``max_num_seqs``, because each engine has its own cache.
    """
    settings, source = resolved.settings, resolved.source
    serial = settings.engine == "serial"
    return (
        source.kind,
        source.location,
        file_stamps(resolved),
        shaping_settings(resolved),
        serial,
        None if serial or settings.fast_path == "off" else threads,
    )


def engine_key(resolved: ResolvedSettings, owner: str, weights: Hashable) -> Hashable:
    """Returns a key that stays equal as long as ``owner`` needs no new engine."""
    tokenizer = resolved.settings.tokenizer
    return owner, weights, resolved.settings.model_dump_json(), _folder(tokenizer) if tokenizer else None


def shaping_settings(resolved: ResolvedSettings) -> str:
    """Returns, as JSON, the settings that determine how weights are stored in memory and how the forward runs."""
    return resolved.settings.model_dump_json(include=_SHAPING)


def length_setting(resolved: ResolvedSettings, location: str) -> int | None:
    """Returns ``max_model_len`` if the model at ``location`` may compute positions differently for it, else None.

    ``location`` is a folder or a hub id, or empty for a GGUF file that is not converted. Raises LoadFailed if the hub
    cannot be reached.
    """
    setting = resolved.settings.max_model_len
    if setting is None or not location:
        return None
    try:
        config = Path(weights_folder(resolved, location), "config.json").read_text(encoding="utf-8")
    except (OSError, ValueError):  # the load reports the error
        return None
    return setting if "long_factor" in config else None


def file_stamps(resolved: ResolvedSettings, folder: Path | None = None) -> Hashable:
    """Returns the name, size and time of each file of a model, or of each file in another ``folder``."""
    if folder is not None:
        return _folder(str(folder))
    source = resolved.source
    if source.kind == "folder":
        return _folder(source.location)
    if source.kind == "hub":
        return _snapshot(source.location, resolved.settings.revision)
    return _stamp(find_embedded(source.location) if source.kind == "embedded" else Path(source.location))


def weights_folder(resolved: ResolvedSettings, location: str) -> Path:
    """Returns the folder of a model's files: ``location`` itself, or, for a hub id, a folder in the hub's cache.

    Raises LoadFailed if the hub cannot be reached.
    """
    if resolved.source.kind != "hub":
        return Path(location)
    return Path(_snapshot(resolved.source.location, resolved.settings.revision) or location)


def _folder(location: str) -> Hashable:
    if not os.path.isdir(location):
        return None
    return tuple(sorted(_stamp(path) for path in Path(location).iterdir() if path.is_file()))


def read_stamps(place: Path) -> frozenset[Stamp]:
    """Returns the name, size and time of a GGUF file, or of each file in a folder that a load may read.

    Other files of the folder, such as a log, may change during a load.
    """
    paths = place.iterdir() if place.is_dir() else [place]
    return frozenset(_stamp(path) for path in paths if path.suffix in _READ_SUFFIXES)


def _stamp(path: Path) -> Stamp:
    try:
        status = path.stat()
    except OSError:  # the load reports the error
        return path.name, -1, -1
    return path.name, status.st_size, status.st_mtime_ns


def _snapshot(hub_id: str, revision: str | None) -> str | None:
    """Returns the folder of the snapshot that a load would use now; it is named after the commit.

    Raises LoadFailed if the hub cannot be reached.
    """
    check_hub(hub_id, revision)
    try:
        file = cached_file(hub_id, "config.json", revision=revision or "main")
    except OSError:  # the load reports the error
        return None
    return os.path.dirname(file) if file else None


_SAMPLES = 256
_SAMPLE_BYTES = 4096


def checksum(path: Path) -> str:
    """Returns a checksum of the file's size and of evenly spaced samples. Raises OSError if it cannot be read.

    For a file of up to 1 MiB the samples cover all bytes. It would take a minute to read every byte of 40 GB. Samples
    detect truncated files, files that end in zeros after a power cut, and fine-tuned weights, which differ everywhere.
    Samples can miss a single wrong byte of a large file.
    """
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=8)
    with path.open("rb") as file:
        for index in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def flush(path: Path) -> None:
    """Flushes a file, or a folder's list of names, to the disk. Call this before a rename makes the new files valid."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
