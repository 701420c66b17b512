"""Manages two objects that are stored with the parts: the manifest, and the lease that ensures that only one command
writes parts.

Even without the lease, no part would be written twice. The lease prevents a second command from inferring rows whose
results it could not write.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import socket
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.naming import MANIFEST, differences, digest
from mlserver_torch_stream.cloud.rows import (
    CloudError,
    InUse,
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    RunIdentity,
    RunRefused,
)
from mlserver_torch_stream.cloud.store import Store, get_or_none

RENEW_S = 15.0
SILENCE_S = 60.0  # a writer that has not renewed its lease for this long counts as dead
_END_S = 2.0  # how long it may take to write that the command has ended, possibly after a signal
_NAME = re.compile(r"lease(?:-(\d+)-of-(\d+))?\.json")


class WriterLease:
    """Holds the lease of an output during an ``async with`` block.

    A dead writer on this machine is noticed at once, because its process is gone. A writer on another machine is
    considered dead after ``silence`` seconds without a renewal, or if the clocks of the two machines differ by more
    than that.
    """

    def __init__(
        self,
        output: Store,
        lane: int,
        lanes: int,
        retry: Retry,
        renew: float = RENEW_S,
        silence: float = SILENCE_S,
    ) -> None:
        self._output = output
        self._lane = lane
        self._lanes = lanes
        self._retry = retry
        self._renew = renew
        self._silence = silence
        self._name = "lease.json" if lanes == 1 else f"lease-{lane}-of-{lanes}.json"
        self._token = uuid.uuid4().hex
        self._renewing: asyncio.Task[None] | None = None
        self._lost = False

    async def check(self) -> None:
        """Raises InUse if a running command writes parts that this command would write."""
        names = [info.key async for info in self._output.list() if self._shares_parts(info.key)]
        for name in names:
            with suppress(ObjectMissing):
                self._refuse_if_alive(await self._retry.run(self._output.get, name))

    async def __aenter__(self) -> WriterLease:
        await self._retry.run(self.check)
        try:
            await self._retry.run(lambda: self._output.create(self._name, self._text()))
        except ObjectExists:
            await self._take_over()
        self._renewing = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._renewing is not None
        self._renewing.cancel()
        await asyncio.gather(self._renewing, return_exceptions=True)
        if not self._lost:
            with suppress(CloudError, asyncio.TimeoutError):
                await asyncio.wait_for(self._output.put(self._name, self._text(ended=True)), _END_S)

    def require(self) -> None:
        """Raises ObjectChanged once another command has taken over the output."""
        if self._lost:
            raise ObjectChanged(
                f"{self._output.url}: another command has taken over, because this one did not renew its lease in time"
            )

    async def _take_over(self) -> None:
        """Replaces the lease of a command that has ended or died. If two commands try at the same time, only one
        succeeds.
        """
        data, marks = await self._retry.run(self._output.look, self._name)
        self._refuse_if_alive(data)
        try:
            await self._retry.run(lambda: self._output.replace(self._name, self._text(), marks))
        except ObjectChanged:
            data, _ = await self._retry.run(self._output.look, self._name)
            self._refuse_if_alive(data)

    async def _keep(self) -> None:
        while not self._lost:
            await asyncio.sleep(self._renew)
            with suppress(CloudError):  # the store may answer later
                data, marks = await self._output.look(self._name)
                if _read(data).get("token") != self._token:
                    self._lost = True
                else:
                    await self._output.replace(self._name, self._text(), marks)

    def _refuse_if_alive(self, data: bytes) -> None:
        holder = _read(data)
        if holder.get("token") == self._token or not _alive(holder, self._silence):
            return
        raise InUse(
            f"--output: another command writes to {self._output.url}: process {holder.get('pid')} on "
            f"{holder.get('host')}. Wait until it ends, or share the rows with --worker; if the process is dead, the "
            f"output is blocked for at most {self._silence:g} s"
        )

    def _text(self, *, ended: bool = False) -> bytes:
        holder = {"token": self._token, "host": socket.gethostname(), **_process(), "seen": time.time()}
        return json.dumps({**holder, "ended": ended}).encode() + b"\n"

    def _shares_parts(self, name: str) -> bool:
        """Returns True if a lease's lane shares parts with this one. A lane writes the parts n with n % lanes == lane -
        1.

        Two lanes share parts if lane - 1 has the same remainder modulo the greatest common divisor of their ``lanes``.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            return False
        lane, lanes = int(match[1] or 1), int(match[2] or 1)
        return (lane - self._lane) % math.gcd(lanes, self._lanes) == 0


def _alive(holder: Mapping[str, Any], silence: float) -> bool:
    if holder.get("ended", True):
        return False
    here = _process()
    if here["machine"] is not None and holder.get("machine") == here["machine"]:
        lives = holder.get("started") is not None and holder["started"] == _started(holder.get("pid"))
        if not lives or holder.get("pid") != here["pid"]:
            return lives
        # The holder is this process: an earlier run in it may have ended while the store could not be reached.
    seen = holder.get("seen")
    return isinstance(seen, int | float) and abs(time.time() - seen) < silence


def _process() -> dict[str, Any]:
    """Returns this process's pid, and the machine and pid namespace in which the pid is valid. Linux only."""
    machine = None
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    return {"machine": machine, "pid": os.getpid(), "started": _started(os.getpid())}


def _started(pid: Any) -> int | None:
    """Returns when a living process was started, in clock ticks since the machine's boot."""
    with suppress(OSError, ValueError):
        state, *fields = Path(f"/proc/{int(pid)}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if state == "Z" else int(fields[18])
    return None


def _read(data: bytes) -> dict[str, Any]:
    """Reads a lease. Bytes that are not a valid lease are treated as a lease that has ended."""
    try:
        holder = json.loads(data)
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


FORMAT = 2  # the version of the format of manifests and output rows
_MAX_DIFFERENCES = 4
_OWN = ("format", "run", "created")  # keys of a manifest that are not part of the configuration


async def read_claim(output: Store, config: Mapping[str, Any], retry: Retry) -> RunIdentity | None:
    """Returns the identity of the run with this ``config`` if the output belongs to it; None if the output belongs to
    no run yet.

    Raises RunRefused if the output belongs to another run.
    """
    found = await get_or_none(output, MANIFEST, retry)
    if found is None:
        return None
    try:
        was = json.loads(found)
        form, run = was["format"], RunIdentity(str(was["run"]), int(was["created"]) if was["format"] == FORMAT else 0)
    except (ValueError, KeyError, TypeError):
        raise RunRefused(f"--output: the manifest in {output.url} was not written by this program") from None
    if form != FORMAT:
        raise RunRefused(
            f"--output: {output.url} was written in format {form}, by another version of this program, whose rows "
            f"differ from those of format {FORMAT}; choose an empty folder or prefix"
        )
    differing = differences({key: value for key, value in was.items() if key not in _OWN}, config)
    if differing:
        raise RunRefused(f"--output: {output.url} belongs to another run: {'; '.join(differing[:_MAX_DIFFERENCES])}")
    return run


async def claim(output: Store, config: Mapping[str, Any], created: int, retry: Retry) -> RunIdentity:
    """Claims the output for this run if it belongs to no run yet. Raises RunRefused if it belongs to another run."""
    run = identify(config, created)
    manifest = {"format": FORMAT, "run": run.id, "created": created, **config}
    text = json.dumps(manifest, indent=2, sort_keys=True).encode() + b"\n"
    try:
        await retry.run(output.create, MANIFEST, text)
    except ObjectExists:
        found = await read_claim(output, config, retry)
        assert found is not None, "the manifest has disappeared"
        return found
    return run


def identify(config: Mapping[str, Any], created: int) -> RunIdentity:
    """Returns the identity of a run: a digest of its configuration, and the time when it began, in seconds since the
    epoch.
    """
    return RunIdentity(digest(config), created)
