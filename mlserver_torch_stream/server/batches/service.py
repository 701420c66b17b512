"""The service of files and batches of one server: opens its store, and runs its batches until the shutdown begins.

Knows nothing of requests over HTTP; ``rest/batch_routes`` has them.
"""

from __future__ import annotations

import asyncio

from mlserver.logging import logger

from mlserver_torch_stream.batches.batch_places import BatchPlaces
from mlserver_torch_stream.batches.batch_runner import BatchRunner
from mlserver_torch_stream.batches.object_ids import IdMaker
from mlserver_torch_stream.batches.row_models import RowModels
from mlserver_torch_stream.batches.store_errors import BatchesOff
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle

SETTING = "MLSERVER_TORCH_STREAM_BATCH_STORE"
_UNSET = f"{SETTING} is not set: files and batches need a folder or a bucket, such as s3://bucket/batches"


class BatchService:
    """``why_off``: the reason why there are no files and batches; None if there are."""

    def __init__(self, url: str, models: RowModels, lifecycle: Lifecycle) -> None:
        self.why_off: str | None = None if url else _UNSET
        self._serving: asyncio.Task[None] | None = None
        if not url:
            return
        ids = IdMaker()
        try:
            self._places = BatchPlaces.open(url, ids)
        except BatchesOff as error:
            self.why_off = f"{SETTING}: {error.message}"
            logger.error(f"No files and batches: {self.why_off}")
            return
        self._runner = BatchRunner(self._places, models, ids)
        self._serving = asyncio.create_task(lifecycle.unless_shutdown(self._runner.serve()))
        logger.info(f"Files and batches are kept in {self._places.url}")

    @property
    def places(self) -> BatchPlaces:
        """Raises BatchesOff."""
        self._require()
        return self._places

    @property
    def runner(self) -> BatchRunner:
        """Raises BatchesOff."""
        self._require()
        return self._runner

    def _require(self) -> None:
        if self.why_off is not None:
            raise BatchesOff(self.why_off)
