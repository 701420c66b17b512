"""Finds a tiny model's way and the bytes of its cache, until the check at load does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.batch import Batch, BatchSequence
from mlserver_torch_stream.engine.forward.model_forward import ModelForward, Way
from mlserver_torch_stream.engine.kv_cache.cache_spec import CacheSpec
from mlserver_torch_stream.engine.kv_cache.layout import CacheLayout
from mlserver_torch_stream.engine.kv_cache.paged_cache import PagedCache


@dataclass(frozen=True)
class Measured:
    way: Way
    spec: CacheSpec
    chunked: bool = True
    problem: str | None = None


def check_batching(model: PreTrainedModel) -> Measured:
    layout = CacheLayout(model.config)
    ids = [(7 * i + 3) % 250 for i in range(14)]
    with torch.inference_mode():
        want = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        for way in list(Way)[layout.has_states :]:
            try:
                cache = PagedCache(layout, 4, [8] * len(layout.spec(4).groups), 2)
                forward = ModelForward(model, way)
                tables = tuple(list(range(8)) for _ in cache.groups)
                for start, stop in ((0, 6), (6, 13), (13, 14)):
                    got = forward(Batch((BatchSequence(ids[start:stop], start, tables, 1, 0),)), cache)
                if torch.allclose(got[0].float(), want.float(), atol=1e-3):
                    return Measured(way, cache.spec)
            except Exception:
                continue
    raise AssertionError("no way")
