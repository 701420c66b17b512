"""Finds TCP ports that no process listens on.

A port that is free now may be taken before its user binds it.
"""

from __future__ import annotations

import socket
from collections.abc import Collection


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen on the port of this host now."""
    with _probe(host) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_port(host: str, taken: Collection[int] = ()) -> int:
    """Returns a free port that the system chooses and that is not in ``taken``."""
    while True:
        with _probe(host) as probe:
            probe.bind((host, 0))
            port = int(probe.getsockname()[1])
        if port not in taken:
            return port


def _probe(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
