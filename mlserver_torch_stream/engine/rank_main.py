"""Runs a rank that rank 0 starts on its own machine: ``python -m …engine.rank_main RANK SIZE PORT PARENT``.

The process ends when its parent ends.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mlserver_torch_stream.engine.child_process import die_with


def main(argv: Sequence[str]) -> int:
    """Runs one rank until its leader stops it.

    ``argv`` has the rank, the number of ranks, the port, and the parent's process id. Returns the exit status.
    """
    rank, size, port, parent = (int(argument) for argument in argv)
    die_with(parent)  # before importing torch, which takes seconds
    from mlserver_torch_stream.engine.ranks import follow
    from mlserver_torch_stream.engine.tensor_parallel.rendezvous import find_local

    return follow(lambda: find_local(rank, size, port))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
