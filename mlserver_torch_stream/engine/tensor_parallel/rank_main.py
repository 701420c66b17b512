"""``python -m …tensor_parallel.rank_main RANK SIZE PORT PARENT``: a rank that rank 0 has started on its own machine.

Knows nothing but where rank 0 is; what to load it is told there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mlserver_torch_stream.engine.tensor_parallel.parent_death import die_with


def main(argv: Sequence[str]) -> int:
    rank, size, port, parent = (int(argument) for argument in argv)
    die_with(parent)  # before the seconds that torch takes
    from mlserver_torch_stream.engine.tensor_parallel.follower import follow
    from mlserver_torch_stream.engine.tensor_parallel.rendezvous import find_local

    return follow(lambda: find_local(rank, size, port))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
