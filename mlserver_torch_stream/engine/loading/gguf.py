"""Loads GGUF files. Each file is converted once to an ordinary model folder, which later starts use.

No process sees a half-written folder, because each folder is written under another name and then renamed. If two
processes convert the same file, one waits for the other.
"""

from __future__ import annotations

import errno
import functools
import glob
import hashlib
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock, Timeout
from torch import Tensor
from transformers import GgufConfig
from transformers.integrations.gguf import read_gguf_metadata

from mlserver_torch_stream.engine.child_process import in_process
from mlserver_torch_stream.engine.failures import NotPacked
from mlserver_torch_stream.engine.fingerprint import checksum, flush
from mlserver_torch_stream.engine.kept_files import foreign, os_errors, remove_abandoned, replaceable, to_remove
from mlserver_torch_stream.engine.loading.gguf_packed import write_packed
from mlserver_torch_stream.engine.mapped_file import map_file
from mlserver_torch_stream.engine.stage_log import stage
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.work_threads import raise_if_cancelled

logger = logging.getLogger(__name__)

FORMAT = 5  # version of the converted folders; folders of older versions are no longer used
LOCK_SECONDS = 900.0
_LOOK_SECONDS = 1.0  # between two looks of a load that waits for a lock, which may be cancelled
_HEADER_BYTES = 2**24  # a vocabulary of 262,000 tokens and its keys take 11 MB
UNUSED_SECONDS = 30 * 24 * 3600.0  # conversions unused for so long are deleted: each transformers version has its own
_READER_LOCK = threading.Lock()  # the name in ``gguf`` is patched for the whole process
_SEAL = "checksums.json"  # holds the checksums of the other files of a folder
_FLOAT_FILES = {0: torch.float32, 1: torch.float16, 32: torch.bfloat16}  # general.file_type, unquantised

Turn = Callable[[], AbstractContextManager[object]]  # a load's turn to convert: a process does one at a time


def hold_folder(folder: Path) -> Tensor:
    """Holds a conversion for as long as the result lives, so that no other server removes the folder as unused.

    Raises OSError if the folder is gone.
    """
    return map_file(folder / _SEAL, locks=True)


def converted_folder(
    gguf_file: Path, cache_dir: Path, dtype: str = "auto", packed: bool = False, turn: Turn = nullcontext
) -> Path | None:
    """Returns the folder with the converted file; first converts the file if the folder is absent.

    A folder that is damaged, or that other users may have written, counts as absent.

    With ``packed`` the weights stay quantised blocks, as ``gguf_packed`` writes them, in another process. The
    conversion runs in a ``turn``.

    If the cache cannot be written, or other users could replace the folder, raises NotPacked with ``packed``; otherwise
    logs one warning and returns None, and the caller loads the file with ``load_gguf``. Also raises NotPacked if our
    kernels do not support the weights, and LoadFailed if the file cannot be converted, or has changed meanwhile.
    """
    target = _target(gguf_file, cache_dir, dtype, packed)
    if _is_whole(target):
        with suppress(OSError):  # a read-only image
            os.utime(target)
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _alone(target, turn):
            if not _is_whole(target):
                if target.exists():
                    _remove(target)
                logger.info("Converting %s once; the result is kept in %s", gguf_file.name, target)
                if packed:
                    in_process(_convert, gguf_file, target, dtype, packed)
                else:
                    _convert(gguf_file, target, dtype, packed)
                _forget_unused(cache_dir)
        return target
    except (OSError, Timeout) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        if isinstance(error, PermissionError):
            place = f"{error.filename}: " if error.filename else ""
            reason = f"{place}{reason}; set cache_dir to a folder that only this user can write"
        if packed:
            raise NotPacked(f"the converted file cannot be kept in {cache_dir}: {reason}") from error
        what = "Cannot keep the converted %s in %s (%s): converting in memory"
        logger.warning(what, gguf_file.name, cache_dir, reason)
        return None


def load_gguf(gguf_file: Path, dtype: str = "auto", packed: bool = False, **options: Any) -> Any:
    """Loads the model in a GGUF file, with dense weights unless ``packed``. ``options`` go to ``from_pretrained``.

    Raises LoadFailed if the file lacks a tensor or a key, or has a tensor or a key that the model does not use.
    """
    from mlserver_torch_stream.engine.loading.gguf_model import loads_by_transformers, read_gguf_model

    options |= {"dtype": _dense_dtype(gguf_file) if dtype == "auto" else getattr(torch, dtype)}
    if loads_by_transformers(gguf_file):
        _check_layers(gguf_file)
        options |= {"gguf_file": gguf_file.name, "quantization_config": GgufConfig(dequantize=not packed)}
        model_class, place = transformers.AutoModelForCausalLM, str(gguf_file.parent)
    elif packed:
        raise LoadFailed(
            "quantization_config: gguf weights cannot be kept packed here, because transformers' kernels do not "
            "support this file's architecture; without quantization_config they are dequantised"
        )
    else:
        read = read_gguf_model(gguf_file)
        weights = {name: weight.dense().to(options["dtype"]) for name, weight in read.weights.items()}
        options |= {"config": read.config, "state_dict": weights}
        model_class, place = read.model_class, None
    model, info = model_class.from_pretrained(place, output_loading_info=True, **options)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, info[kind])):
            raise LoadFailed(f"the file's tensors do not fit the model ({kind.replace('_', ' ')}): {names[0]}")
    return model


def _check_layers(gguf_file: Path) -> None:
    """Refuses a file that names more layers than it has tensors: the model is built before weights are read."""
    metadata, tensors = read_gguf_metadata(str(gguf_file))
    for key, count in metadata.items():
        if key.endswith(".block_count") and isinstance(count, int) and count > len(tensors):
            raise LoadFailed(f"{key} is {count:,}, but the file holds only {len(tensors):,} tensors")


def _dense_dtype(gguf_file: Path) -> torch.dtype:
    metadata, _ = read_gguf_metadata(str(gguf_file))
    return _FLOAT_FILES.get(metadata.get("general.file_type"), torch.bfloat16)


def _target(gguf_file: Path, cache_dir: Path, dtype: str, packed: bool) -> Path:
    return cache_dir / f"{gguf_file.stem}-{_fingerprint(gguf_file, f'{dtype} packed in place' if packed else dtype)}"


def _fingerprint(gguf_file: Path, dtype: str) -> str:
    """Returns a digest of a file's content: of all bytes of its header, and of samples of its weights.

    The header is not sampled, because tools such as gguf-set-metadata change single keys in place. Because path and
    time do not count, a new virtual environment can use old conversions.
    """
    described = f"{FORMAT} {transformers.__version__} {dtype} {checksum(gguf_file)}"
    digest = hashlib.blake2b(described.encode(), digest_size=8)
    with gguf_file.open("rb") as file:
        digest.update(file.read(_HEADER_BYTES))
    return digest.hexdigest()


@contextmanager
def _headers_parsed_once() -> Iterator[None]:
    """Makes gguf parse each file only once; transformers would parse it for the tokenizer, the config and the weights.

    Measured on 2026-11-22 with the embedded model, whose header lists 49,000 tokens: each of five parses took 3.3 s.
    """
    import gguf

    from mlserver_torch_stream.engine.loading.gguf_file import BoundedReader

    with _READER_LOCK:
        reader = gguf.GGUFReader
        parsed = functools.cache(BoundedReader)
        gguf.GGUFReader = lambda path, *mode: parsed(os.path.realpath(path), *mode)  # links are the same file
        try:
            yield
        finally:
            gguf.GGUFReader = reader


def _convert(gguf_file: Path, target: Path, dtype: str, packed: bool) -> None:
    # Imported here, because later loads do not need them: they take 5 MB and 0.2 s.
    from mlserver_torch_stream.engine.loading.gguf_model import read_gguf_config
    from mlserver_torch_stream.engine.loading.gguf_tokenizer import load_gguf_tokenizer

    name = gguf_file.name
    with _scratch_folder(target) as folder:
        if (who := replaceable(Path(folder))) is not None:  # no load would use the conversion
            raise PermissionError(errno.EPERM, who)
        with _headers_parsed_once():
            read_gguf_config(gguf_file)  # an unsupported file is refused before minutes of reading
            with stage(logger, f"Reading the tokenizer of {name}"):
                tokenizer = load_gguf_tokenizer(gguf_file)
            with stage(logger, f"Reading the weights of {name}"):
                if packed:
                    write_packed(gguf_file, Path(folder))
                else:
                    model = load_gguf(gguf_file, dtype)
        with stage(logger, f"Writing the converted {name}"), os_errors():
            # Several templates go into the config: transformers would write a folder of them, which has no checksum.
            tokenizer.save_pretrained(folder, save_jinja_files=not isinstance(tokenizer.chat_template, dict))
            if not packed:
                _forget_quantization(model)
                model.save_pretrained(folder)
            _seal(Path(folder))
        if _target(gguf_file, target.parent, dtype, packed) != target:
            raise LoadFailed("it has changed while it was converted")
        for path in Path(folder).iterdir():  # an image that root builds can run as another user
            path.chmod(0o644)
        os.chmod(folder, 0o755)
        os.rename(folder, target)
        flush(target.parent)


def _seal(folder: Path) -> None:
    """Writes the files' checksums and flushes all files to the disk, because a power cut can leave files empty."""
    sums = {path.name: checksum(path) for path in sorted(folder.iterdir())}
    (folder / _SEAL).write_text(json.dumps(sums), encoding="utf-8")
    for path in folder.iterdir():
        flush(path)
    flush(folder)


def _is_whole(folder: Path) -> bool:
    """Returns whether a conversion is undamaged, and only this user or root can have written it."""
    try:
        if _foreign(folder) is not None:
            return False
        sums = json.loads((folder / _SEAL).read_text(encoding="utf-8"))
        return bool(sums) and all(checksum(folder / name) == known for name, known in sums.items())
    except (OSError, ValueError, AttributeError):  # the last if the seal is no object
        return False


def _foreign(folder: Path) -> str | None:
    """Returns why other users may have written a file of the folder; None if only this user or root can have."""
    return next(filter(None, map(foreign, folder.iterdir())), None)


def _remove(folder: Path) -> None:
    """Removes a conversion that is not used. Raises PermissionError if a server holds it, or it cannot be removed."""
    why = None
    try:
        if (why := _foreign(folder)) is None:
            logger.warning("%s is damaged and will be removed", folder)
            shutil.rmtree(folder)
            return
        logger.warning("%s is not used: %s", folder, why)
        # No server holds a folder without a seal.
        with to_remove(folder / _SEAL) if (folder / _SEAL).exists() else nullcontext():
            shutil.rmtree(folder)
    except OSError as error:
        unused = f"{folder} is not used, because {why or 'it is damaged or cannot be read'}, and cannot be removed"
        problem = "a server uses it" if isinstance(error, BlockingIOError) else error.strerror
        raise PermissionError(errno.EPERM, f"{unused}: {problem}") from error


@contextmanager
def _alone(target: Path, turn: Turn) -> Iterator[None]:
    """Holds the lock of a conversion in a ``turn``. While another process has the lock, waits for it without a turn.

    Raises WorkCancelled if the load is cancelled meanwhile, and Timeout after ``LOCK_SECONDS``.
    """
    lock = FileLock(f"{target}.lock")
    while True:
        with turn():
            if _takes(lock, 0):
                try:
                    yield
                finally:
                    lock.release()
                return
        with stage(logger, f"Waiting until another process has converted into {target}"):
            end = time.monotonic() + LOCK_SECONDS
            while not _takes(lock, _LOOK_SECONDS):
                raise_if_cancelled()
                if time.monotonic() > end:
                    raise Timeout(lock.lock_file)
            lock.release()


def _takes(lock: FileLock, seconds: float) -> bool:
    try:
        lock.acquire(timeout=seconds)
    except Timeout:
        return False
    return True


def _forget_unused(cache_dir: Path) -> None:
    """Removes converted models that no load has used for 30 days and no server uses.

    A conversion is a folder with a lock file beside it and a seal inside.
    """
    for lock in cache_dir.glob("*.lock"):
        folder = lock.with_suffix("")
        with suppress(OSError):  # it is no conversion, a server holds it, or another process has just removed it
            if folder.stat().st_mtime < time.time() - UNUSED_SECONDS:
                with to_remove(folder / _SEAL):
                    logger.info("Removing %s: not used for 30 days", folder)
                    folder.rename(f"{folder}.partial-unused")
    remove_abandoned(cache_dir)


def _forget_quantization(model: Any) -> None:
    """Removes the quantisation from the config, because the weights are now dense."""
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


@contextmanager
def _scratch_folder(target: Path) -> Iterator[str]:
    """Makes a folder beside ``target``, and removes it at the end.

    First removes the folders that killed processes have left.
    """
    for orphan in target.parent.glob(f"{glob.escape(target.name)}.partial-*"):
        shutil.rmtree(orphan, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=f"{target.name}.partial-", dir=target.parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
