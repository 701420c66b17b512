"""Logs the stages of a load: that a stage starts, at intervals that it still runs, and at the end how long it took."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mlserver_torch_stream.work_threads import raise_if_cancelled

EVERY_SECONDS = 15.0  # between two lines of one stage; only a large model or a busy machine sees a second one


@contextmanager
def stage(logger: logging.Logger, what: str, every: float = EVERY_SECONDS) -> Iterator[None]:
    """Logs the stage that runs in the ``with`` block. ``what`` describes it, for example ``Compiling the kernels``.

    If the ``with`` block raises an error, the last line, which says how long the stage took, is not logged.

    Raises WorkCancelled if the load is cancelled.

    A separate thread writes the lines, because most of a load is spent in long calls of transformers and compilers.
    """
    raise_if_cancelled()
    began = time.monotonic()
    over = threading.Event()

    def tell() -> None:
        while not over.wait(every):
            logger.info("%s: %.0f s so far", what, time.monotonic() - began)

    logger.info("%s", what)
    teller = threading.Thread(target=tell, name="load-stage", daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()
    logger.info("%s took %.1f s", what, time.monotonic() - began)
