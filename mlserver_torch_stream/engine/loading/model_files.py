"""Says where a model's files are, and turns a failed load into one line that says what the user can do."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlserver_torch_stream.engine.failures import NotPacked
from mlserver_torch_stream.engine.fingerprint import Stamp
from mlserver_torch_stream.engine.loading.file_damage import StoredTensor, find_damage
from mlserver_torch_stream.errors import LoadFailed

SERVED = "this server runs causal language models, such as Llama, Qwen or GPT-2"


_OTHER_KIND = re.compile(r"Unrecognized configuration class <class '.*\.(\w+)Config'>")
ALLOW_PICKLE = "convert the weights to safetensors, or set parameters.extra.allow_pickle to true"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The location of a model's files: a folder or hub id, or a GGUF file that is not converted.

    ``packed`` is a GGUF file whose blocks stay quantised; then the folder has everything but the blocks. ``tensors``
    are the tensors of a folder's safetensors files. ``stamps`` are the ``read_stamps`` of ``source`` from before any of
    its files was read; empty for a hub id, and for a file that has been converted to dense weights. ``held`` is the
    ``hold_folder`` of a conversion: transformers maps the weights there for as long as they are in use.
    """

    location: str
    gguf_file: Path | None
    packed: Path | None = None
    stamps: frozenset[Stamp] = frozenset()
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    held: object = field(default=None, compare=False)

    @property
    def source(self) -> Path:
        """The folder or GGUF file that the settings name, unless a GGUF file is converted to a folder."""
        return self.packed or self.place

    @property
    def place(self) -> Path:
        """The file or folder on this machine; for a hub id, a path that does not exist."""
        return self.gguf_file or Path(self.location)


def attempt(what: str, load: Callable[[], Any], place: Path | None = None) -> Any:
    """Runs ``load``, which loads ``what``. Turns a failure into one line that says what the user can do.

    ``place`` is the file or folder that ``load`` reads; if it is damaged, the error line says so.
    """
    try:
        return load()
    except NotPacked:
        raise
    except LoadFailed as error:
        raise LoadFailed(f"cannot load {what}: {error}") from None
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        damage = None if place is None else find_damage(place)
        raise LoadFailed(f"cannot load {what}: {damage or _reason(error)}") from error


def is_panic(error: BaseException) -> bool:
    """Returns whether a Rust library panicked; the tokenizers library can panic on a damaged file.

    A panic is not an Exception.
    """
    return type(error).__module__ == "pyo3_runtime"


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, RecursionError):
        return "one of its files is nested too deeply"
    if "trust_remote_code" in text:
        return "it brings its own code; if you trust it, set parameters.extra.trust_remote_code to true"
    if (other := _OTHER_KIND.match(text)) is not None:
        return f"{other[1]} is not a causal language model; {SERVED}"
    if "cannot be loaded with `safetensors`" in text:
        return f"the hub has no safetensors for it; {ALLOW_PICKLE}"
    sentence = re.split(r"(?<=\.)\s+(?=[A-Z])", text, maxsplit=1)[0]
    return f"{sentence[:300]} ({type(error).__name__})" if sentence else type(error).__name__
