"""Ranks that a launcher has started although they are not needed: all of them say why, and end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from mlserver_torch_stream.engine.tensor_parallel.validate import check_launched
from mlserver_torch_stream.errors import LoadFailed
from tests.server.harness import HOST, Model, free_ports

_SECONDS = 120  # the bound for an end; without a word the others wait for half an hour

Start = Callable[..., "list[Launched]"]


class Launched:
    """The process of one rank."""

    def __init__(self, command: list[str], environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **environment}
            )

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def end(self) -> int:
        try:
            return self.process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it hangs: {self.said}")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts two ranks of a server by their environment variables, or by torchrun, which is a single process here."""
    started: list[Launched] = []
    models = tmp_path / "models"

    def begin(*found: Model, torchrun: bool = False) -> list[Launched]:
        http, grpc, metrics, rendezvous = map(str, free_ports(4))
        for model in found:
            (models / model.name).mkdir(parents=True)
            (models / model.name / "model-settings.json").write_text(json.dumps(model.settings()))
        models.mkdir(exist_ok=True)
        ports = {"MLSERVER_HTTP_PORT": http, "MLSERVER_GRPC_PORT": grpc, "MLSERVER_METRICS_PORT": metrics}
        where = {"MASTER_ADDR": HOST, "MASTER_PORT": rendezvous, "WORLD_SIZE": "2"}
        rank = ["-m", "mlserver_torch_stream.cli.rank", str(models)]
        if torchrun:
            port = ["--master-addr", HOST, "--master-port", rendezvous]
            launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *port]
            started.append(Launched([*launcher, *rank], ports, tmp_path / "torchrun.log"))
        for number in () if torchrun else ("0", "1"):
            environment = {**ports, **where, "RANK": number, "MLSERVER_HOST": HOST}
            started.append(Launched([sys.executable, *rank], environment, tmp_path / f"rank-{number}.log"))
        return started

    yield begin
    for each in started:
        each.process.kill()
        each.process.wait(30)


@pytest.mark.slow
def test_ranks_that_no_model_is_split_over_end_at_once_and_say_what_is_missing(tiny_model: Path, start: Start) -> None:
    ranks = start(Model("alone", str(tiny_model)))
    assert [rank.end() for rank in ranks] == [1, 1]
    for rank in ranks:
        assert "size: 2 ranks were started, but no model ('alone') is split over them: set it to 2" in rank.said


@pytest.mark.slow
def test_torchrun_ends_its_ranks_where_another_number_of_them_is_wanted(tiny_model: Path, start: Start) -> None:
    (launcher,) = start(Model("split", str(tiny_model), extra={"tensor_parallel_size": 3}), torchrun=True)
    assert launcher.end() == 1
    assert "tensor_parallel_size: model 'split' needs 3 ranks, but 2 were started" in launcher.said


@pytest.mark.slow
def test_a_load_that_fails_before_the_ranks_are_needed_ends_them(tmp_path: Path, start: Start) -> None:
    leader, other = start(Model("split", str(tmp_path / "nothing"), extra={"tensor_parallel_size": 2}))
    assert (leader.end(), other.end()) == (1, 1)
    assert "Cannot load model 'split'" in leader.said
    assert "rank 1 ends: rank 0 ended before it had loaded a model" in other.said


@pytest.mark.slow
def test_a_signal_to_ranks_that_wait_for_a_model_ends_them_in_order(start: Start) -> None:
    """A server without models may load one later, and the other ranks wait for it."""
    leader, other = start()
    end = time.monotonic() + _SECONDS
    while "Uvicorn running" not in leader.said:
        assert time.monotonic() < end and leader.process.poll() is None, leader.said
        time.sleep(0.1)
    assert other.process.poll() is None, other.said
    for rank in (leader, other):
        rank.process.send_signal(signal.SIGTERM)
    assert leader.end() == 0, leader.said
    assert other.end() != 0


@pytest.mark.parametrize(
    ("sizes", "started", "message"),
    [
        ({"a": 1, "b": 1}, 2, r"size: 2 ranks were started, but no model \('a', 'b'\) is split over them: set it to 2"),
        ({"a": 1, "b": 4}, 2, r"size: model 'b' needs 4 ranks, but 2 were started"),
        ({"a": 1, "b": 2}, 2, None),
        ({}, 2, None),
    ],
)
def test_models_and_ranks_have_to_agree(sizes: dict[str, Any], started: int, message: str | None) -> None:
    if message is None:
        check_launched(sizes, started)
    else:
        with pytest.raises(LoadFailed, match=message):
            check_launched(sizes, started)
