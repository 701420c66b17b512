"""Replays captured decode steps as a ``Forward``; all other calls run transformers' forward.

Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.cuda_graphs.attention_cuts import CannotCut
from mlserver_torch_stream.engine.cuda_graphs.captured_step import CapturedStep, Part
from mlserver_torch_stream.engine.cuda_graphs.graph_capture import DryRun, GraphCapture
from mlserver_torch_stream.engine.cuda_graphs.trace import capture_step
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.kv_cache.row_cache import CacheLayout, RowCache
from mlserver_torch_stream.engine.pipeline.stage_locks import Pipeline


class GraphForward:
    """Replays calls with one token for each of up to ``max_batch_size`` rows, of one cache or several.

    Steps are captured for 1, 2, 4, … rows. A batch takes the smallest step that holds it; unused rows are ignored.
    One call runs at a time, or with a ``pipeline`` one in each of its stages.
    """

    def __init__(
        self, model: PreTrainedModel, capture: GraphCapture, max_batch_size: int, pipeline: Pipeline | None = None
    ) -> None:
        """Raises CannotCut, or the errors of the model and the device."""
        self._model_forward = ModelForward(model)
        layout = CacheLayout(model.config)
        if layout.has_states:
            raise CannotCut("some of its layers keep states, whose addresses a graph would hold")
        if _sees_chunks(model):
            raise CannotCut("some of its layers see the tokens of a chunk, which no cache layer tells from a window")
        windows = layout.windows
        sizes = [1 << power for power in range((max_batch_size - 1).bit_length() + 1)]
        self._steps: list[CapturedStep] = []
        # The largest first: the others fit into its memory in the pool.
        for rows in reversed(sizes):
            capture_step(model, DryRun(), rows, windows, pipeline)  # kernels load and tune at their first call
            self._steps.insert(0, capture_step(model, capture, rows, windows, pipeline))

    @property
    def batch_sizes(self) -> list[int]:
        """The numbers of rows for which a step is captured, in ascending order."""
        return [step.rows for step in self._steps]

    @property
    def max_batch_size(self) -> int:
        return self._steps[-1].rows

    def __call__(self, tokens: Sequence[Sequence[int]], cache: RowCache) -> torch.Tensor:
        if len(tokens[0]) != 1 or len(tokens) > self.max_batch_size:
            return self._model_forward(tokens, cache)
        return self.together([(tokens, cache)])[0]

    def together(self, parts: Sequence[Part]) -> list[torch.Tensor]:
        """Raises ValueError for more rows than ``max_batch_size``."""
        rows = [len(tokens) for tokens, _ in parts]
        step = next((step for step in self._steps if step.rows >= sum(rows)), None)
        if step is None:
            raise ValueError(f"{sum(rows)} rows are more than the {self.max_batch_size} that were captured")
        try:
            logits = step.run(parts)
        except BaseException:
            for _, cache in parts:
                cache.rollback()
            raise
        for _, cache in parts:
            cache.commit(1)
        return list(logits.split(rows))


def _sees_chunks(model: PreTrainedModel) -> bool:
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ()
    return "chunked_attention" in kinds or getattr(config, "attention_chunk_size", None) is not None
