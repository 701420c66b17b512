"""``mlserver-torch-stream rank FOLDER``: runs one rank of a server, in one of the processes that a launcher starts.

Rank 0 runs ``mlserver start FOLDER``; the other ranks follow it. A launcher such as torchrun sets RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlserver import ModelSettings

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Seconds for the other ranks to start and learn that there is no model. A start takes 5 s, longer on a busy machine.
_PATIENCE = 60.0
_ENDED = "rank 0 ended before it had loaded a model: its log says why"


def main(argv: Sequence[str]) -> int:
    """Runs one rank of a server that torchrun starts: rank 0 serves, and the other ranks follow it. Returns the exit
    status.
    """
    arguments = _parser().parse_args(argv)
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        print(f"error: {', '.join(missing)} not set: start this with torchrun, or set them", file=sys.stderr)
        return 2
    if os.environ["RANK"] != "0":
        from mlserver_torch_stream.engine.ranks import follow
        from mlserver_torch_stream.engine.tensor_parallel.rendezvous import find_launched

        return follow(lambda: find_launched(os.environ))
    if int(os.environ["WORLD_SIZE"]) == 1:
        return _serve(arguments.folder)
    return _lead(arguments.folder)


def _lead(folder: str) -> int:
    """Runs the server. If the server ends before the other ranks have a model, tells them that there will be none."""
    from mlserver.cli.serve import load_settings

    from mlserver_torch_stream.engine.tensor_parallel.validate import check_launched
    from mlserver_torch_stream.errors import LoadFailed

    reason, status, models = _ENDED, 1, None
    try:
        models = asyncio.run(load_settings(folder))[1]
        check_launched(_sizes(models), int(os.environ["WORLD_SIZE"]))
        status = _serve(folder)
    except LoadFailed as error:
        reason = str(error)
        print(f"error: {reason}", file=sys.stderr, flush=True)
    finally:
        from mlserver_torch_stream.engine.tensor_parallel.rendezvous import dismiss
        from mlserver_torch_stream.server.state import server_state

        # MLServer returns 0 after a signal and after a failed load. A signal, which all ranks get, is not a failure.
        orderly = status == 0 and (server_state().lifecycle.draining or models == [])
        if dismiss(os.environ, reason, 1.0 if orderly else _PATIENCE) and not orderly:
            status = 1
    return status


def _serve(folder: str) -> int:
    from mlserver.cli import main as mlserver

    sys.argv = ["mlserver", "start", folder]
    try:
        mlserver()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1 if end.code else 0
    return 0


def _sizes(models: Sequence[ModelSettings]) -> dict[str, int]:
    """Returns for each model the number of ranks that it is split over. Models with wrong settings are left out."""
    from mlserver_torch_stream.errors import SettingsError
    from mlserver_torch_stream.loading import resolve
    from mlserver_torch_stream.server.host import source_of

    sizes = {}
    for model in models:
        with contextlib.suppress(SettingsError):
            sizes[model.name] = resolve(model, source_of(model)).settings.tensor_parallel_size
    return sizes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlserver-torch-stream rank",
        description="Run one rank of a tensor-parallel server. torchrun starts this command: "
        "torchrun --nproc-per-node N -m mlserver_torch_stream.cli.rank FOLDER",
    )
    parser.add_argument(
        "folder", nargs="?", default=".", help="the folder of models that rank 0 serves (default: %(default)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
