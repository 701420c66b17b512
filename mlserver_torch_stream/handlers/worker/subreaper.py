"""The process between the server and a worker: when either of them ends, it kills all processes of the worker.

On Linux it becomes the parent of every orphaned descendant, even in another session, and so finds all of them. On other
systems it kills the worker's process group only.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # PR_… in linux/prctl.h
_TERMINATING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


_SHARED = "/dev/shm/"
_OPENMP = "__KMP_REGISTERED_LIB_"
SHARED_MEMORY = "shared-memory"  # the file in the worker's folder that names its shared memory


def supervise(descriptor: int, folder: str | None = None) -> None:
    """Forks: the child returns and becomes the worker, and this process supervises it and never returns.

    ``descriptor`` is the worker's end of its connection, which hangs up when the server closes its end or is killed.
    ``folder`` belongs to the worker. At the end it is removed, and with it the shared memory of the worker's processes:
    the memory that they map when they are killed, and the memory that the file ``shared-memory`` in the folder names.
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
    if os.getppid() != supervisor:  # the parent ended before prctl was called
        os._exit(1)


def _wake(number: int, frame: object) -> None:
    """A signal handler that does nothing; Python writes the signal's number into the wake-up pipe."""


class _Supervisor:
    def __init__(self, worker: int, descriptor: int, signals: int, folder: str | None = None) -> None:
        self._worker = worker
        self._descriptor = descriptor
        self._signals = signals
        self._folder = folder
        self._status: int | None = None  # the worker's exit status, once it has ended

    def run(self) -> None:
        self._wait()
        shared = [] if self._folder is None else shared_memory(os.getpid())
        with contextlib.suppress(OSError):
            os.killpg(self._worker, signal.SIGKILL)
        if self._status is None:
            os.kill(self._worker, signal.SIGKILL)  # the worker may not lead its own process group yet
        os.close(self._descriptor)  # now the server sees the end, however long the rest takes
        self._end_children()
        if self._folder is not None:
            _remove(self._folder, shared)
        _end_like(0 if self._status is None else self._status)

    def _wait(self) -> None:
        """Waits until the worker has ended, the server hangs up, or a signal terminates this process."""
        poll = select.poll()
        poll.register(self._descriptor, 0)  # 0: only a hang-up is reported; the worker reads the messages
        poll.register(self._signals, select.POLLIN)
        while self._status is None:
            for descriptor, _ in poll.poll():
                if descriptor == self._descriptor:
                    return
                if set(os.read(self._signals, 1024)) & set(_TERMINATING):
                    return
            self._reap(os.WNOHANG)

    def _end_children(self) -> None:
        """Kills children until there are none, because the children of a killed process become children of this one."""
        more = True
        while more:
            for pid in _children():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            more = self._reap(0) and self._reap(os.WNOHANG)

    def _reap(self, options: int) -> bool:
        """Waits for one child if ``options`` is 0, else reaps all that have ended.

        Returns False if no child is left.
        """
        try:
            while True:
                pid, status = os.waitpid(-1, options)
                if pid == self._worker:
                    self._status = status
                if pid == 0 or options == 0:
                    return True
        except ChildProcessError:
            return False


def _remove(folder: str, shared: list[str]) -> None:
    """Removes the folder, and the shared memory that its file or ``shared`` names; killed processes leave both."""
    import shutil

    with contextlib.suppress(OSError), open(os.path.join(folder, SHARED_MEMORY), encoding="utf-8") as file:
        shared = shared + file.read().splitlines()
    for name in shared:
        if name and "/" not in name:
            with contextlib.suppress(OSError):
                os.unlink(f"/dev/shm/{name}")
    shutil.rmtree(folder, ignore_errors=True)


def shared_memory(root: int) -> list[str]:
    """Returns the names in ``/dev/shm`` that ``root`` or a descendant of it maps, or has registered by its pid."""
    parents = _parents()
    below = {root}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    inodes: set[int] = set()  # inodes, since a semaphore is renamed after it is mapped
    for pid in below:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            inodes.update(int(line.split()[4]) for line in file if _SHARED in line)
    names = []
    with contextlib.suppress(OSError):
        for name in os.listdir(_SHARED):
            with contextlib.suppress(OSError):
                if os.stat(_SHARED + name).st_ino in inodes or _pid_of_openmp(name) in below:
                    names.append(name)
    return sorted(names)


def _pid_of_openmp(name: str) -> int:
    """Returns the pid in a name that Intel's OpenMP registers in ``/dev/shm``; 0 for other names."""
    pid = name.partition(_OPENMP)[2].partition("_")[0]
    return int(pid) if pid.isdigit() else 0


def _children() -> list[int]:
    """Returns the pids of this process's children; an empty list if the system has no ``/proc``."""
    own = os.getpid()
    return [pid for pid, parent in _parents().items() if parent == own]


def _parents() -> dict[int, int]:
    """Returns each process's parent, pid by pid; an empty dict if the system has no ``/proc``."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                    found[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
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
    print(f"prctl({option}) is not available: processes may outlive the worker that has started them", flush=True)


def _end_like(status: int) -> None:
    """Ends this process with the worker's status or signal, which the server then sees."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker's core dump is enough
        with contextlib.suppress(OSError):  # SIGKILL's handler cannot be reset
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))
