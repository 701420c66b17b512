"""Opens the kernels for this CPU: a library from the wheel, or else a library that is compiled here.

A wheel for one kind of machine has a library for each variant; an installation from source has none.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mlserver_torch_stream.did_you_mean import did_you_mean_or_known
from mlserver_torch_stream.engine.native.compile_kernels import NoKernels, compiled_library
from mlserver_torch_stream.engine.native.kernel_variants import VARIANTS, KernelVariant, runnable
from mlserver_torch_stream.errors import LoadFailed

logger = logging.getLogger(__name__)

VARIABLE = "MLSERVER_TORCH_STREAM_KERNEL"
PREBUILT = Path(__file__).parent / "prebuilt"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """The threads on which a model's kernels compute, and the folder in which compiled kernels are kept."""

    threads: int
    cache_dir: Path


def open_kernels(
    cache_dir: Path,
    open_library: Callable[[Path], T],
    environ: Mapping[str, str] = os.environ,
    prebuilt: Path = PREBUILT,
) -> tuple[T, str]:
    """Returns the result of ``open_library`` for the best kernels, and a name for them.

    The environment variable MLSERVER_TORCH_STREAM_KERNEL can name a variant. Raises LoadFailed if this CPU cannot run
    that variant. Raises NoKernels if there is neither a library for this CPU nor a compiler.
    """
    forced = _forced(environ)
    for variant in runnable() if forced is None else (forced,):
        library = prebuilt / variant.file_name
        if library.is_file():
            try:
                return open_library(library), f"{variant.name}, prebuilt"
            except NoKernels as error:  # built for another C library
                logger.warning("%s cannot be used here: %s", library, error)
    if forced is None:
        return compiled_library(cache_dir, open_library), "compiled for this CPU"
    return compiled_library(cache_dir, open_library, forced.options), f"{forced.name}, compiled here"


def _forced(environ: Mapping[str, str]) -> KernelVariant | None:
    name = environ.get(VARIABLE, "")
    if not name:
        return None
    here = {variant.name: variant for variant in runnable()}
    if name in here:
        return here[name]
    known = [variant.name for variant in VARIANTS]
    if name not in known:
        raise LoadFailed(f"{VARIABLE}: {name!r} is not a variant of the kernels{did_you_mean_or_known(name, known)}")
    raise LoadFailed(f"{VARIABLE}: this CPU does not run the variant {name!r}; it runs {', '.join(here) or 'none'}")
