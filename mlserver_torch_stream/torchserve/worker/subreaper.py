"""The process between the server and a worker: when either of them ends, it ends whatever the worker has started.

Knows nothing of handlers. Linux makes it the parent of every process below it that loses its own, also of those that
have a session of their own; elsewhere it reaches the worker's process group and no further.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h
_ASKED_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def supervise(descriptor: int) -> None:
    """Returns in a child, which is to be the worker. This process stays, and never returns from here.

    ``descriptor`` is the worker's end of its connection: it hangs up when the server closes its own, or is killed.
    """
    _tell_kernel(_SET_CHILD_SUBREAPER, 1)
    supervisor = os.getpid()
    signals, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, *_ASKED_TO_END):
        signal.signal(number, _wake)
    worker = os.fork()
    if worker:
        _Supervisor(worker, descriptor, signals).run()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, *_ASKED_TO_END):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.close(signals)
    os.close(writing)
    os.setsid()
    _tell_kernel(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:  # it ended before the kernel was told
        os._exit(1)


def _wake(number: int, frame: object) -> None:
    """The signal's number is in the pipe."""


class _Supervisor:
    def __init__(self, worker: int, descriptor: int, signals: int) -> None:
        self._worker = worker
        self._descriptor = descriptor
        self._signals = signals
        self._status: int | None = None  # of the worker, when it has ended

    def run(self) -> None:
        self._wait()
        with contextlib.suppress(OSError):
            os.killpg(self._worker, signal.SIGKILL)
        if self._status is None:
            os.kill(self._worker, signal.SIGKILL)  # it may not have a group of its own yet
        os.close(self._descriptor)  # the server hears the end now, however long the rest takes
        self._end_children()
        _end_like(0 if self._status is None else self._status)

    def _wait(self) -> None:
        """Until the worker has ended, the server hangs up, or a signal asks this process to end."""
        poll = select.poll()
        poll.register(self._descriptor, 0)  # a hang-up is told in any case, and what there is to read is the worker's
        poll.register(self._signals, select.POLLIN)
        while self._status is None:
            for descriptor, _ in poll.poll():
                if descriptor == self._descriptor:
                    return
                if set(os.read(self._signals, 1024)) & set(_ASKED_TO_END):
                    return
            self._reap(os.WNOHANG)

    def _end_children(self) -> None:
        """A process that is killed leaves its own children to this one, so there are none left in the end."""
        more = True
        while more:
            for pid in _children():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            more = self._reap(0) and self._reap(os.WNOHANG)

    def _reap(self, options: int) -> bool:
        """One child if ``options`` is 0, else all that have ended. False: there are no more children."""
        try:
            while True:
                pid, status = os.waitpid(-1, options)
                if pid == self._worker:
                    self._status = status
                if pid == 0 or options == 0:
                    return True
        except ChildProcessError:
            return False


def _children() -> list[int]:
    """None where there is no ``/proc``."""
    own = os.getpid()
    found = []
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                    if int(file.read().rpartition(b")")[2].split()[1]) == own:
                        found.append(int(name))
    return found


def _tell_kernel(option: int, value: int) -> None:
    if sys.platform != "linux":
        return
    try:
        import ctypes

        if ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0:
            return
    except (ImportError, OSError, AttributeError):
        pass
    print(f"prctl({option}) is not there: a process may outlive the worker that has started it", flush=True)


def _end_like(status: int) -> None:
    """So that the server is told of the worker's own end."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker has left one, where that is wanted
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))
