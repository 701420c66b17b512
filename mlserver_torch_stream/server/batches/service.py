"""The files and batches of one server: opens their store, and answers rows by the models of this server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from mlserver.logging import logger
from mlserver.registry import MultiModelRegistry

from mlserver_torch_stream.batches.batch_record import IdMaker
from mlserver_torch_stream.batches.batch_run import RowModels
from mlserver_torch_stream.batches.batch_runner import BatchRunner
from mlserver_torch_stream.batches.batch_store import BatchPlaces
from mlserver_torch_stream.batches.pages import BatchesOff
from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.openai_spelling import OPENAI_SPELLINGS
from mlserver_torch_stream.protocol.spelling import PostedBody, ReplyContext
from mlserver_torch_stream.server.batches.row_slots import RowSlots
from mlserver_torch_stream.server.host import find_model
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.observability.request_metrics import ClientLoad
from mlserver_torch_stream.server.observability.request_observer import EndpointKind
from mlserver_torch_stream.server.token_model import TokenModel, TokenReply

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


_LAST = 1_000_000_000  # a lower priority than that of any client


class ServedRows:
    """A ``RowModels`` over MLServer's registry."""

    def __init__(self, registry: MultiModelRegistry, clients: ClientLoad, lifecycle: Lifecycle) -> None:
        self._registry = registry
        self._lifecycle = lifecycle
        self._clients = clients
        self._slots: WeakKeyDictionary[TokenModel, RowSlots] = WeakKeyDictionary()
        clients.listen(self._look)

    async def settled(self) -> None:
        for member in self._lifecycle.members():
            await member.settled.wait()

    def find(self, name: str) -> ServedRowModel | None:
        """A model that generates tokens; it may still be loading."""
        model: Any = find_model(self._registry, name, None)
        return ServedRowModel(model, self) if isinstance(model, TokenModel) else None

    def slots(self, model: TokenModel, count: int) -> RowSlots:
        if model not in self._slots:
            self._slots[model] = RowSlots(model.name, count, self._clients)
        return self._slots[model]

    def _look(self) -> None:
        for slots in list(self._slots.values()):
            slots.look()


@dataclass(frozen=True)
class ServedRowModel:
    """A ``RowModel``."""

    model: TokenModel
    rows: ServedRows

    async def answer(self, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
        generator = self.model.generator(EndpointKind.REST_UNARY)
        spelling = OPENAI_SPELLINGS[endpoint]
        posted = PostedBody(body)
        request = spelling.decode(posted, generator.info, streaming=False, request_id=uuid4().hex)
        if request.priority is not None:
            raise InvalidInput("priority", "is not for rows of a batch, which all come after the requests of clients")
        sequences = len(request.prompts) * request.sampling.n
        turn = self.rows.slots(self.model, generator.info.max_num_seqs).ask(sequences)
        try:
            await turn.admitted
            request = replace(request, priority=None if turn.overdue else _LAST)
            context = ReplyContext(self.model.name, self.model.version, int(time.time()))
            start = partial(replace(generator, observers=turn).start, request)
            with self.model.inflight.track(), closing(TokenReply(request, spelling, context, start, posted)) as reply:
                return await reply.whole()
        finally:
            turn.close()
