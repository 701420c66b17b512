"""Twelve thousand events over HTTP about three thousand objects, more than may wait.

Prints how many objects were inferred, and the memory.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.listen import EventListener
from mlserver_torch_stream.cloud.naming import glob_pattern
from mlserver_torch_stream.cloud.notifications import InputPlace
from mlserver_torch_stream.cloud.rows import Outcome, Row
from mlserver_torch_stream.cloud.store import Store, settle
from mlserver_torch_stream.cloud.watch import Watcher

OBJECTS = 3_000
EVENTS = 12_000
_SENDERS = 16
_BEGUN = 1_000  # events, after which the memory is compared


def _event(key: str) -> dict[str, Any]:
    names = {"bucket": {"name": "b"}, "object": {"key": f"in/{key}"}}
    return {"Records": [{"eventName": "ObjectCreated:Put", "s3": names}]}


class _Run:
    """The model answers only after an event was refused because too many objects wait, or after all were accepted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.inferred: Counter[str] = Counter()
        self.answers = asyncio.Event()
        self.refusals = self.accepted = self.most_open = self.most_rss = self.begun_rss = 0
        self.url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        place = InputPlace.of_url("s3://b/in", glob_pattern("**"))
        records = Store.open(str(folder / "events"))
        self.listener = EventListener("127.0.0.1", 0, place, records, Retry(), self._report)

    def _report(self, line: str) -> None:
        self.url.set_result(line.removeprefix("listening on "))

    async def infer(self, rows: Sequence[Row]) -> list[Outcome]:
        await self.answers.wait()
        self.inferred.update(row.key for row in rows)
        return [Outcome({"text": row.data.decode()}) for row in rows]

    async def watch(self) -> None:
        store, output = Store.open(str(self.folder / "in")), Store.open(str(self.folder / "out"))
        watcher = Watcher(store, output, self.infer, {})
        await watcher.watch(self.listener.announcements(), EVENTS)

    async def send(self, keys: Sequence[str]) -> None:
        url = await self.url
        async with aiohttp.ClientSession() as session:
            for key in keys:
                while not await self._accepted(session, url, key):
                    await asyncio.sleep(0.05)

    async def _accepted(self, session: aiohttp.ClientSession, url: str, key: str) -> bool:
        async with session.post(url, json=_event(key)) as answer:
            assert answer.status in (202, 429), await answer.text()
            self.most_open = max(self.most_open, self.listener._open)
            if answer.status == 429:
                self.refusals += 1
                self.answers.set()
                return False
        self.accepted += 1
        if self.accepted == EVENTS:
            self.answers.set()
        if self.accepted % _BEGUN == 0:
            rss = psutil.Process().memory_info().rss
            self.begun_rss, self.most_rss = self.begun_rss or rss, max(self.most_rss, rss)
        return True


async def _measure(folder: Path) -> dict[str, float]:
    keys = [f"{number:04}.txt" for number in range(OBJECTS)]
    (folder / "in").mkdir()
    for key in keys:
        (folder / "in" / key).write_text(key)
    told = keys * (EVENTS // OBJECTS)
    random.Random(5).shuffle(told)
    run = _Run(folder)
    await asyncio.gather(run.watch(), *(run.send(told[first::_SENDERS]) for first in range(_SENDERS)))
    await settle()
    results = [json.loads(path.read_text()) for path in (folder / "out").iterdir()]
    return {
        "inferred": len(run.inferred),
        "inferred_most": max(run.inferred.values()),
        "results": len({row["key"] for row in results if row["response"]["body"]["text"] == row["key"]}),
        "result_objects": len(results),
        "records": len(list((folder / "events").iterdir())),
        "accepted": run.accepted,
        "refusals": run.refusals,
        "most_open": run.most_open,
        "growth_mib": (run.most_rss - run.begun_rss) / 2**20,
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(asyncio.wait_for(_measure(Path(folder)), 400))))
