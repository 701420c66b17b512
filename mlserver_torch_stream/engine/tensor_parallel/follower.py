"""Runs a rank other than rank 0: loads its part of the model, then repeats the operations of rank 0 until the stop."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from functools import partial

import torch
from transformers.utils import logging as transformers_logging

from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.cuda_graphs.graph_capture import capture_on
from mlserver_torch_stream.engine.devices import check_devices
from mlserver_torch_stream.engine.forward.interface import Forward
from mlserver_torch_stream.engine.loading.loader import set_threads
from mlserver_torch_stream.engine.machine import read_host
from mlserver_torch_stream.engine.process_resources import PROCESS
from mlserver_torch_stream.engine.tensor_parallel.operations import Operation, batch_of, decode_operations
from mlserver_torch_stream.engine.tensor_parallel.rank_graphs import capture_together
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
    shard = load_shard(resolved, group)
    forward = shard.forward
    capture = partial(capture_together, forward, group=group, capture_on=PROCESS.capture_on or capture_on)
    caches = FollowerCaches(CacheLayout(shard.weights.model.config), forward, group.all_raised, capture)
    with torch.inference_mode():
        while True:
            for operation, numbers in decode_operations(group.receive_operations()):
                if operation is Operation.STOP:
                    return
                if operation is Operation.PULSE:
                    check_devices({forward.device})  # NCCL watches no collectives of CUDA graphs: a device may hang
                    group.pulse()
                else:
                    caches.run(operation, *numbers)


class FollowerCaches:
    """Holds this rank's part of each of rank 0's caches, by the cache's name, and runs operations on them.

    ``capture`` is ``capture_together`` for a cache, the most sequences and the longest sequence.
    """

    def __init__(
        self,
        layout: CacheLayout,
        forward: Forward,
        all_raised: Callable[[], bool],
        capture: Callable[[PagedCache, int, int], Forward | None],
    ) -> None:
        self._layout = layout
        self._forward = forward
        self._all_raised = all_raised
        self._capture = capture
        self._caches: dict[int, PagedCache] = {}
        self._captured: dict[int, Forward] = {}  # by the name of their cache

    def run(self, operation: Operation, name: int, *numbers: int) -> None:
        """Runs an operation of rank 0. Raises a forward's error unless all ranks have it."""
        if operation is Operation.CACHE:
            page_size, state_slots, *pages = numbers
            self._caches[name] = PagedCache(self._layout, page_size, pages, state_slots)
        elif operation is Operation.DROP:
            del self._caches[name]
            self._captured.pop(name, None)
        elif operation is Operation.CAPTURE:
            if (captured := self._capture(self._caches[name], *numbers)) is not None:
                self._captured[name] = captured
        elif operation is Operation.FORWARD:
            try:
                self._captured.get(name, self._forward)(batch_of(numbers), self._caches[name])
            except Exception:
                if not self._all_raised():
                    raise
