"""The requests with which GCS is written, against a server that answers as Google documents it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.rows import ObjectChanged, ObjectExists
from mlserver_torch_stream.cloud.sink import create
from mlserver_torch_stream.cloud.store import Store, settle
from tests.cloud.command import cloud
from tests.cloud.gcs import Bucket, gcs_bucket
from tests.cloud.models import ModelServer

_QUICK = Retry(tries=3, first=0.001, longest=0.01)


@pytest.fixture
def gcs() -> Iterator[Bucket]:
    with gcs_bucket() as running:
        yield running


@pytest.mark.long
def test_a_run_resumes_and_tries_again_in_a_bucket(gcs: Bucket, server: ModelServer) -> None:
    lines = [json.dumps({"custom_id": f"r{i}", "prompt": f"row {i}"}) for i in range(10)]
    gcs.objects["in/a b.jsonl"] = ("\n".join(lines).encode(), 7)
    options = [word for name, value in gcs.storage().items() for word in ("--storage", f"{name}={value}")]
    where = ("--input", "gs://bucket/in", "--output", "gs://bucket/out", *options)
    run = ("run", *where, "--url", server.url, "--part-rows", "4", "--concurrency", "1")
    server.trouble = lambda prompt, before: {"row 2": 422, "row 6": 401}.get(prompt)
    assert cloud(*run) == 3
    assert "out/part-000000.jsonl" in gcs.objects and "out/part-000001.jsonl" not in gcs.objects
    server.trouble = lambda prompt, before: None
    gcs.lost = 1
    assert cloud(*run, "--retry-failed") == 0
    parts = [gcs.objects[key][0] for key in sorted(gcs.objects) if key.startswith("out/part-")]
    rows = [json.loads(line) for line in b"".join(parts).splitlines()]
    assert [row["custom_id"] for row in rows] == [f"r{i}" for i in range(10)]
    assert all(row["error"] is None for row in rows)
    asked = [generation for key, generation in gcs.writes if key == "out/part-000000.jsonl"]
    assert asked[0] == "0" and asked[1] not in ("0", None)  # created if absent, then replaced if still the one read


def test_writes_ask_for_what_is_there(gcs: Bucket) -> None:
    async def act() -> None:
        store = Store.open("gs://bucket/out", gcs.storage())
        gcs.lost = 1
        await create(store, "a", b"one", _QUICK)  # the lost answer's write is found to be ours
        with pytest.raises(ObjectExists):
            await create(store, "a", b"two", _QUICK)
        data, marks = await store.look("a")
        assert data == b"one"
        await store.replace("a", b"two", marks)
        with pytest.raises(ObjectChanged):
            await store.replace("a", b"three", marks)
        assert [info.key async for info in store.list()] == ["a"] and await store.get("a") == b"two"
        await settle()

    asyncio.run(act())
