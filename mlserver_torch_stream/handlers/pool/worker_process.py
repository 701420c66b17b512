"""Runs one worker: one process, or one for each rank of a parallel handler, each with its own connection.

The messages of the processes are read on the event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from mlserver_torch_stream.handlers.frames import (
    MAX_READ,
    BrokenFrame,
    FrameBuffer,
    begin_frame,
    encode_frame,
    encode_header,
)
from mlserver_torch_stream.handlers.pool.handler_request import HandlerJob
from mlserver_torch_stream.handlers.pool.worker_rank import MAX_STOP_S, WorkerOrder, WorkerRank

_MAX_AT_ONCE = 64  # messages that are passed on before other callbacks get a turn
_OF_ALL_RANKS = ("ready", "refused", "sends", "next", "meets")  # messages that all ranks send, not only the first

Receive = Callable[[dict[str, Any], bytes], None]


class WorkerProcess:
    """A running worker. ``receive`` is called with each message and its ``rank``; ``lost`` is called once, with the
    reason why the worker ended.

    It must be created on the event loop, on which both callbacks run.
    """

    def __init__(
        self,
        name: str,
        order: WorkerOrder,
        receive: Receive,
        lost: Callable[[str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._receive = receive
        self._lost = lost
        self._ranks: list[WorkerRank] = []
        self._reapers: list[threading.Thread] = []
        self._flowing = True
        self._ending = threading.Lock()
        self._end_posted = False
        for number, environment in enumerate(order.environment):
            shown = name if len(order.environment) == 1 else f"{name} rank {number}"
            try:
                self._ranks.append(WorkerRank(number, shown, environment, order))
            except BaseException:  # no reaper exists yet that would end the ranks that have started
                for rank in self._ranks:
                    rank.kill()
                    rank.wait()
                    rank.connection.close()
                raise
        for rank in self._ranks:
            rank.send(encode_frame({**order.message, "responds": rank.number == 0}, order.body))
            reaper = threading.Thread(target=self._reap, args=(rank,), name=f"reaper of {rank.name}", daemon=True)
            self._reapers.append(reaper)
            reaper.start()
            self._set_reading(rank, True)

    @property
    def pids(self) -> list[int]:
        """The process ids of the ranks' subreapers, which are the parents of the workers."""
        return [rank.process.pid for rank in self._ranks]

    @property
    def running(self) -> bool:
        """True until all processes of the worker have ended."""
        return any(reaper.is_alive() for reaper in self._reapers)

    def send(self, *frame: bytes, all_ranks: bool) -> None:
        """Queues a frame, given in parts, for the first rank, or for all ranks, without waiting until it is read."""
        for rank in self._ranks if all_ranks else self._ranks[:1]:
            rank.send(*frame)

    def pause(self) -> None:
        """Stops reading until ``resume``, so that the worker blocks when it sends its next message."""
        self._flowing = False

    def resume(self) -> None:
        """Reads messages again after ``pause``."""
        self._flowing = True
        for rank in self._ranks:
            self._loop.call_soon(self._pass_on, rank)

    def kill(self, why: str | None = None) -> None:
        """Kills the worker and all processes that it has started. ``lost`` gets ``why`` as the reason."""
        for rank in self._ranks:
            rank.kill()
        if why is not None:
            self._post_end(why)

    def wait(self) -> None:
        """Blocks until no process is left."""
        for reaper in self._reapers:
            reaper.join(MAX_STOP_S)

    def _read(self, rank: WorkerRank) -> None:
        """Reads the bytes that have arrived. The connection ends with the process, or after ``kill``."""
        try:
            data = rank.connection.recv(MAX_READ)
        except BlockingIOError:
            return
        except OSError as error:
            self._end_reading(rank, f": {error}")
            return
        if data:
            rank.frames.feed(data)
            self._pass_on(rank)
        else:
            self._end_reading(rank)

    def _pass_on(self, rank: WorkerRank) -> None:
        """Passes on the complete messages; after each ``_MAX_AT_ONCE`` of them other callbacks get a turn."""
        left = _MAX_AT_ONCE
        while left and self._flowing and (frame := self._next(rank)) is not None:
            self._receive(*frame)
            left -= 1
        if not left and self._flowing:
            self._loop.call_soon(self._pass_on, rank)
        self._set_reading(rank, self._flowing and left > 0)

    def _next(self, rank: WorkerRank) -> tuple[dict[str, Any], bytes] | None:
        """Returns the next complete message. Most kinds of messages from ranks other than the first are skipped."""
        try:
            while (frame := rank.frames.take()) is not None:
                if rank.number == 0 or frame[0]["t"] in _OF_ALL_RANKS:
                    frame[0]["rank"] = rank.number
                    return frame
        except BrokenFrame as error:
            rank.frames = FrameBuffer()
            self._end_reading(rank, f": {error}")
        return None

    def _set_reading(self, rank: WorkerRank, reading: bool) -> None:
        if rank.ended or rank.reading == reading:
            return
        rank.reading = reading
        if reading:
            self._loop.add_reader(rank.connection, self._read, rank)
        else:
            self._loop.remove_reader(rank.connection)

    def _end_reading(self, rank: WorkerRank, why: str = "") -> None:
        rank.trouble = why
        rank.end()
        rank.kill()

    def _reap(self, rank: WorkerRank) -> None:
        """Runs in a thread: waits for ``kill`` or the end of the connection, then for the end of the process."""
        rank.killed.wait()
        how = rank.wait()
        if not self._post(self._reaped, rank, how):
            rank.connection.close()

    def _reaped(self, rank: WorkerRank, how: str) -> None:
        """Called when the process has ended."""
        self._read_rest(rank)
        rank.connection.close()
        self._post_end(f"{rank.name} {how}{rank.trouble}")
        self.kill()  # the other ranks, which would wait for this one

    def _read_rest(self, rank: WorkerRank) -> None:
        """Passes on the messages that a killed rank had sent before its end."""
        while not rank.ended:
            self._read(rank)
        while (frame := self._next(rank)) is not None:
            self._receive(*frame)

    def _report_end(self, why: str) -> None:
        for rank in self._ranks:
            self._read_rest(rank)
        self._lost(why)

    def _post_end(self, why: str) -> None:
        with self._ending:
            if self._end_posted:
                return
            self._end_posted = True
        self._post(self._report_end, why)

    def _post(self, callback: Callable[..., None], *args: Any) -> bool:
        """Schedules a callback on the event loop, from any thread. Returns False if the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            return False
        return True


def batch_frame(jobs: Sequence[HandlerJob]) -> list[bytes]:
    """Encodes the message that has a worker run these jobs as one batch. Returns its parts; values are not copied."""
    requests = [
        {
            "id": job.key,
            "headers": job.request.headers,
            "parts": [{"name": part.name, "ct": part.content_type} for part in job.request.parts],
        }
        for job in jobs
    ]
    values = [part.value for job in jobs for part in job.request.parts]
    sizes = [*map(len, values)]
    header = {"t": "run", "requests": requests, "sizes": sizes}
    try:
        encoded = orjson.dumps(header)
    except TypeError:  # a text with a lone surrogate
        encoded = encode_header(header)
    return [begin_frame(encoded, sum(sizes)), *values]
