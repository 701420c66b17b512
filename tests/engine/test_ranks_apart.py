"""Ranks go together or not at all: what one of them has against it, rank 0 says, and nobody is left behind."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from mlserver_torch_stream.engine.api import PromptJob
from mlserver_torch_stream.engine.build import build_engine
from mlserver_torch_stream.engine.ranks import children
from mlserver_torch_stream.engine.shares import Shares
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import parse_settings
from tests.engine.tiny import Watch, collect, greedy, prompt_of, run, until, watched


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("refuses", "^rank 1: no room for xxxxx$"),
        ("dies", "the ranks lost each other while loading: rank 1 ended with status 7"),
    ],
)
def test_what_one_rank_cannot_do_none_does(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, what: str, message: str
) -> None:
    """The template makes the message longer than a frame of the channel."""
    monkeypatch.setattr(children, "_MODULE", "tests.engine.unwilling")
    monkeypatch.setenv("UNWILLING", what)
    settings = {"tensor_parallel_size": 2, "chat_template": "x" * 9000 + "{{ messages }}"}
    with pytest.raises(LoadFailed, match=message):
        build_engine(parse_settings(str(tiny_model), settings, environ={}), shares=Shares())
    assert not torch.distributed.is_initialized()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("rank")] == []


@pytest.mark.slow
def test_an_error_that_one_rank_alone_meets_ends_all_and_one_before_it_is_told_ends_its_request(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths: list[BaseException] = []
    monkeypatch.setenv("MLSERVER_TORCH_STREAM_FAULTS", "prefill:2:raise")
    resolved = parse_settings(str(tiny_model), {"tensor_parallel_size": 2, "threads": 1}, environ={})
    built = build_engine(resolved, on_death=deaths.append, shares=Shares())

    async def scenario(watch: Watch) -> None:
        first = (await collect(built.engine, [PromptJob(prompt_of(5), greedy(5))]))[0]
        second = (await collect(built.engine, [PromptJob(prompt_of(5, 1), greedy(5))]))[0]
        third = (await collect(built.engine, [PromptJob(prompt_of(5, 2), greedy(5))]))[0]
        assert first.error is None and third.error is None
        assert second.error is not None and "a fault was asked for" in str(second.error)
        watch.fail = lambda ids: RuntimeError("only here")
        last = (await collect(built.engine, [PromptJob(prompt_of(5, 3), greedy(5))]))[0]
        assert "only here" in str(last.error)
        await until(lambda: bool(deaths), "word of the death")
        assert not built.engine.alive

    with watched(built.lease.value.weights.value.weights.model) as watch:
        run(scenario(watch))
    if built.give_back():
        built.shutdown()
    assert not torch.distributed.is_initialized()
