"""GGUF files: dequantised once into an ordinary model folder, which is kept for the next start.

Knows nothing of settings or of where the file came from. A half-written folder is never seen: it is written under
another name and renamed; of two processes that convert the same file one waits for the other.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock, Timeout
from gguf import GGUFReader
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

logger = logging.getLogger(__name__)

FORMAT = 1  # of our folders; a new one orphans the old
LOCK_SECONDS = 900.0
UNUSED_SECONDS = 30 * 24 * 3600.0  # until a conversion is given up: a new version of transformers makes its own
_SAMPLES = 256
_SAMPLE_BYTES = 4096
_FLOAT_FILES = {0: torch.float32, 1: torch.float16, 32: torch.bfloat16}  # general.file_type, unquantised
_SPECIAL_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def converted_folder(gguf_file: Path, cache_dir: Path, dtype: str = "auto") -> Path | None:
    """The folder with the converted file, converting it first where it is not there yet.

    None, after one warning, where the cache cannot be written: then load the file itself (``load_gguf``).
    """
    target = cache_dir / f"{gguf_file.stem}-{_fingerprint(gguf_file, dtype)}"
    if target.is_dir():
        with suppress(OSError):  # a read-only image
            os.utime(target)
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock", timeout=LOCK_SECONDS):
            if not target.is_dir():
                logger.info("Converting %s once; the result is kept in %s", gguf_file.name, target)
                _convert(gguf_file, target, dtype)
                _forget_unused(cache_dir)
        return target
    except (OSError, Timeout) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        logger.warning(
            "Cannot keep the converted %s in %s (%s): converting in memory", gguf_file.name, cache_dir, reason
        )
        return None


def load_gguf(gguf_file: Path, dtype: str = "auto", packed: bool = False, **options: Any) -> Any:
    """The model in a GGUF file, with dense weights unless ``packed``; ``options`` go to ``from_pretrained``."""
    return AutoModelForCausalLM.from_pretrained(
        str(gguf_file.parent),
        gguf_file=gguf_file.name,
        quantization_config=GgufConfig(dequantize=not packed),
        dtype=_dense_dtype(gguf_file) if dtype == "auto" else getattr(torch, dtype),
        **options,
    )


def load_gguf_tokenizer(gguf_file: Path) -> Any:
    """The tokenizer in a GGUF file, with the special tokens that the file names.

    transformers 5.17 takes ``<|im_start|>`` for SmolLM2's end of text; the file's own ids are right.
    """
    tokenizer = AutoTokenizer.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name)
    fields = GGUFReader(gguf_file).fields
    for role, key in _SPECIAL_TOKENS.items():
        if key in fields:
            setattr(tokenizer, role, tokenizer.convert_ids_to_tokens(int(fields[key].contents())))
    return tokenizer


def _dense_dtype(gguf_file: Path) -> torch.dtype:
    field = GGUFReader(gguf_file).fields.get("general.file_type")
    return _FLOAT_FILES.get(int(field.contents()), torch.bfloat16) if field else torch.bfloat16


def _fingerprint(gguf_file: Path, dtype: str) -> str:
    """Of the content, not of path and time: a new virtual environment finds what the old one converted.

    Evenly spaced samples instead of every byte: fine-tunes differ everywhere, and 40 GB take a minute to hash.
    """
    size = gguf_file.stat().st_size
    digest = hashlib.blake2b(f"{FORMAT} {transformers.__version__} {dtype} {size}".encode(), digest_size=8)
    with gguf_file.open("rb") as file:
        for index in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _convert(gguf_file: Path, target: Path, dtype: str) -> None:
    with _scratch_folder(target) as folder:
        load_gguf_tokenizer(gguf_file).save_pretrained(folder)
        model = load_gguf(gguf_file, dtype)
        _forget_quantization(model)
        model.save_pretrained(folder)
        os.chmod(folder, 0o755)  # an image built as root is run as someone else
        os.rename(folder, target)


def _forget_unused(cache_dir: Path) -> None:
    """Removes conversions that nobody has asked for in a long time; a lock beside a folder says that it is ours."""
    for lock in cache_dir.glob("*.lock"):
        folder = lock.with_suffix("")
        if folder.is_dir() and folder.stat().st_mtime < time.time() - UNUSED_SECONDS:
            logger.info("Removing %s: not used for 30 days", folder)
            shutil.rmtree(folder, ignore_errors=True)


def _forget_quantization(model: Any) -> None:
    """The weights are dense now; what is saved must load as any other model."""
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


@contextmanager
def _scratch_folder(target: Path) -> Iterator[str]:
    """A folder beside ``target``, gone at the end; those that a killed process left behind go too."""
    for orphan in target.parent.glob(f"{target.name}.partial-*"):
        shutil.rmtree(orphan, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=f"{target.name}.partial-", dir=target.parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
