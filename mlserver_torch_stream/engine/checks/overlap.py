"""Checks at load that forwards that overlap on a device map compute the same logits as separate forwards.

By counting the operations that wait, the check also finds out whether a forward waits for its devices midway.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import transformers
from torch._C import DispatchKey
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.cache.pages import Batch, BatchSequence
from mlserver_torch_stream.engine.checks.harness import Check, accepted
from mlserver_torch_stream.engine.checks.logits import Comparison
from mlserver_torch_stream.engine.forward.interface import Forward
from mlserver_torch_stream.engine.pipeline.in_flight import InFlightForwards
from mlserver_torch_stream.engine.pipeline.stages import Pipeline, StagedForward, read_stages

logger = logging.getLogger(__name__)

_ROUNDS = 2
_PROMPT = 5
_STEPS = 2
_PAGE_SIZE = 16
# transformers tests once, right after the embedding, whether a mask hides anything.
_MAX_WAITS = 1


@dataclass(frozen=True)
class Overlap(Check[Pipeline]):
    """Checks that forwards in different stages of a pipeline compute the same logits as single forwards.

    ``forward`` is the model's own forward.
    """

    name: ClassVar[str] = "overlap"
    model: transformers.PreTrainedModel
    forward: Forward

    def problem(self, candidate: Pipeline) -> str | None:
        """Compares simultaneous forwards with the same forwards that run one after the other, in another cache."""
        count = _ROUNDS * candidate.depth
        alone = _Sequences(self.model, self.forward, count)
        overlapping = _Sequences(self.model, StagedForward(self.forward, candidate), count)
        expected = [alone.logits(number) for number in range(count)]
        in_flight: InFlightForwards[int, torch.Tensor] = InFlightForwards(count, candidate.threads, _PAGE_SIZE)
        comparison = Comparison()
        try:
            for number in range(count):
                whole = Batch((overlapping.part(number, 0, _PROMPT + number + _STEPS),))
                in_flight.launch(number, partial(overlapping.logits, number), whole)
            while in_flight:
                for number, future in in_flight.completed():
                    comparison.add(expected[number], future.result())
        finally:
            in_flight.close()
        by = comparison.difference
        return None if by is None else f"logits of overlapping forwards differ from those of single forwards by {by}"


def take_pipeline(model: transformers.PreTrainedModel, threads: int, forward: Forward) -> Pipeline | None:
    """Returns the pipeline; None if one device computes everything, or (with a warning) if forwards must not overlap.

    ``forward`` is the model's forward, with the form of batches that the check at load has found.
    """
    stages = read_stages(model)
    if len(stages) < 2:
        return None
    pipeline = partial(Pipeline, stages, threads, serial_python=not waits_midway(model, forward))
    otherwise = "the devices of the device map work one after another"
    return accepted("forwards that overlap", pipeline, Overlap(model, forward), otherwise).candidate


def waits_midway(model: transformers.PreTrainedModel, forward: Forward) -> bool:
    """Returns whether a decode step with different lengths waits for its devices midway; True if unknown."""
    try:
        sequences = _Sequences(model, forward, 2)
        for number in range(2):
            forward(Batch((sequences.part(number, 0, _PROMPT + number),)), sequences.cache)
        step = Batch(tuple(sequences.part(number, _PROMPT + number, 1) for number in range(2)))
        return count_waits(lambda: forward(step, sequences.cache)) > _MAX_WAITS
    except Exception as error:  # the answer is then True: at worst that is slower
        logger.info("cannot find out whether this model's forward waits for its devices: %s", error)
        return True


class _Sequences:
    """Sequences of different lengths over one cache; each has its own pages and slot."""

    def __init__(self, model: transformers.PreTrainedModel, forward: Forward, count: int) -> None:
        self._forward = forward
        self._vocabulary = int(model.get_input_embeddings().weight.shape[0])
        layout = CacheLayout(model.config)
        self._pages = -(-(_PROMPT + count - 1 + _STEPS) // _PAGE_SIZE)  # the number of pages of a sequence
        self._groups = len(layout.spec(_PAGE_SIZE).groups)
        self.cache = PagedCache(layout, _PAGE_SIZE, [count * self._pages] * self._groups, count)

    def part(self, number: int, start: int, count: int) -> BatchSequence:
        """Returns ``count`` tokens of a sequence from the position ``start`` on."""
        ids = [(7919 * (number + 1) + 31 * position) % self._vocabulary for position in range(start, start + count)]
        table = range(number * self._pages, (number + 1) * self._pages)
        pages = table[: -(-(start + count) // _PAGE_SIZE)]
        return BatchSequence(ids, start, (pages,) * self._groups, state_slot=number)

    def logits(self, number: int) -> torch.Tensor:
        """Returns the logits at the end of a prompt and of each token after it."""
        return torch.cat([self._forward(Batch((part,)), self.cache).tensor for part in self._parts(number)])

    def _parts(self, number: int) -> Iterator[BatchSequence]:
        yield self.part(number, 0, _PROMPT + number)
        for step in range(_STEPS):
            yield self.part(number, _PROMPT + number + step, 1)


_aten = torch.ops.aten
_WAITING = {
    _aten.item.default,
    _aten._local_scalar_dense.default,
    _aten.is_nonzero.default,
    _aten.nonzero.default,
    _aten.equal.default,
    _aten.masked_select.default,
    _aten._unique2.default,
    _aten.repeat_interleave.Tensor,
    _aten.bincount.default,
    _aten.allclose.default,
}

Saw = Callable[[Any, tuple[Any, ...], Any], None]
"""A callable that gets an operation, its arguments and its result."""


class _Operations(TorchDispatchMode):  # type: ignore[misc]
    """Reports the basic operations inside composite operations.

    Torch's inference mode reports only the composite ones.
    """

    def __init__(self, saw: Saw) -> None:
        super().__init__()
        self._saw = saw

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        parts = None if types else _parts(operation, args)  # tensors of other types have code of their own
        if parts is not None:
            with self:
                return parts(*args, **kwargs)
        result = operation(*args, **kwargs)
        self._saw(operation, args, result)
        return result


def _parts(operation: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """Returns the implementation of a composite operation in torch or a Python package; None for a basic operation."""
    keys = [DispatchKey.CompositeImplicitAutograd]
    if operation.namespace != "aten":
        device = next((each.device.type for each in tree_leaves(args) if isinstance(each, torch.Tensor)), "cpu")
        keys += [getattr(DispatchKey, device.upper(), DispatchKey.Undefined), DispatchKey.CompositeExplicitAutograd]
    for key in keys:
        if torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), key):
            return partial(operation._op_dk, key)
    return None


def count_waits(forward: Callable[[], object]) -> int:
    """Returns how often one call on this thread waits for a device."""
    seen: list[bool] = []
    with _Operations(lambda *operation: seen.append(is_wait(*operation))):
        forward()
    return sum(seen)


def is_wait(operation: Any, args: tuple[Any, ...], result: Any) -> bool:
    """Returns whether an operation, as a ``TorchDispatchMode`` sees it, waits for its device."""
    return (
        operation in _WAITING
        or _selects_by_mask(operation, args)
        or _leaves_device(args, result)
        or _waits_inside(operation, args)
    )


def _selects_by_mask(operation: Any, args: tuple[Any, ...]) -> bool:
    return operation is _aten.index.Tensor and any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )


def _waits_inside(operation: Any, args: tuple[Any, ...]) -> bool:
    """Returns whether a product of experts waits: if torch has no kernel for it, the host reads each expert's rows."""
    if operation.name() != "aten::_grouped_mm" or not args[0].is_cuda:
        return False
    return args[0].dtype != torch.bfloat16 or torch.cuda.get_device_capability(args[0].device)[0] not in (9, 10)


def _leaves_device(args: tuple[Any, ...], result: Any) -> bool:
    return "cpu" in _places(result) and bool(_places(args) - {"cpu"})


def _places(values: Any) -> set[str]:
    return {value.device.type for value in tree_leaves(values) if isinstance(value, torch.Tensor)}
