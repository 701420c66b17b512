"""The files and batches of one server: opens their store, and answers their rows with the server's models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from mlserver.logging import logger
from mlserver.registry import MultiModelRegistry

from mlserver_torch_stream.cloud.batches.batch_record import IdMaker
from mlserver_torch_stream.cloud.batches.batch_runner import BatchRunner
from mlserver_torch_stream.cloud.batches.batch_store import BatchesOff, BatchPlaces
from mlserver_torch_stream.errors import InvalidInput, UnknownModel
from mlserver_torch_stream.protocol.openai_spelling import OPENAI_SPELLINGS
from mlserver_torch_stream.protocol.spelling import PostedBody, ReplyContext
from mlserver_torch_stream.server.host import find_model
from mlserver_torch_stream.server.item_slots import ItemSlots
from mlserver_torch_stream.server.observability.request_observer import EndpointKind, ignored_parameters
from mlserver_torch_stream.server.options import read_options
from mlserver_torch_stream.server.state import ServerState
from mlserver_torch_stream.server.token_model import TokenModel, TokenReply, find_adapter

SETTING = "MLSERVER_TORCH_STREAM_BATCH_STORE"
_UNSET = f"{SETTING} is not set: files and batches need a folder or a bucket, such as s3://bucket/batches"
_LAST = 1_000_000_000  # a priority below every client's


class Batches:
    """The server's files and batches. ``url`` names the store; if it is empty, the server has no files and batches."""

    def __init__(self, url: str, registry: MultiModelRegistry, state: ServerState) -> None:
        self._why_off = _UNSET
        if not url:
            return
        ids = IdMaker()
        try:
            self._runner = BatchRunner(BatchPlaces.open(url, ids), ServedModels(registry, state), ids)
        except BatchesOff as error:
            self._why_off = f"{SETTING}: {error.message}"
            logger.error(f"Files and batches are off: {self._why_off}")
            return
        self._why_off = ""
        self._serving = asyncio.create_task(state.lifecycle.unless_shutdown(self._runner.serve()))
        logger.info(f"Files and batches are kept in {self._runner.places.url}")

    @property
    def runner(self) -> BatchRunner:
        """The runner of the batches. Raises BatchesOff if the server has no files and batches."""
        if self._why_off:
            raise BatchesOff(self._why_off)
        return self._runner


class ServedModels:
    """The models in MLServer's registry that generate tokens, including those that are loading, for batches."""

    def __init__(self, registry: MultiModelRegistry, state: ServerState) -> None:
        self._registry = registry
        self._lifecycle = state.lifecycle
        self._clients = state.clients
        self._slots: WeakKeyDictionary[TokenModel, ItemSlots] = WeakKeyDictionary()

    async def settled(self) -> None:
        """Waits until all running loads of models have ended."""
        for member in self._lifecycle.members():
            await member.settled.wait()

    def has(self, name: str) -> bool:
        """Whether this is the name of a LoRA adapter or of a model that generates tokens. The model may still be
        loading.
        """
        return self._owner(name) is not None

    def _owner(self, name: str) -> TokenModel | None:
        """Returns the model of this name, or the model that has the adapter of this name."""
        model = find_model(self._registry, name, None)
        if model is None:
            return find_adapter(self._registry, name)
        return model if isinstance(model, TokenModel) else None

    async def answer(self, name: str, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the reply to one row of a batch. Raises RequestError if the row is refused or fails."""
        model = self._owner(name)
        if model is None:
            raise UnknownModel(name)
        adapter = None if name == model.name else name
        generator = model.generator(EndpointKind.REST_UNARY)
        spelling = OPENAI_SPELLINGS[endpoint]
        posted = PostedBody(body)
        request_id = uuid4().hex
        with ignored_parameters(read_options(), model.name, request_id):
            request = spelling.decode(posted, generator.info, streaming=False, request_id=request_id)
        if request.priority is not None:
            raise InvalidInput("priority", "cannot be set for rows of a batch, which come after all clients' requests")
        if model not in self._slots:
            self._slots[model] = ItemSlots(model.name, generator.info.max_num_seqs, self._clients)
        turn = self._slots[model].ask(len(request.prompts) * request.sampling.n)
        try:
            await turn.admitted
            if adapter is not None and adapter not in model.adapter_names:  # it was unloaded meanwhile
                raise UnknownModel(adapter)
            request = replace(request, adapter=adapter, priority=None if turn.overdue else _LAST)
            context = ReplyContext(name, model.version, int(time.time()))
            start = partial(replace(generator, observers=turn).start, request)
            with model.inflight.track(), closing(TokenReply(request, spelling, context, start, posted)) as reply:
                return await reply.whole()
        finally:
            turn.close()
