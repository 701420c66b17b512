"""``mlserver-torch-stream rank FOLDER``: one process of a server that a launcher starts several times.

Rank 0 is ``mlserver start FOLDER``; the others follow it. Which one this is, a launcher such as torchrun says by RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Knows no model: the others are told by rank 0 what to load.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        print(f"error: {', '.join(missing)} not set: start this with torchrun, or set them", file=sys.stderr)
        return 2
    if os.environ["RANK"] != "0":
        from mlserver_torch_stream.engine.ranks.follower import follow
        from mlserver_torch_stream.engine.ranks.forming import find_launched

        return follow(lambda: find_launched(os.environ))
    from mlserver.cli import main as mlserver

    sys.argv = ["mlserver", "start", arguments.folder]
    mlserver()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlserver-torch-stream rank",
        description="One rank of a tensor-parallel server, as torchrun starts it: "
        "torchrun --nproc-per-node N -m mlserver_torch_stream.cli.rank FOLDER",
    )
    parser.add_argument("folder", nargs="?", default=".", help="what rank 0 starts (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
