"""A batch runner over a folder or a bucket, and trivial models that answer its rows.

Needs no server and no engine.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from mlserver_torch_stream.cloud.batches.batch_record import BatchRecord, IdMaker
from mlserver_torch_stream.cloud.batches.batch_runner import BatchRunner
from mlserver_torch_stream.cloud.batches.batch_store import BatchPlaces
from mlserver_torch_stream.errors import UnknownModel
from mlserver_torch_stream.protocol.openai_batch_models import BatchRequest
from tests.batches.api import encoded

CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"


class Echo:
    """Each model in ``names`` is loaded, and answers with the row's own words after ``before`` has returned."""

    def __init__(self, *names: str) -> None:
        self.names = set(names)
        self.loaded = asyncio.Event()
        self.loaded.set()
        self.answered: Counter[str] = Counter()
        self.before: Callable[[str], Awaitable[None]] = lambda said: asyncio.sleep(0)

    async def settled(self) -> None:
        await self.loaded.wait()

    def has(self, name: str) -> bool:
        return name in self.names

    async def answer(self, name: str, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if name not in self.names:
            raise UnknownModel(name)
        said = body["messages"][0]["content"]
        await self.before(said)
        self.answered[said] += 1
        return {"object": "chat.completion", "choices": [{"message": {"content": said}}]}


class Bench:
    """A runner over a folder, which runs during a test or a part of it."""

    def __init__(self, store: Path | str, models: Echo) -> None:
        ids = IdMaker()
        self.places = BatchPlaces.open(str(store), ids)
        self.runner = BatchRunner(self.places, models, ids)

    async def __aenter__(self) -> Bench:
        self._serving = asyncio.create_task(self.runner.serve())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._serving.cancel()
        with suppress(asyncio.CancelledError):
            await self._serving

    async def create(self, rows: list[Any]) -> str:
        upload = self.places.files.begin()
        await upload.write(encoded(rows))
        file = await upload.end("rows.jsonl")
        request = BatchRequest(input_file_id=file["id"], endpoint=CHAT, completion_window="24h")
        return (await self.runner.create(request)).id

    async def until(self, batch_id: str, condition: Callable[[BatchRecord], bool]) -> BatchRecord:
        end = time.monotonic() + 60
        while not condition(record := await self.places.batches.get(batch_id)):
            assert time.monotonic() < end, record
            await asyncio.sleep(0.01)
        return record

    async def ended(self, batch_id: str) -> BatchRecord:
        return await self.until(batch_id, lambda record: record.ended)

    async def cleaned(self) -> None:
        """Waits until the parts of the runs are deleted."""
        end = time.monotonic() + 60
        while list(Path(self.places.url, "runs").rglob("part-*")):
            assert time.monotonic() < end
            await asyncio.sleep(0.01)

    async def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        assert file_id is not None
        content = b"".join([each async for each in self.places.files.content(await self.places.files.get(file_id))])
        return [json.loads(line) for line in content.splitlines()]
