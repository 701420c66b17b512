"""Captures the decode steps of a split model on all ranks at once: all ranks replay the same steps, or none does.

The collectives of a step are in its graphs. NCCL asks that all ranks capture the same collectives, and replay the same
graphs in the same order: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/cudagraph.html. A capture that
one rank alone breaks off inside a forward leaves the ranks at different collectives, and they cannot go on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mlserver_torch_stream.engine.attention.cuda_choice import copies_keys
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.cuda_graphs.graph_capture import GraphCapture
from mlserver_torch_stream.engine.cuda_graphs.graph_forward import GraphForward
from mlserver_torch_stream.engine.cuda_graphs.verify_graphs import table_widths, verified
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.tensor_parallel.rank_group import RankGroup


def capture_together(
    forward: ModelForward,
    cache: PagedCache,
    max_sequences: int,
    longest: int,
    group: RankGroup,
    capture_on: Callable[[str], GraphCapture | None],
) -> GraphForward | None:
    """Returns this rank's verified graphs, or None on every rank. All ranks call it at the same time.

    The arguments are those of ``take_graphs``. Raises RuntimeError if the ranks cannot go on.
    """
    capture = capture_on(forward.device.type)
    if not group.smallest(capture is not None):
        return None
    assert capture is not None
    # Ranks may attend in different ways, and must have captured the same widths.
    narrow = not group.smallest(not copies_keys(forward.attention))
    widths = table_widths(-(-longest // cache.page_size), narrow)
    graphs = verified(forward, cache, capture, max_sequences, widths, all_or_none=group.all_or_none)
    if not group.in_step():
        raise RuntimeError("a rank has left a forward that the other ranks go on with")
    if graphs is None:
        torch.cuda.empty_cache()  # otherwise the memory of its pools counts as used
    else:
        graphs.before_replay = group.count_replay
        group.before_leaving(graphs.release)
    return graphs
