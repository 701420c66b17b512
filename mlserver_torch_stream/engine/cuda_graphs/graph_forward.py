"""Replays captured decode steps as a ``Forward``; all other batches run the model's own forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from mlserver_torch_stream.engine.batch import Batch, BatchSequence
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.cuda_graphs.captured_step import CapturedStep
from mlserver_torch_stream.engine.cuda_graphs.graph_capture import DryRun, GraphCapture
from mlserver_torch_stream.engine.cuda_graphs.step_shape import StepShape
from mlserver_torch_stream.engine.cuda_graphs.trace import capture_step
from mlserver_torch_stream.engine.devices import from_host
from mlserver_torch_stream.engine.forward.interface import Logits
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.forward.model_step import Way
from mlserver_torch_stream.engine.pipeline.stages import Pipeline

AllOrNone = Callable[[], AbstractContextManager[object]]
"""Returns a context for work that all ranks of a split model do at once. If it raises on one, it raises on all."""


class CannotCapture(Exception):
    """The steps of this model cannot be captured."""


class GraphForward:
    """Replays batches of one new token for each of up to ``max_sequences`` sequences, over the pages of one cache.

    Steps are captured for 1, 2, 4, … sequences. A batch takes the smallest step that holds it; the other rows write to
    spare pages. One call runs at a time, or with a ``pipeline`` one in each of its stages.
    """

    def __init__(
        self,
        forward: ModelForward,
        cache: PagedCache,
        capture: GraphCapture,
        max_sequences: int,
        widths: Sequence[int],
        pipeline: Pipeline | None = None,
        all_or_none: AllOrNone = nullcontext,
    ) -> None:
        """``widths``: numbers of pages for whose block tables steps are captured, in ascending order.

        ``all_or_none``: ranks capture together. Raises CannotCapture, or the errors of the model and the device.
        """
        with all_or_none():
            _check_capturable(forward, cache)
            spares = tuple(cache.layers[group.layers[0]].spare for group in cache.groups)
            _touch(forward, cache, spares)
        self.forward = forward
        self.cache = cache
        self.before_replay: Callable[[], None] = lambda: None
        sizes = [1 << power for power in range((max_sequences - 1).bit_length())]
        shapes = [
            StepShape(rows, width, cache.page_size, spares) for rows in (*sizes, max_sequences) for width in widths
        ]
        steps: list[CapturedStep] = []
        # The largest first: the smaller steps fit into its memory in the pool.
        for shape in reversed(shapes):
            with all_or_none():
                capture_step(forward, cache, DryRun(), shape, pipeline)  # kernels load and tune at their first call
                steps.insert(0, capture_step(forward, cache, capture, shape, pipeline))
        self._steps = steps

    @property
    def shapes(self) -> list[StepShape]:
        """What is captured, in ascending order."""
        return [step.shape for step in self._steps]

    @property
    def max_sequences(self) -> int:
        return self._steps[-1].shape.rows

    def release(self) -> None:
        """Gives the captured steps up. From now on the plain forward runs."""
        self._steps = []

    def __call__(self, batch: Batch, cache: PagedCache) -> Logits:
        step = next((step for step in self._steps if step.shape.holds(batch)), None)
        if step is None or cache is not self.cache:
            return self.forward(batch, cache)
        cache.prepare(batch)
        self.before_replay()
        logits = step.run(batch)
        wanted = batch.wanted_rows
        return Logits(logits if len(wanted) == len(logits) else logits[from_host(wanted, logits.device, torch.long)])


def _check_capturable(forward: ModelForward, cache: PagedCache) -> None:
    """Raises CannotCapture."""
    if forward.way is not Way.PACKED:
        raise CannotCapture(f"the model takes its batches as {forward.way.value}")
    if forward.has_latents:
        raise CannotCapture("its cache holds latents, and Python looks up the pages that a step expands")
    if cache.states is not None:
        raise CannotCapture("some of its layers keep states, whose addresses a graph would hold")


def _touch(forward: ModelForward, cache: PagedCache, spares: Sequence[int]) -> None:
    """Runs a token on the spare pages, so that all pools are there and each layer's attention is chosen."""
    forward(Batch((BatchSequence((0,), 0, tuple((spare,) for spare in spares)),)), cache)
