"""Runs a rank other than rank 0: loads its part of the model, then repeats the operations of rank 0 until the stop.

Knows nothing of requests, sampling or text; it sends nothing.
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
from mlserver_torch_stream.engine.tensor_parallel.rank_group import RankGroup
from mlserver_torch_stream.engine.tensor_parallel.shard import load_shard, receive_settings
from mlserver_torch_stream.errors import LoadFailed

logger = logging.getLogger(__name__)


def follow(find: Callable[[], RankGroup]) -> int:
    """Joins the group that ``find`` returns and follows rank 0. Returns the exit status: 0 after rank 0's stop."""
    logging.basicConfig(format="%(asctime)s [rank] %(levelname)s - %(message)s")
    transformers_logging.disable_progress_bar()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        group = find()
        # From here on rank 0 ends this rank: a signal to all ranks at once must not end the streams of rank 0.
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        _serve(group)
        group.leave()
        return 0
    except (LoadFailed, RuntimeError) as error:
        logger.error("rank %s ends: %s", os.environ.get("RANK"), error)
        return 1


def _serve(group: RankGroup) -> None:
    resolved = receive_settings(group)
    set_threads(resolved.settings, read_host())
    caches = FollowerCaches(load_shard(resolved, group).weights.model)
    with torch.inference_mode():
        while True:
            for operation, *arguments in group.receive_operations():
                if operation == "stop":
                    return
                if operation == "pulse":
                    group.pulse()
                else:
                    caches.run(operation, *arguments)


class FollowerCaches:
    """Holds this rank's part of each of rank 0's caches, by the cache's name, and runs operations on them."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._layout = CacheLayout(model.config)
        self._forward = ModelForward(model)
        self._caches: dict[int, RowCache] = {}

    def run(self, operation: str, name: int, *arguments: Any) -> None:
        """Repeats an operation that ``mirrored_cache`` has recorded on rank 0."""
        caches = self._caches
        if operation == "cache":
            caches[name] = self._layout.cache(*arguments)
        elif operation == "drop":
            del caches[name]
        elif operation == "forward":
            self._forward(arguments[0], caches[name])
        elif operation == "join":
            caches[name].join(caches[arguments[0]], arguments[1])
        elif operation == "leave":
            caches[name].leave(set(arguments[0]))
        elif operation in ("extract", "head"):
            caches[arguments[0]] = getattr(caches[name], operation)(*arguments[1:])
        elif operation in ("begin_row", "resize", "clear_row"):
            getattr(caches[name], operation)(*arguments)
        else:
            raise RuntimeError(f"unknown operation {operation!r}: the ranks run different versions")
