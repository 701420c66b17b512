"""Keeps the panels of a model's packed weights in a file, which later loads map instead of packing the weights again.

Servers that map the same file share its memory. Panels do not depend on the chip. Each load reads all bytes of the
file, so a damaged file is found.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from mlserver_torch_stream.engine.kept_files import foreign, keep, kept_files, remove_abandoned, replaceable, to_remove
from mlserver_torch_stream.engine.machine import PANELS_SUFFIX
from mlserver_torch_stream.engine.mapped_file import map_file

logger = logging.getLogger(__name__)

_UNUSED_S = 30 * 24 * 3600.0  # as long as a converted GGUF file is kept
_NATIVE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class PanelsFile:
    """The file in ``folder`` with the panels of a model's weights.

    ``model`` and ``weights`` are digests without ``-``: of the model's content, and of its files with their times.
    ``folder`` has one file for each model at most, and none that no load has used for 30 days, apart from the files
    that a server maps: on a network file system, a read of a file that is gone would kill that server by SIGBUS.
    """

    folder: Path
    model: str
    weights: str

    def read(self, size: int, kernels: ctypes.CDLL, threads: int) -> Tensor | None:
        """Maps the panels, ``size`` bytes, read-only; returns None if there is no file that can be trusted."""
        remove_abandoned(self.folder)  # no later load may have to write the file
        mapped: dict[Path, Tensor] = {}

        def digest(path: Path) -> str:
            mapped[path] = map_file(path, locks=True)
            return _digest(mapped[path], kernels, threads)

        for path in kept_files(self.folder, f"{self._stem}-*{PANELS_SUFFIX}", digest):
            panels, stem = mapped[path][:size], mapped[path][size:]
            if bytes(stem.tolist()) == self._stem.encode():  # else it has been renamed
                self._forget_others(path, f"{self.model}-{self.weights}-")  # a server of other code had mapped them
                return panels
        return None

    def keep(self, panels: Tensor, kernels: ctypes.CDLL, threads: int) -> Tensor | None:
        """Writes the panels and maps them.

        If the folder cannot be written, or other users can write to it, logs one line and returns None.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_abandoned(self.folder)
            with tempfile.TemporaryDirectory(dir=self.folder, prefix=".writing-") as place:
                made = Path(place, f"made{PANELS_SUFFIX}")
                made.touch(0o600)
                if (why := foreign(made) or replaceable(self.folder)) is not None:  # no load would map it
                    logger.info("The packed weights are not kept in %s: %s", self.folder, why)
                    return None
                with made.open("wb") as file:
                    file.write(panels.numpy().data)
                    file.write(self._stem.encode())
                # Before the look for another server's file, because that server could map its file in these seconds.
                digest = _digest(map_file(made), kernels, threads)
                other = self.read(len(panels), kernels, threads)
                if other is not None and torch.equal(other, panels):  # of a server that packed at the same time
                    return other
                del other  # with its lock
                # The digest of each load covers all bytes, so the load need not wait until the disk has them.
                kept = keep(made, self.folder, self._stem, lambda path: digest, False)
            if kept is None:
                return None
            self._forget_others(kept)
            return map_file(kept, locks=True)[: len(panels)]
        except OSError as error:
            logger.info("The packed weights are not kept: %s cannot be written: %s", self.folder, error.strerror)
            return None

    @property
    def _stem(self) -> str:
        return f"{self.model}-{self.weights}-{_layout()}"

    def _forget_others(self, kept: Path, prefix: str = "") -> None:
        for path in {*self.folder.glob(f"{prefix}*{PANELS_SUFFIX}")} - {kept}:
            with suppress(OSError):  # a server maps it, another user owns it, or it has just been removed
                status = path.stat()
                # No load writes a time of use: in an image's layer that would copy the whole file.
                unused = max(status.st_atime, status.st_mtime) < time.time() - _UNUSED_S
                if unused or path.name.startswith(f"{self.model}-"):
                    with to_remove(path):
                        path.unlink()


@cache
def _layout() -> str:
    """Returns a digest of the code that packs weights."""
    digest = hashlib.blake2b(digest_size=8)
    for source in sorted((*_NATIVE.glob("*.py"), *(_NATIVE / "kernels").iterdir())):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


def _digest(panels: Tensor, kernels: ctypes.CDLL, threads: int) -> str:
    digest = ctypes.c_uint64()
    kernels.native_digest(panels.data_ptr(), len(panels), threads, ctypes.byref(digest))
    return f"{digest.value:016x}"
