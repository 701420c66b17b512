"""Infers rows with a TorchServe handler in worker processes of this command, each batch in one call of the handler.

Knows the workers' pool and its requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mlserver_torch_stream.cli.interruptible import in_a_thread
from mlserver_torch_stream.cli.object_row import AnswerTooLarge, ObjectRequest, PieceCollector, answer_too_large
from mlserver_torch_stream.cloud.rows import Outcome, Row, RunRefused, StoreUnavailable, refusal
from mlserver_torch_stream.cloud.run_metrics import RunMetrics
from mlserver_torch_stream.errors import LoadFailed, NotServing, QueueFull, RequestError, SettingsError

if TYPE_CHECKING:
    from mlserver_torch_stream.handlers.pool.handler_request import HandlerRequest, PieceStream
    from mlserver_torch_stream.handlers.runtime.build import BuiltPool

# A batch of the run is a batch of the handler, whose own queue adds no wait, and no bound: the run's window has one.
_BATCHED_BY_THE_RUN = {"maxBatchDelay": 0, "jobQueueSize": 1_000_000, "useJobTicket": False}


@dataclass
class HandlerInfer:
    """The callable that infers a batch. Raises StoreUnavailable where no worker can be started any more."""

    built: BuiltPool
    request: ObjectRequest

    @classmethod
    async def load(
        cls,
        handler: str,
        extra: Mapping[str, Any],
        batch_rows: int | None,
        request: ObjectRequest,
        metrics: RunMetrics,
    ) -> HandlerInfer:
        """``extra``: keys of ``parameters.extra``; ``batch_rows``: None for the archive's ``batchSize``. Raises
        RunRefused, or LeftBehind if it is cancelled."""
        from mlserver import ModelSettings
        from mlserver.settings import ModelParameters

        from mlserver_torch_stream.handlers.runtime.build import build

        size = {} if batch_rows is None else {"batchSize": batch_rows}
        # Made without validation, which would merge MLServer's environment variables into them.
        parameters = ModelParameters.model_construct(uri=handler, extra={**extra, **_BATCHED_BY_THE_RUN, **size})
        settings = ModelSettings.model_construct(name="handler", parameters=parameters)
        loop, began = asyncio.get_running_loop(), time.monotonic()
        try:
            built = await in_a_thread(lambda: build(settings, loop))
        except (SettingsError, LoadFailed) as error:
            raise RunRefused(_as_options(str(error))) from None
        metrics.load_model_latency_milli_secs.update(round((time.monotonic() - began) * 1e3))
        return cls(built, request)

    @property
    def workers(self) -> int:
        """The most there can be."""
        config = self.built.engine.config
        return max(1, config.minWorkers, config.maxWorkers)

    @property
    def batch_rows(self) -> int:
        return self.built.engine.config.batchSize

    async def __call__(self, rows: Sequence[Row]) -> list[Outcome]:
        jobs: list[PieceStream] = []
        try:
            for row in rows:
                jobs.append(self.built.engine.submit(self._request(row), more=len(jobs) < len(rows) - 1))
            return list(await asyncio.gather(*map(self._outcome, jobs)))
        except (NotServing, QueueFull) as error:
            raise StoreUnavailable(f"the handler's workers take no more: {error.message}") from None
        finally:
            for job in jobs:  # a job that nobody reads would block its worker
                job.close()

    async def aclose(self) -> None:
        await asyncio.to_thread(self.built.shutdown)

    def _request(self, row: Row) -> HandlerRequest:
        from mlserver_torch_stream.handlers.pool.handler_request import RequestPart
        from mlserver_torch_stream.handlers.runtime.v2_messages import read_parts

        part = RequestPart("body", self.request.content_type(row), row.data)
        headers, request_id = self.request.all_headers(row), self.request.request_id(row)
        return read_parts([part], headers, request_id, self.built.engine.config)

    async def _outcome(self, job: PieceStream) -> Outcome:
        from mlserver_torch_stream.handlers.pool.handler_request import WorkerLost

        pieces, began = PieceCollector(), time.monotonic()
        try:
            async for piece in job:
                pieces.add(piece.value, piece.content_type)
        except NotServing:
            raise
        except RequestError as error:
            return Outcome(failure=replace(refusal(error), shared=isinstance(error, WorkerLost)))
        except AnswerTooLarge as error:
            job.close()
            return answer_too_large(error)
        return self.request.outcome(pieces.found, (began, time.monotonic()))


def _as_options(message: str) -> str:
    """The message of the loader, which names settings of MLServer's, with the options that set them here."""
    for setting, option in (
        ("parameters.uri", "--handler"),
        ("parameters.extra.", "--extra: "),
        ("parameters.extra", "--extra"),
    ):
        if message.startswith(setting):
            return option + message.removeprefix(setting)
    return f"--handler: {message}"
