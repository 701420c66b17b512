"""If one rank cannot run, none does: rank 0 reports the reason, and no rank is left waiting."""

from __future__ import annotations

import gc
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from mlserver_torch_stream.engine import ranks
from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.build import build_engine
from mlserver_torch_stream.engine.cache.layout import CacheLayout
from mlserver_torch_stream.engine.loading.locate import locate
from mlserver_torch_stream.engine.loading.model_files import ModelFiles
from mlserver_torch_stream.engine.ranks import prepare_ranks
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.engine.tensor_parallel import rendezvous
from mlserver_torch_stream.engine.tensor_parallel.leader import Leader, Operation, RanksLost
from mlserver_torch_stream.engine.tensor_parallel.rank_group import RankGroup
from mlserver_torch_stream.engine.tensor_parallel.ranked_cache import RankedCache
from mlserver_torch_stream.engine.tensor_parallel.rendezvous import RankProcesses
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import parse_settings
from tests.engine.tiny import Watch, collect, greedy, prompt_of, run, until, watched
from tests.engine.tiny_models import tiny_model as tiny


@pytest.mark.parametrize(
    ("what", "message"),
    [
        pytest.param("refuses", "^rank 1: no room for xxxxx$", marks=pytest.mark.long),
        pytest.param(
            *("dies", "the ranks lost their connection while loading: rank 1 ended with status 7"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_one_rank_cannot_do_none_does(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, what: str, message: str
) -> None:
    """The template makes the message longer than one frame of the channel."""
    monkeypatch.setenv("UNWILLING", what)
    settings = {"tensor_parallel_size": 2, "chat_template": "x" * 9000 + "{{ messages }}"}
    with pytest.raises(LoadFailed, match=message):
        prepare_ranks(
            ModelFiles(str(tiny_model), None),
            parse_settings(str(tiny_model), settings, environ={}),
            module="tests.engine.unwilling",
        )
    assert not torch.distributed.is_initialized()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("rank")] == []


@pytest.mark.long
def test_a_model_that_is_replaced_while_its_ranks_load_it_is_refused(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    resolved = parse_settings(str(folder), {"tensor_parallel_size": 2}, environ={})
    load_shard = ranks.load_shard

    def replaced_after(*args: Any) -> ranks.Shard:
        shard = load_shard(*args)
        os.utime(folder / "tokenizer.json", (1, 1))
        return shard

    monkeypatch.setattr(ranks, "load_shard", replaced_after)
    with pytest.raises(LoadFailed, match=r"tokenizer\.json: it has changed while it was loaded"):
        prepare_ranks(locate(resolved), resolved)
    assert not torch.distributed.is_initialized()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("rank")] == []


def test_two_models_that_are_split_at_the_same_time_do_not_ruin_each_other() -> None:
    """A server does so that loads several models when it starts."""
    failures: list[Exception] = []

    def form() -> None:
        with pytest.raises(LoadFailed) as failure:
            rendezvous.form(2, {}, "tests.engine.tied")
        failures.append(failure.value)

    first = threading.Thread(target=form)
    first.start()
    end = time.monotonic() + 30
    while not (child := [each for each in threading.enumerate() if isinstance(each, rendezvous._Child) and each.ident]):
        assert time.monotonic() < end, "no child was started"
        time.sleep(0.01)
    form()
    child[0]._spawned.wait()
    child[0].process.kill()
    first.join(60)
    assert ["being split over ranks" in str(failure) for failure in failures] == [True, False]
    assert "rank 1 was killed by SIGKILL" in str(failures[1])


def test_a_model_that_ranks_were_started_for_but_is_not_split_says_what_is_missing(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The other ranks would wait in vain for the model."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    built = build_engine(parse_settings(str(tiny_model), {"threads": 1}, environ={}), resources=ProcessResources())
    if built.give_back():
        built.shutdown()
    assert (
        "tensor_parallel_size is not set for" in caplog.text
        and "not split over the 2 ranks that were started" in caplog.text
    )


class _Engine:
    def __init__(self) -> None:
        self.heard: list[BaseException] = []

    def fail(self, error: BaseException, patience: float) -> None:
        self.heard.append(error)


def test_all_engines_on_the_ranks_hear_of_their_loss_and_none_is_kept_for_it() -> None:
    other_ranks = RankProcesses(2, 1, "tests.engine.tied")
    leader = Leader(RankGroup(torch.distributed.HashStore(), 0, 1), other_ranks)
    engines = [_Engine() for _ in range(3)]
    for engine in engines:
        leader.watch_loss(engine.fail)
    gone = weakref.ref(engines.pop())
    del engine
    assert gone() is None
    other_ranks.kill()
    other_ranks.end(0)
    engines.append(_Engine())
    leader.watch_loss(engines[-1].fail)
    leader.stop()
    assert [[str(error) for error in engine.heard] for engine in engines] == [["rank 1 was killed by SIGKILL"]] * 3


def test_a_cache_lives_on_the_other_ranks_as_long_as_on_rank_0() -> None:
    leader = Leader(RankGroup(torch.distributed.HashStore(), 0, 1), RankProcesses(1, 0))
    cache = RankedCache(leader, CacheLayout(tiny("llama").config), 4, [16], 2)
    name = cache.name
    assert list(leader._notes) == [(Operation.CACHE, (name, 4, 2, 16))]
    del cache
    gc.collect()
    assert list(leader._notes)[1:] == [(Operation.DROP, (name,))]
    leader.stop()


def test_a_pulse_that_comes_after_the_end_says_so() -> None:
    leader = Leader(RankGroup(torch.distributed.HashStore(), 0, 1), RankProcesses(1, 0))
    leader.stop()
    with pytest.raises(RanksLost, match="the other ranks were stopped"), leader.sending(Operation.PULSE):
        pass


_FOLLOWER = """
import os
from mlserver_torch_stream.engine.tensor_parallel.rendezvous import find_launched
group = find_launched(os.environ)
group.receive()
group.leave()
"""


@pytest.mark.slow
def test_launched_ranks_that_have_had_their_model_are_not_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rendezvous, "_LAUNCHED_TIMEOUT", timedelta(seconds=60))
    monkeypatch.setattr(rendezvous, "_GROUP_USED", threading.Event())
    with subprocess.Popen([sys.executable, "-c", _FOLLOWER], env={**os.environ, "RANK": "1"}) as other:
        group, _ = rendezvous.form(2, environ)
        group.send("go")
        assert other.wait(30) == 0
        group.leave()
    with pytest.raises(LoadFailed, match="these ranks have loaded a model before"):
        rendezvous.form(2, environ)


@pytest.mark.slow
def test_an_error_that_one_rank_alone_meets_ends_all_and_one_before_it_is_told_ends_its_request(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths: list[BaseException] = []
    monkeypatch.setenv("MLSERVER_TORCH_STREAM_FAULTS", "prefill:2:raise")
    resolved = parse_settings(str(tiny_model), {"tensor_parallel_size": 2, "threads": 1}, environ={})
    built = build_engine(resolved, on_death=deaths.append, resources=ProcessResources())

    async def scenario(watch: Watch) -> None:
        first = (await collect(built.engine, [EngineRequest(prompt_of(5), greedy(5))]))[0]
        second = (await collect(built.engine, [EngineRequest(prompt_of(5, 1), greedy(5))]))[0]
        third = (await collect(built.engine, [EngineRequest(prompt_of(5, 2), greedy(5))]))[0]
        assert first.error is None and third.error is None
        assert second.error is not None and "RuntimeError" in str(second.error)
        watch.fail = lambda ids: RuntimeError("only here")
        last = (await collect(built.engine, [EngineRequest(prompt_of(5, 3), greedy(5))]))[0]
        assert last.error is not None and "only here" not in str(last.error), "that is for the log"
        await until(lambda: bool(deaths), "word of the death")
        assert not built.engine.alive

    with watched(built.lease.value.weights.value.weights.model) as watch:
        run(scenario(watch))
    if built.give_back():
        built.shutdown()
    assert not torch.distributed.is_initialized()
