"""What the server starts: the supervisor, and below it the worker.

Knows nothing of handlers. The supervisor is there before anything else is imported, so it stays small.
"""

from __future__ import annotations

from mlserver_torch_stream.torchserve.worker.subreaper import supervise


def start(descriptor: int) -> None:
    supervise(descriptor)
    from mlserver_torch_stream.torchserve.worker.main import main

    main(descriptor)
