"""The models of this server as a batch sees them: found by name, each answers rows as its OpenAI endpoints do.

Knows nothing of files and batches.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from mlserver import MLModel
from mlserver.registry import MultiModelRegistry

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.openai_spelling import OPENAI_SPELLINGS
from mlserver_torch_stream.protocol.spelling import PostedBody, ReplyContext
from mlserver_torch_stream.server.batches.client_load import ClientLoad
from mlserver_torch_stream.server.batches.row_slots import RowSlots
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.observability.request_record import EndpointKind
from mlserver_torch_stream.server.registered_models import find_model, is_ours
from mlserver_torch_stream.server.streams.token_reply import TokenReply

_LAST = 1_000_000_000  # a lower priority than that of any client


class ServedRows:
    """A ``RowModels`` over MLServer's registry."""

    def __init__(self, registry: MultiModelRegistry, clients: ClientLoad, lifecycle: Lifecycle) -> None:
        self._registry = registry
        self._lifecycle = lifecycle
        self._clients = clients
        self._slots: WeakKeyDictionary[MLModel, RowSlots] = WeakKeyDictionary()
        clients.listen(self._look)

    async def settled(self) -> None:
        for member in self._lifecycle.members():
            await member.settled.wait()

    def find(self, name: str) -> ServedRowModel | None:
        """A model that generates tokens; it may still be loading."""
        model = find_model(self._registry, name, None)
        if model is None or not is_ours(model) or hasattr(model, "open_reply"):
            return None
        return ServedRowModel(model, self)

    def slots(self, model: MLModel, count: int) -> RowSlots:
        if model not in self._slots:
            self._slots[model] = RowSlots(model.name, count, self._clients)
        return self._slots[model]

    def _look(self) -> None:
        for slots in list(self._slots.values()):
            slots.look()


@dataclass(frozen=True)
class ServedRowModel:
    """A ``RowModel``."""

    model: MLModel
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
