"""The compiled libraries in the cache folder: each bears the checksum of its content in its name.

Knows nothing of compilers. A library that was cut, by a full disk or a copy that broke off, would end the process with
SIGBUS where it is opened: one whose content is not what its name says is never opened, and is removed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from mlserver_torch_stream.engine.loading.checksum import checksum, flush

logger = logging.getLogger(__name__)


def keep(made: Path, folder: Path, stem: str) -> None:
    """Moves a library, on the same file system, to where ``kept_libraries`` finds it."""
    target = folder / f"{stem}-{checksum(made)}.so"
    try:
        flush(made)
        made.replace(target)
        flush(folder)
    except OSError as error:
        logger.warning("The compiled kernels cannot be kept in %s: %s", folder, error.strerror)


def kept_libraries(folder: Path, stem: str) -> Iterator[Path]:
    """The whole ones whose names begin with ``stem``."""
    for path in sorted(folder.glob(f"{stem}-*.so")):
        try:
            whole = path.stem.rpartition("-")[2] == checksum(path)
        except OSError as error:
            logger.warning("%s is not taken: %s", path, error.strerror)
            continue
        if whole:
            yield path
        else:
            logger.warning("%s is damaged, and not taken", path)
            with suppress(OSError):  # a read-only folder
                path.unlink()
