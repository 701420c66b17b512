"""Keeps compiled libraries in the cache folder, each with the checksum of its content in its name.

Knows nothing of compilers. To open a truncated library, as a full disk or a broken copy leaves it, ends the process
with SIGBUS. So a library whose checksum is wrong is removed and never opened.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from mlserver_torch_stream.engine.loading.checksum import checksum, flush

logger = logging.getLogger(__name__)


def keep(made: Path, folder: Path, stem: str) -> None:
    """Moves a library, on the same file system, to the place where ``kept_libraries`` finds it."""
    target = folder / f"{stem}-{checksum(made)}.so"
    try:
        flush(made)
        made.replace(target)
        flush(folder)
    except OSError as error:
        logger.warning("The compiled kernels cannot be kept in %s: %s", folder, error.strerror)


def kept_libraries(folder: Path, stem: str) -> Iterator[Path]:
    """Yields the undamaged libraries whose names begin with ``stem``, and removes damaged ones."""
    for path in sorted(folder.glob(f"{stem}-*.so")):
        try:
            whole = path.stem.rpartition("-")[2] == checksum(path)
        except OSError as error:
            logger.warning("%s is not used: %s", path, error.strerror)
            continue
        if whole:
            yield path
        else:
            logger.warning("%s is damaged and not used", path)
            with suppress(OSError):  # a read-only folder
                path.unlink()
