"""Loads the tokenizer of a model, and refuses files that would make the tokenizers library end the process.

It works without torch. If torch is installed, transformers imports torch together with its tokenizers.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from mlserver_torch_stream.engine.config_fields import plain_config
from mlserver_torch_stream.engine.loading.model_files import ModelFiles, attempt
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import ResolvedSettings

_TOKENIZER_FILES = ("*token*", "vocab*", "*.model", "tekken*")
_ESCAPED_ASCII = re.compile(rb"\\u00[2-7]")  # an escape with which a JSON key can spell ASCII letters


def load_tokenizer(files: ModelFiles, resolved: ResolvedSettings) -> Any:
    """Loads and checks the tokenizer that the settings name, or else the tokenizer in the model's files.

    Raises LoadFailed if there is no tokenizer or it cannot be used.
    """
    settings = resolved.settings

    def load() -> Any:
        if files.gguf_file is not None and settings.tokenizer is None:
            from mlserver_torch_stream.engine.loading.gguf_tokenizer import load_gguf_tokenizer

            return load_gguf_tokenizer(files.gguf_file)
        _check_charsmap(place / "tokenizer.json")
        own = settings.tokenizer is None
        converted = own and resolved.source.kind in ("gguf", "embedded")
        loader = loader_of(place) if converted else transformers.AutoTokenizer
        known = _plain_config(place) if own and loader is not PreTrainedTokenizerFast else {}
        try:
            return loader.from_pretrained(
                settings.tokenizer or files.location,
                **known,
                revision=(settings.revision if settings.tokenizer is None else None) or "main",
                trust_remote_code=settings.trust_remote_code,
            )
        except Exception as error:
            if place.is_dir() and not any(any(place.glob(name)) for name in _TOKENIZER_FILES):
                raise LoadFailed(f"no tokenizer in {place}; name one in parameters.extra.tokenizer") from error
            raise

    place = files.place if settings.tokenizer is None else Path(settings.tokenizer)
    tokenizer = attempt(settings.tokenizer or f"the tokenizer of {resolved.source.name}", load, place)
    if settings.chat_template is not None:
        tokenizer.chat_template = settings.chat_template
    return tokenizer


def loader_of(converted: Path) -> Any:
    """Returns the class that loads the tokenizer of a converted GGUF file.

    For some families AutoTokenizer uses the family's class, whatever class the folder names.
    """
    try:
        named = json.loads((converted / "tokenizer_config.json").read_bytes())["tokenizer_class"]
    except (OSError, ValueError, KeyError, TypeError):  # the load reports the error
        return transformers.AutoTokenizer
    return PreTrainedTokenizerFast if named == PreTrainedTokenizerFast.__name__ else transformers.AutoTokenizer


def _plain_config(folder: Path) -> dict[str, PreTrainedConfig]:
    """Returns the argument ``config`` for a folder that names the tokenizer's class; nothing for other folders.

    Without this argument, transformers reads the family's config class, which imports the family's modeling code.
    """
    try:
        names, fields = (json.loads((folder / name).read_bytes()) for name in ("tokenizer_config.json", "config.json"))
        if "auto_map" in {**names, **fields} or not names["tokenizer_class"] or not fields["model_type"]:
            return {}
        return {"config": plain_config({**fields, "_name_or_path": str(folder)})}
    except (OSError, ValueError, KeyError, TypeError):  # a hub id, or damaged files, which are reported later
        return {}


def _check_charsmap(file: Path) -> None:
    """Refuses a tokenizer.json whose charsmap declares more bytes than it has. Raises LoadFailed.

    The tokenizers library would allocate the declared bytes, and a failed allocation ends the process.
    """
    text = file.read_bytes() if file.is_file() else b""
    if b"precompiled_charsmap" not in text and _ESCAPED_ASCII.search(text) is None:
        return
    try:
        level: list[Any] = [json.loads(text)]
    except (ValueError, RecursionError):
        return  # the tokenizer's reader reports the error
    while level:
        level = [inner for value in level for inner in (value.values() if isinstance(value, dict) else value)]
        level = [value for value in level if isinstance(value, dict | list)]
        for charsmap in (value.get("precompiled_charsmap") for value in level if isinstance(value, dict)):
            if isinstance(charsmap, str) and not _holds_its_trie(charsmap):
                raise LoadFailed(f"{file}: precompiled_charsmap is cut off or damaged")


def _holds_its_trie(charsmap: str) -> bool:
    try:
        data = base64.b64decode(charsmap, validate=True)
        (trie,) = struct.unpack("<I", data[:4])
    except (ValueError, struct.error):
        return False
    return bool(trie <= len(data) - 4)
