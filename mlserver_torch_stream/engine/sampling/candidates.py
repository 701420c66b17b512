"""Draws a token from each row's distribution after its filters: temperature, then top-k, top-p, min-p and typical-p.

Only the largest logits of a row are sorted. In the rare case that these are not enough for a row, its token is drawn
again among more of its logits, and finally among all. The numbers of sorted logits are fixed, so the result of a row
does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from transformers.generation.logits_process import TypicalLogitsWarper

from mlserver_torch_stream.engine.devices import from_host
from mlserver_torch_stream.engine.sampling.row_sampler import FEW, RowSampler, gumbel

FAILED = -1  # no finite logit to choose from
# No token yet: the filters keep more than the candidates or, in a ``RowDraw``, rounding could change the token.
UNDECIDED = -2
_TAIL = -3  # an unfiltered row chose a token beyond the candidates

_WIDTHS = (FEW, 1024)  # FEW is one of them, so that a table of few allowed tokens gives the same token as the whole row
_TAIL_COUNTER = 1 << 62  # a noise counter that is not a token id


class RowDraw(Protocol):
    """Draws a token for each of ``rows``. ``logits`` are float32 on a CPU and are not changed.

    ``indices`` are the rows of ``logits`` to draw from. The result for a row is the token that ``draw`` returns, or
    ``UNDECIDED``.
    """

    def __call__(self, logits: torch.Tensor, indices: Sequence[int], rows: Sequence[RowSampler]) -> list[int]: ...


def draw(
    work: torch.Tensor, rows: Sequence[RowSampler], ids: torch.Tensor | None = None, row_draw: RowDraw | None = None
) -> list[int]:
    """Returns a column for each row, or ``FAILED``.

    ``work``, float32 [n, V], are the adjusted logits before the temperature. ``ids``, int64 [n, V], are the tokens that
    the columns stand for, if the columns are not the vocabulary. Each filter keeps the same set as in transformers,
    plus all values that are tied with the last kept value, so that the set depends only on the row. If the columns are
    the vocabulary, ``row_draw`` draws first. It is not called for rows that are ``drawn_unchanged``, because it has
    already drawn their tokens from the forward's logits.
    """
    vocab_size = work.shape[1]
    chosen = [UNDECIDED] * len(rows)
    if row_draw is not None and ids is None and (changed := [i for i, r in enumerate(rows) if not r.drawn_unchanged]):
        _store(chosen, changed, row_draw(work, changed, [rows[i] for i in changed]))
    for width in (*(w for w in _WIDTHS if w < vocab_size), vocab_size):
        _resolve(work, rows, chosen, width, ids)
    tail = [i for i, token_id in enumerate(chosen) if token_id == _TAIL]
    if tail:
        _store(chosen, tail, _draw_tail(work[from_host(tail, work.device)], [rows[i] for i in tail]).tolist())
    return chosen


def _resolve(
    work: torch.Tensor, rows: Sequence[RowSampler], chosen: list[int], width: int, ids: torch.Tensor | None
) -> None:
    """Draws tokens for rows that have none yet, if the ``width`` largest logits may suffice for them."""
    everything = width == work.shape[1]
    todo = [i for i, row in enumerate(rows) if chosen[i] == UNDECIDED and (everything or _may_fit(row, width))]
    if todo:
        if len(todo) < len(rows):
            index = from_host(todo, work.device)
            work, ids = work[index], None if ids is None else ids[index]
        _store(chosen, todo, _draw_among(work, [rows[i] for i in todo], width, ids).tolist())


def _may_fit(row: RowSampler, width: int) -> bool:
    if row.top_k:
        return row.top_k < width
    return row.typical_p >= 1.0 or row.top_p < 1.0 or row.min_p > 0.0


def _unfiltered(row: RowSampler) -> bool:
    return not row.top_k and row.top_p >= 1.0 and row.min_p <= 0.0 and row.typical_p >= 1.0


def _store(chosen: list[int], where: list[int], ids: list[int]) -> None:
    for i, token_id in zip(where, ids, strict=True):
        chosen[i] = token_id


def _draw_among(work: torch.Tensor, rows: Sequence[RowSampler], width: int, ids: torch.Tensor | None) -> torch.Tensor:
    """Draws among the ``width`` largest logits of each row. Returns columns or markers, int64 [n]."""
    values, columns = _largest(work, width)
    top = values[:, :1]
    temperature = _column(work, [row.temperature for row in rows])
    scaled = (values - top) / temperature
    weights = scaled.exp()
    rest = _rest(work, rows, columns, top, temperature)
    keep = scaled >= _floor(scaled, weights, rest, rows)
    partial = width < work.shape[1]
    open_ended = keep[:, -1] & (scaled[:, -1] > -torch.inf)
    _keep_typical(keep, scaled, rows)

    unfiltered = [partial and _unfiltered(row) for row in rows]
    free = from_host(unfiltered, work.device)
    if any(unfiltered):
        head = values > values[:, -1:]  # values equal to the last candidate belong to the tail
        keep = torch.where(free[:, None], head, keep)
        open_ended = open_ended & ~free
    # All tokens beyond the candidates compete as one token, which has the last column of ``noise``.
    counters = columns if ids is None else ids.gather(1, columns)
    tail = torch.full((len(rows), 1), _TAIL_COUNTER, device=work.device)
    noise = gumbel([row.noise_key for row in rows], torch.cat([counters, tail], dim=1))
    best, place = (scaled + noise[:, :-1]).masked_fill_(~keep, -torch.inf).max(dim=-1)
    drawn = columns.gather(1, place[:, None])[:, 0]
    if any(unfiltered):
        beyond = rest + (weights * ~keep).sum(dim=-1)
        drawn = torch.where(free & (beyond.log() + noise[:, -1] > best), _TAIL, drawn)
    if partial:
        drawn = torch.where(open_ended, UNDECIDED, drawn)
    return torch.where(top[:, 0].isfinite(), drawn, FAILED)


def _largest(work: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the ``width`` largest logits of each row, in descending order, and their columns, [n, width].

    On a CPU numpy does this, because its partition and sort are vectorised: for 1,024 logits in each of 16 rows of
    49,152, numpy takes 1.5 ms and torch 6.9 ms.
    """
    if width <= FEW or work.device.type != "cpu":
        values, columns = work.topk(width, dim=-1)
        return values, columns
    rows = work.numpy()
    largest = rows.argpartition(-width, axis=1)[:, -width:]  # a NaN counts as the largest, as for ``topk``
    order = np.take_along_axis(rows, largest, axis=1).argsort(axis=1)[:, ::-1]
    columns = torch.from_numpy(np.take_along_axis(largest, order, axis=1))
    return work.gather(1, columns), columns


def _column(like: torch.Tensor, values: list[float]) -> torch.Tensor:
    return from_host(values, like.device, torch.float32)[:, None]


def _rest(
    work: torch.Tensor, rows: Sequence[RowSampler], ids: torch.Tensor, top: torch.Tensor, temperature: torch.Tensor
) -> torch.Tensor:
    """Returns the total weight of the tokens that are not candidates, float32 [n], relative to the largest weight."""
    rest = torch.zeros(len(rows), dtype=torch.float32, device=work.device)
    needing = [i for i, row in enumerate(rows) if not row.top_k and (row.top_p < 1.0 or _unfiltered(row))]
    if not needing or ids.shape[1] == work.shape[1]:
        return rest
    where = from_host(needing, work.device)
    if len(needing) < len(rows):
        work, ids, top, temperature = work[where], ids[where], top[where], temperature[where]
    weights = work.sub(top).div_(temperature).exp_().scatter_(1, ids, 0.0)
    rest[where] = weights.sum(dim=-1)
    return rest


def _floor(scaled: torch.Tensor, weights: torch.Tensor, rest: torch.Tensor, rows: Sequence[RowSampler]) -> torch.Tensor:
    """Returns the smallest scaled logit that top-k, top-p and min-p keep, [n, 1]. ``scaled`` descends from 0."""
    floor = _column(scaled, [row.min_p for row in rows]).log_()
    if any(row.top_k for row in rows):
        last = from_host([row.top_k - 1 for row in rows], scaled.device)[:, None]
        kth = scaled.gather(1, last.clamp(0, scaled.shape[1] - 1))
        kth = kth.masked_fill(last < 0, -torch.inf)
        weights = weights * (scaled >= kth)
        floor = torch.maximum(floor, kth)
    if any(row.top_p < 1.0 for row in rows):
        top_p = _column(scaled, [row.top_p for row in rows])
        total = weights.sum(dim=-1, keepdim=True) + rest[:, None]
        before = weights.cumsum(dim=-1) - weights
        nucleus = ((before < top_p * total) & (weights > 0)).sum(dim=-1, keepdim=True)
        last_kept = scaled.gather(1, (nucleus - 1).clamp_(min=0))
        floor = torch.maximum(floor, last_kept.masked_fill_(top_p >= 1.0, -torch.inf))
    return floor


def _keep_typical(keep: torch.Tensor, scaled: torch.Tensor, rows: Sequence[RowSampler]) -> None:
    """Applies typical-p to ``keep``, in place, for the rows that use it."""
    for mass in {row.typical_p for row in rows if row.typical_p < 1.0}:
        where = from_host([i for i, row in enumerate(rows) if row.typical_p == mass], scaled.device)
        survivors = scaled[where].masked_fill(~keep[where], -torch.inf)
        keep[where] &= TypicalLogitsWarper(mass=mass)(None, survivors) > -torch.inf


def _draw_tail(work: torch.Tensor, rows: Sequence[RowSampler]) -> torch.Tensor:
    """Returns token ids, int64 [n], for unfiltered rows whose token is not among the candidates."""
    last = work.topk(FEW, dim=-1).values[:, -1:]
    temperature = _column(work, [row.temperature for row in rows])
    noise = gumbel([row.noise_key for row in rows], torch.arange(work.shape[1], device=work.device))
    scores = (work - last).div_(temperature).add_(noise)
    return scores.masked_fill_(work > last, -torch.inf).argmax(dim=-1)
