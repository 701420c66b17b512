"""Answers the rows of one batch by its models, until the batch is stopped.

Knows nothing of parts and files: it is the callable that the cloud room infers rows with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from mlserver_torch_stream.batches.row_models import RowModels
from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.cloud_errors import StoreUnavailable
from mlserver_torch_stream.cloud.rows import Failure, Outcome, Row
from mlserver_torch_stream.errors import InvalidInput, NotServing, QueueFull, RequestError, UnknownModel
from mlserver_torch_stream.protocol.openai_spelling import OPENAI_SPELLINGS
from mlserver_torch_stream.protocol.values import is_text, shown

_PAUSES = Retry(first=0.1, longest=5.0)  # before a row is tried again whose model cannot take it now

EXPIRED = Failure("batch_expired", "the batch's completion window ended before this row was answered")
CANCELLED = Failure("batch_cancelled", "the batch was cancelled before this row was answered")


class RowInference:
    """``expected``: models that were there when the batch was validated. A row waits for such a model where it is
    missing, since it is loading again; a row that names another one fails."""

    def __init__(self, models: RowModels, endpoint: str, expected: Collection[str]) -> None:
        self._models = models
        self._endpoint = endpoint
        self._expected = expected
        self._why: Failure | None = None
        self._stopped = asyncio.Event()

    def stop(self, why: Failure) -> None:
        """Fails every row without an answer, also a running one, with ``why``. Later calls change nothing."""
        self._why = self._why or why
        self._stopped.set()

    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    async def __call__(self, rows: Sequence[Row]) -> list[Outcome]:
        return [await self._outcome(row) for row in rows]

    async def _outcome(self, row: Row) -> Outcome:
        if self._why is not None:
            return Outcome(failure=self._why)
        answering = asyncio.ensure_future(self._answer(row.body or {}))
        stopping = asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait({answering, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                return Outcome(failure=self._why)
            return Outcome(answering.result())
        except RequestError as error:
            return Outcome(failure=self._refusal(error))
        finally:
            answering.cancel()
            stopping.cancel()
            await asyncio.gather(answering, stopping, return_exceptions=True)

    async def _answer(self, body: Mapping[str, Any]) -> dict[str, Any]:
        name = self._named(body)
        failed = 0
        while True:
            model = self._models.find(name)
            if model is None and name not in self._expected:
                raise UnknownModel(name)
            if model is not None:
                with suppress(NotServing, QueueFull):  # the row is tried again after a pause
                    return await model.answer(self._endpoint, body)
            failed += 1
            await asyncio.sleep(_PAUSES.pause(min(failed, 8), StoreUnavailable("")))

    def _refusal(self, error: RequestError) -> Failure:
        status, body = OPENAI_SPELLINGS[self._endpoint].refusal(error)
        described = body["error"]
        return Failure(described["code"] or described["type"], described["message"], status, described)

    def _named(self, body: Mapping[str, Any]) -> str:
        """The model that the row names. Raises InvalidInput."""
        prompt = OPENAI_SPELLINGS[self._endpoint].prompt
        if prompt not in body:
            raise InvalidInput("url", f"must be {self._endpoint}, as the batch says, which takes {prompt}")
        if body.get("model_version") is not None:
            raise InvalidInput("model_version", "is not for rows of a batch: the newest version answers")
        name = body.get("model")
        if not is_text(name):
            raise InvalidInput("model", f"must name a model of this server, got {shown(name)}")
        return str(name)
