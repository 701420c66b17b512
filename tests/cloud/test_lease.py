"""Only one command writes an output at a time: a second one is refused, and a dead one blocks others only briefly."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mlserver_torch_stream.cloud.lease import WriterLease
from mlserver_torch_stream.cloud.rows import InUse, ObjectChanged, ObjectMissing, StoreUnavailable
from mlserver_torch_stream.cloud.store import Store, settle
from tests.cloud.command import cloud, finish, joined, start
from tests.cloud.jobs import QUICK
from tests.cloud.models import ModelServer


def _lease(store: Store, lane: int = 1, lanes: int = 1, **times: float) -> WriterLease:
    return WriterLease(store, lane, lanes, QUICK, **times)


def _place(place: str, tmp_path: Path, request: pytest.FixtureRequest) -> Store:
    if place == "memory":
        return Store.memory()
    return Store.open(str(tmp_path) if place == "folder" else f"s3://{request.getfixturevalue('bucket')}/out")


def test_of_replacements_of_one_object_in_a_folder_none_is_lost(tmp_path: Path) -> None:
    """Each replacement is based on the version that it replaces, and is made by one of two stores."""

    async def act() -> None:
        stores = [Store.open(str(tmp_path)) for _ in range(2)]
        await stores[0].put("count", b"0")

        async def count(store: Store) -> None:
            for _ in range(50):
                while True:
                    data, marks = await store.look("count")
                    try:
                        await store.replace("count", b"%d" % (int(data) + 1), marks)
                        break
                    except ObjectChanged:
                        pass

        await asyncio.wait_for(asyncio.gather(*map(count, stores)), 60)
        assert await stores[0].get("count") == b"100"
        await settle()

    asyncio.run(act())


@pytest.mark.parametrize("nfs", [False, True], ids=["local disk", "NFS"])
def test_a_replacement_waits_for_the_lock_of_another_process_no_longer_than_the_store_may_be_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nfs: bool
) -> None:
    flock = fcntl.flock

    def over_nfs(file: Any, operation: int) -> None:
        """Refuses to lock a file alone that is not open for writing, as NFS does."""
        if operation & fcntl.LOCK_EX and fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(file, operation)

    if nfs:
        monkeypatch.setattr(fcntl, "flock", over_nfs)

    async def act() -> None:
        store = Store.open(str(tmp_path), stall_s=1.0)
        await store.put("count", b"0")
        _, marks = await store.look("count")
        with (tmp_path / "count").open("r+b") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            with pytest.raises(StoreUnavailable, match=r"another process has held its lock for 1 s"):
                await store.replace("count", b"1", marks)
        assert await store.get("count") == b"0"
        await store.replace("count", b"2", marks)
        assert await store.get("count") == b"2"
        with pytest.raises(ObjectMissing):
            await store.replace("missing", b"1", marks)
        await settle()

    asyncio.run(act())


def test_a_file_that_cannot_be_opened_for_writing_is_replaced_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a read-only file, which root can write, or a file in a bucket that is mounted as a folder."""
    open_file = os.open

    def refuse(path: Any, flags: int, *mode: int, **options: Any) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return open_file(path, flags, *mode, **options)

    monkeypatch.setattr(os, "open", refuse)

    async def act() -> None:
        store = Store.open(str(tmp_path))
        await store.put("count", b"0")
        _, marks = await store.look("count")
        await store.replace("count", b"1", marks)
        assert await store.get("count") == b"1"
        await settle()

    asyncio.run(act())


def test_a_lock_that_fails_is_an_error_that_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", fail)

    async def act() -> None:
        store = Store.open(str(tmp_path))
        await store.put("count", b"0")
        _, marks = await store.look("count")
        with pytest.raises(StoreUnavailable, match=f"{tmp_path}/count: cannot be locked: {os.strerror(errno.EIO)}"):
            await store.replace("count", b"1", marks)
        assert await store.get("count") == b"0"
        await settle()

    asyncio.run(act())


@pytest.mark.parametrize("place", ["memory", "folder", "s3"])
def test_a_second_writer_is_refused_until_the_first_has_ended(
    place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    async def act() -> None:
        store = _place(place, tmp_path, request)
        async with _lease(store):
            with pytest.raises(InUse, match=r"another command writes to .* process \d+ on "):
                await _lease(store).__aenter__()
            with pytest.raises(InUse):
                await _lease(store).check()
        async with _lease(store):
            pass
        await settle()

    asyncio.run(act())


@pytest.mark.parametrize(
    ("one", "other", "share"),
    [((1, 1), (2, 3), True), ((1, 2), (2, 2), False), ((1, 2), (3, 4), True), ((1, 2), (2, 4), False)],
)
def test_workers_with_parts_of_their_own_do_not_hinder_each_other(
    one: tuple[int, int], other: tuple[int, int], share: bool
) -> None:
    async def act() -> bool:
        store = Store.memory()
        async with _lease(store, *one):
            try:
                await _lease(store, *other).check()
            except InUse:
                return True
        return False

    assert asyncio.run(act()) is share


async def _hold(store: Store, **changes: Any) -> None:
    """Writes a lease as another machine would have left it."""
    holder = {"token": "t", "host": "h", "machine": "elsewhere", "pid": 1, "started": 1, "seen": time.time()}
    await store.put("lease.json", json.dumps({**holder, "ended": False, **changes}).encode())


def test_a_writer_of_another_machine_is_alive_while_it_is_heard_of_and_no_longer() -> None:
    async def act() -> None:
        store = Store.memory()
        await _hold(store)
        with pytest.raises(InUse, match="process 1 on h"):
            await _lease(store).check()
        for seen in (time.time() - 61, time.time() + 3600, None):
            await _hold(store, seen=seen)
            async with _lease(store):
                pass
        await store.put("lease.json", b"no lease")
        async with _lease(store):
            pass

    asyncio.run(act())


def test_a_lease_that_this_process_could_not_end_blocks_it_no_longer_than_one_of_another_machine() -> None:
    class Gone(Store):
        """A store that refuses all writes."""

        async def put(self, key: str, data: bytes) -> None:
            raise StoreUnavailable("later")

    async def act() -> None:
        store = Store.memory()
        gone = Gone(store._backend, "memory://")
        async with _lease(gone):
            pass
        with pytest.raises(InUse):
            await _lease(store).check()
        async with _lease(store, silence=0.0):
            pass

    asyncio.run(act())


def test_of_two_that_take_over_a_dead_writers_output_one_succeeds() -> None:
    class Late(Store):
        """Lets another command take the output over between a look at the lease and its replacement."""

        async def replace(self, key: str, data: bytes, marks: Mapping[str, str]) -> None:
            await _hold(self)
            await super().replace(key, data, marks)

    async def act() -> None:
        store = Late(Store.memory()._backend, "memory://")
        await _hold(store, ended=True)
        with pytest.raises(InUse):
            await _lease(store).__aenter__()

    asyncio.run(act())


def test_a_writer_is_heard_of_while_it_works_and_notices_that_another_took_over() -> None:
    class Moody(Store):
        """A store that fails at every other look."""

        looks = 0

        async def look(self, key: str) -> tuple[bytes, Mapping[str, str]]:
            self.looks += 1
            if self.looks % 2:
                raise StoreUnavailable("later")
            return await super().look(key)

    async def act() -> None:
        store = Moody(Store.memory()._backend, "memory://")
        async with _lease(store, renew=0.01) as lease:
            first = json.loads(await store.get("lease.json"))["seen"]
            while json.loads(await store.get("lease.json"))["seen"] == first:
                await asyncio.sleep(0.01)
            lease.require()
            await _hold(store)
            with pytest.raises(ObjectChanged, match="another command has taken over"):
                while True:
                    lease.require()
                    await asyncio.sleep(0.01)
        assert json.loads(await store.get("lease.json"))["host"] == "h"  # it is the other's, to the end

    asyncio.run(asyncio.wait_for(act(), 60))


@pytest.mark.long
def test_a_second_watcher_that_polls_stands_by_until_the_first_has_ended(tmp_path: Path, server: ModelServer) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("abc")
    output = Store.open(str(tmp_path / "out"))
    asyncio.run(_hold(output))
    where = ("--input", tmp_path / "in", "--output", tmp_path / "out", "--url", server.url)
    process = start("watch", *where, "--poll", "0.05", "--limit", "1")
    assert process.stderr is not None
    lines = [process.stderr.readline() for _ in range(2)]
    assert any(b"standing by" in line and b"process 1 on h" in line for line in lines) and not server.asked
    asyncio.run(_hold(output, ended=True))
    assert finish(process)[0] == 0 and server.asked == ["abc"]


@pytest.mark.long
def test_a_second_command_on_an_output_says_so_and_a_killed_one_is_followed_at_once(
    tmp_path: Path, server: ModelServer, capsys: Any
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("".join(f'{{"prompt": "row {i}"}}\n' for i in range(20)))
    held = threading.Event()
    server.trouble = lambda prompt, before: held.wait(60) and None
    run = ("run", "--input", tmp_path / "in", "--output", tmp_path / "out", "--url", server.url, "--part-rows", "2")
    process = start(*run, "--concurrency", "1")
    end = time.monotonic() + 120
    while not server.asked:
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.01)
    assert cloud(*run) == 2
    assert f"process {process.pid} on" in capsys.readouterr().err and server.asked == ["row 0"]
    process.send_signal(signal.SIGKILL)
    finish(process)
    held.set()
    assert cloud(*run) == 0 and len(joined(tmp_path / "out").splitlines()) == 20
