"""Runs between the server and a worker: when one of them ends, it ends all processes of the worker.

On Linux it becomes the parent of every orphan below it, also of processes that have a session of their own; elsewhere
it ends the worker's process group only.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h
_TERMINATING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


SHARED_MEMORY = "shared-memory"  # a file in the worker's folder with the names of the shared memory that it uses


def supervise(descriptor: int, folder: str | None = None) -> None:
    """Forks, and returns in the child, which becomes the worker. In this process it never returns.

    ``descriptor`` is the worker's end of its connection: it hangs up when the server closes its own end, or is killed.
    ``folder`` is the worker's own: it is removed at the end, and so is the shared memory that a file in it names.
    """
    _prctl(_SET_CHILD_SUBREAPER, 1)
    supervisor = os.getpid()
    signals, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, *_TERMINATING):
        signal.signal(number, _wake)
    worker = os.fork()
    if worker:
        _Supervisor(worker, descriptor, signals, folder).run()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, *_TERMINATING):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.close(signals)
    os.close(writing)
    os.setsid()
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:  # the parent ended before the call above
        os._exit(1)


def _wake(number: int, frame: object) -> None:
    """Does nothing: Python has written the signal's number into the pipe."""


class _Supervisor:
    def __init__(self, worker: int, descriptor: int, signals: int, folder: str | None = None) -> None:
        self._worker = worker
        self._descriptor = descriptor
        self._signals = signals
        self._folder = folder
        self._status: int | None = None  # of the worker, when it has ended

    def run(self) -> None:
        self._wait()
        with contextlib.suppress(OSError):
            os.killpg(self._worker, signal.SIGKILL)
        if self._status is None:
            os.kill(self._worker, signal.SIGKILL)  # the worker may not have a group of its own yet
        os.close(self._descriptor)  # the server gets the end now, however long the rest takes
        self._end_children()
        if self._folder is not None:
            _remove(self._folder)
        _end_like(0 if self._status is None else self._status)

    def _wait(self) -> None:
        """Waits until the worker has ended, the server hangs up, or a signal terminates this process."""
        poll = select.poll()
        poll.register(self._descriptor, 0)  # a hang-up is always reported; the worker reads the messages
        poll.register(self._signals, select.POLLIN)
        while self._status is None:
            for descriptor, _ in poll.poll():
                if descriptor == self._descriptor:
                    return
                if set(os.read(self._signals, 1024)) & set(_TERMINATING):
                    return
            self._reap(os.WNOHANG)

    def _end_children(self) -> None:
        """Kills children until there are none: those of a killed process become children of this one."""
        more = True
        while more:
            for pid in _children():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            more = self._reap(0) and self._reap(os.WNOHANG)

    def _reap(self, options: int) -> bool:
        """Reaps one child if ``options`` is 0, else all that have ended. False: there are no more children."""
        try:
            while True:
                pid, status = os.waitpid(-1, options)
                if pid == self._worker:
                    self._status = status
                if pid == 0 or options == 0:
                    return True
        except ChildProcessError:
            return False


def _remove(folder: str) -> None:
    """Removes the folder, and the shared memory that it names: killed processes leave both behind."""
    import shutil

    names: list[str] = []
    with contextlib.suppress(OSError), open(os.path.join(folder, SHARED_MEMORY), encoding="utf-8") as file:
        names = file.read().splitlines()
    for name in names:
        if name and "/" not in name:
            with contextlib.suppress(OSError):
                os.unlink(f"/dev/shm/{name}")
    shutil.rmtree(folder, ignore_errors=True)


def _children() -> list[int]:
    """The pids of the children; an empty list where there is no ``/proc``."""
    own = os.getpid()
    found = []
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                    if int(file.read().rpartition(b")")[2].split()[1]) == own:
                        found.append(int(name))
    return found


def _prctl(option: int, value: int) -> None:
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
    """Ends this process as the worker has ended, so that the server gets the worker's status."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump of the worker is enough
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))
