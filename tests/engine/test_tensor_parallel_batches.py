"""Batches on two ranks, this process and a child: the logits of one process, and an error that occurs on both."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.cache.pages import Batch, BatchSequence
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.loading.model_files import ModelFiles
from mlserver_torch_stream.engine.ranks import LaunchedModel, prepare_ranks
from mlserver_torch_stream.engine.tensor_parallel.leader import Operation, batch_numbers
from mlserver_torch_stream.engine.tensor_parallel.ranked_cache import FollowerCaches, RankedCache
from mlserver_torch_stream.settings import parse_settings
from tests.engine.tiny_models import prompt_of

PAGE = 4
NO_PAGE = 99
ONE, TWO = prompt_of(11), prompt_of(6, 1)
close = partial(torch.testing.assert_close, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def ranks(tiny_model: Path) -> Iterator[LaunchedModel]:
    settings = {"tensor_parallel_size": 2, "threads": 1, "dtype": "float32"}
    launched = prepare_ranks(ModelFiles(str(tiny_model), None), parse_settings(str(tiny_model), settings, environ={}))
    with torch.inference_mode():
        yield launched
    launched.leader.stop()
    assert not torch.distributed.is_initialized()


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    return model


def new_cache(ranks: LaunchedModel) -> RankedCache:
    layout = CacheLayout(ranks.shard.weights.model.config)
    return ranks.cache(layout, PAGE, [16] * len(layout.spec(PAGE).groups), 2)


def part(ids: tuple[int, ...], start: int, *table: int) -> BatchSequence:
    return BatchSequence(ids[start:], start, (table,))


def last_logits(model: PreTrainedModel, *sequences: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([model(torch.tensor([list(ids)])).logits[0, -1:] for ids in sequences])


@pytest.mark.slow
def test_a_step_of_unlike_sequences_has_the_logits_of_one_process(ranks: LaunchedModel, model: PreTrainedModel) -> None:
    cache = new_cache(ranks)
    first = ranks.forward(Batch((part(ONE[:7], 0, 5, 2), part(TWO, 0, 9, 0))), cache).tensor
    close(first, last_logits(model, ONE[:7], TWO))
    second = ranks.forward(Batch((part(ONE, 7, 5, 2, 7), part((*TWO, 3), 6, 9, 0))), cache).tensor
    close(second, last_logits(model, ONE, (*TWO, 3)))


@pytest.mark.slow
def test_pages_are_copied_on_every_rank(ranks: LaunchedModel, model: PreTrainedModel) -> None:
    """So it happens when the answers of a request with n > 1 diverge."""
    cache = new_cache(ranks)
    ranks.forward(Batch((part(TWO, 0, 0, 1),)), cache)
    answers = (*TWO, 8), (*TWO, 9)
    both = Batch((part(answers[0], 6, 0, 2), part(answers[1], 6, 0, 1)), copies=((0, 1, 2),))
    close(ranks.forward(both, cache).tensor, last_logits(model, *answers))


@pytest.mark.slow
def test_what_every_rank_fails_at_ends_none_and_can_be_tried_again(
    ranks: LaunchedModel, model: PreTrainedModel
) -> None:
    cache = new_cache(ranks)
    beyond = Batch((part(ONE, 0, 0, 1, 2), part(TWO, 0, 3)))  # six tokens need two pages
    for _ in range(2):
        with pytest.raises(AssertionError):
            ranks.forward(beyond, cache)
    close(ranks.forward(Batch((part(ONE, 0, 0, 1, 2),)), cache).tensor, last_logits(model, ONE))
    assert ranks.leader.lost is None


def test_a_follower_makes_runs_and_drops_caches(model: PreTrainedModel) -> None:
    follower = FollowerCaches(CacheLayout(model.config), ModelForward(model), lambda: False)
    forward = (Operation.FORWARD, 3, *batch_numbers(Batch((part(ONE, 0, 0, 1, 2),))))
    with torch.inference_mode():
        follower.run(Operation.CACHE, 3, PAGE, 2, 16)
        follower.run(*forward)
        with pytest.raises(IndexError):
            follower.run(Operation.FORWARD, 3, *batch_numbers(Batch((part(ONE[:1], 0, NO_PAGE),))))
        follower.run(Operation.DROP, 3)
        with pytest.raises(KeyError):
            follower.run(*forward)
