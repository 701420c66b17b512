"""The life of every rank but the first: load what rank 0 says, then do as it does until it says stop.

Knows nothing of requests, sampling or text: it has no way to send anything to anybody.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.kv_cache.row_cache import CacheLayout, RowCache
from mlserver_torch_stream.engine.loading.host_limits import read_host
from mlserver_torch_stream.engine.loading.loader import set_threads
from mlserver_torch_stream.engine.tensor_parallel.load_message import read_order
from mlserver_torch_stream.engine.tensor_parallel.rank_group import RankGroup
from mlserver_torch_stream.engine.tensor_parallel.shard import load_shard
from mlserver_torch_stream.errors import LoadFailed

logger = logging.getLogger(__name__)


def follow(find: Callable[[], RankGroup]) -> int:
    """Finds its group and follows; the process's exit status, 0 if rank 0 let it go."""
    logging.basicConfig(format="%(asctime)s [rank] %(levelname)s - %(message)s")
    transformers_logging.disable_progress_bar()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        group = find()
        # From here on rank 0 says when to go: a signal to all ranks at once must not cut off what it has promised.
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        _serve(group)
        group.leave()
        return 0
    except (LoadFailed, RuntimeError) as error:
        logger.error("rank %s ends: %s", os.environ.get("RANK"), error)
        return 1


def _serve(group: RankGroup) -> None:
    resolved = read_order(group.hear())
    set_threads(resolved.settings, read_host())
    parts = Parts(load_shard(resolved, group).weights.model)
    with torch.inference_mode():
        while True:
            for operation, *arguments in group.next_command():
                if operation == "stop":
                    return
                if operation == "pulse":
                    group.pulse()
                else:
                    parts.do(operation, arguments)


class Parts:
    """This rank's part of each of rank 0's caches, by its name, and what can be done with them."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._layout = CacheLayout(model.config)
        self._forward = ModelForward(model)
        self._caches: dict[int, RowCache] = {}

    def do(self, operation: str, arguments: list[Any]) -> None:
        """Repeats an operation that ``mirrored_cache`` has noted on rank 0."""
        name, *rest = arguments
        if operation == "cache":
            self._caches[name] = self._layout.cache(*rest)
            return
        if operation == "drop":
            del self._caches[name]
            return
        cache = self._caches[name]
        if operation == "forward":
            self._forward(rest[0], cache)
        elif operation == "join":
            cache.join(self._caches[rest[0]], rest[1])
        elif operation == "leave":
            cache.leave(set(rest[0]))
        elif operation in ("extract", "head"):
            self._caches[rest[0]] = getattr(cache, operation)(*rest[1:])
        elif operation in ("begin_row", "resize", "clear_row"):
            getattr(cache, operation)(*rest)
        else:
            raise RuntimeError(f"unknown operation {operation!r}: the ranks run different versions")
