"""Adjusts the logits of all rows of a step at once: the operations and copies to the device do not grow with the rows.

Knows nothing of parameters: a ``LogitAdjuster`` says what each row needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mlserver_torch_stream.engine.constraints.token_matcher import TokenMask
from mlserver_torch_stream.engine.devices import from_host, sent

_Ids = np.ndarray[Any, np.dtype[np.int64]]
_Floats = np.ndarray[Any, np.dtype[np.float32]]
NO_IDS: _Ids = np.zeros(0, dtype=np.int64)
NO_FLOATS: _Floats = np.zeros(0, dtype=np.float32)
NO_TOKEN = -1
FEW = 128  # tokens: a row that is allowed fewer is sampled from a table of them
_BITS = (np.arange(256)[:, None] >> np.arange(8)) & 1  # of each byte of a mask
_CEILINGS = np.where(_BITS, np.float32(np.inf), np.float32(-np.inf))


@dataclass(frozen=True, slots=True)
class RowEdits:
    """The changes of a row, in this order.

    ``added`` are the biases of ``bias_ids``. A positive logit of ``seen_ids`` is divided by ``repetition``, a negative
    one is multiplied by it; then ``subtracted`` is subtracted. With ``forced`` or ``allowed`` all other ids get -inf.
    """

    bias_ids: _Ids
    added: _Floats
    seen_ids: _Ids
    subtracted: _Floats
    repetition: float
    forced: Sequence[int]
    banned: Sequence[int]
    allowed: TokenMask | None = None


def few_allowed(edits: RowEdits | None, vocab_size: int) -> _Ids | None:
    """Returns the tokens that a row's mask allows, int64 [FEW], padded with ``NO_TOKEN``.

    None if the mask allows ``FEW`` tokens or more, or if the row has other changes. Of ``FEW`` tokens the last one
    would have noise of its own, while in a whole row it is the tail beyond the candidates (``candidates.py``).
    """
    if edits is None or edits.allowed is None or any(map(len, (edits.bias_ids, edits.seen_ids, edits.banned))):
        return None
    if np.count_nonzero(edits.allowed) >= FEW:
        return None
    nonzero = np.flatnonzero(edits.allowed)
    byte, bit = np.nonzero(_BITS[edits.allowed[nonzero]])
    known = 8 * nonzero[byte] + bit
    known = known[known < vocab_size]
    if len(known) >= FEW:
        return None
    ids = np.full(FEW, NO_TOKEN, dtype=np.int64)
    ids[: len(known)] = known
    return ids


def adjust_rows(work: torch.Tensor, rows: Sequence[int], edits: Sequence[RowEdits]) -> None:
    """Changes these rows of ``work`` (float32 [n, vocab_size], writable) in place."""
    if indices := _indices(work, rows, [each.bias_ids for each in edits]):
        work[indices] += _sent(work, np.concatenate([each.added for each in edits]))
    if indices := _indices(work, rows, [each.seen_ids for each in edits]):
        work[indices] = _penalised(work[indices], edits)
    if forced := [row for row, each in zip(rows, edits, strict=True) if each.forced]:
        work.index_fill_(0, from_host(forced, work.device), -torch.inf)
    _fill(work, rows, [each.forced for each in edits], 0.0)
    _exclude(work, {row: each.allowed for row, each in zip(rows, edits, strict=True) if each.allowed is not None})
    _fill(work, rows, [each.banned for each in edits], -torch.inf)


def _penalised(values: torch.Tensor, edits: Sequence[RowEdits]) -> torch.Tensor:
    counts = [len(each.seen_ids) for each in edits]
    repetition = np.repeat(np.array([each.repetition for each in edits], dtype=np.float32), counts)
    factors = _sent(values, np.stack([repetition, np.concatenate([each.subtracted for each in edits])]))
    return torch.where(values < 0, values * factors[0], values / factors[0]) - factors[1]


def _fill(work: torch.Tensor, rows: Sequence[int], ids: Sequence[Sequence[int]], value: float) -> None:
    if indices := _indices(work, rows, ids):
        work[indices] = torch.full((), value, device=work.device)


def _exclude(work: torch.Tensor, allowed: Mapping[int, TokenMask]) -> None:
    """Sets the logits of the tokens that these rows do not allow to -inf."""
    if not allowed:
        return
    width = work.shape[1]
    if work.device.type == "cpu":
        for row, mask in allowed.items():  # four times as fast as unpacked bits that say where -inf goes
            logits = work[row].numpy()
            np.minimum(logits, _CEILINGS.take(mask, axis=0).ravel()[:width], out=logits)
        return
    masks = _sent(work, np.stack(list(allowed.values())))
    bits = (masks[:, :, None] >> torch.arange(8, device=work.device, dtype=torch.uint8)) & 1
    indices = from_host(list(allowed), work.device)
    work[indices] = work[indices].masked_fill_(bits.flatten(1)[:, :width] == 0, -torch.inf)


def _indices(
    work: torch.Tensor, rows: Sequence[int], ids: Sequence[Sequence[int] | _Ids]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns the indices of all ids of all rows; None if there are none."""
    counts = [len(each) for each in ids]
    if not any(counts):
        return None
    pairs = np.stack([np.repeat(np.array(rows), counts), np.concatenate([np.asarray(each, np.int64) for each in ids])])
    first, second = _sent(work, pairs)
    return first, second


def _sent(like: torch.Tensor, array: np.ndarray[Any, Any]) -> torch.Tensor:
    return sent(torch.from_numpy(array), like.device)
