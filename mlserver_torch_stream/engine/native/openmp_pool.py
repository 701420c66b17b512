"""Finds the pool of threads that torch's own operators run on, so that the kernels can run there too.

Threads of libgomp spin for a while between the operators of a forward: a pool of our own would fight with them for the
cores. Knows nothing of kernels.
"""

from __future__ import annotations

import ctypes
import threading

import torch


def torch_pool() -> int | None:
    """Returns the address of torch's ``GOMP_parallel``; None where torch has no OpenMP with that function.

    torch's libraries find the function by the global scope of symbols, and so does this: the first OpenMP of the
    process has it, an LLVM or Intel one too. Whether torch's number of threads is that library's is then tried.
    """
    try:
        process = ctypes.CDLL(None)
        address = ctypes.cast(process.GOMP_parallel, ctypes.c_void_p).value
        set_threads = process.omp_set_num_threads
    except (OSError, AttributeError, TypeError):  # no such function; Windows has no global scope
        return None
    return address if _torch_follows(set_threads) else None


def _torch_follows(set_threads: ctypes._NamedFuncPointer) -> bool:
    """Returns whether a number of threads that is set in the library is torch's.

    Each thread has its own number, so a new thread that sets it changes no other thread's.
    """
    seen: list[bool] = []

    def attempt() -> None:
        other = torch.get_num_threads() + 1
        set_threads(other)
        seen.append(torch.get_num_threads() == other)

    thread = threading.Thread(target=attempt, name="openmp-pool")
    thread.start()
    thread.join()
    return seen == [True]
