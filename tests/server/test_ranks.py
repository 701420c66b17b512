"""A server whose model is split over two ranks: signals, deaths and torchrun, as its clients see them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests import plain_http
from tests.server.conftest import QUIET
from tests.server.harness import HOST, Model, Server, exit_code, free_ports, serve
from tests.server.inflight import flights, rest_unary
from tests.waiting import alive, rank_pids, wait_until

_LONG = {"max_tokens": 900, "ignore_eos": True}
_SOME = {"max_tokens": 60, "ignore_eos": True}


def split(folder: Path, name: str = "split") -> Model:
    return Model(name, str(folder), extra={"tensor_parallel_size": 2, "threads": 1})


@pytest.mark.slow
def test_a_killed_rank_gives_every_stream_an_error_and_the_process_fails(tiny_model: Path, tmp_path: Path) -> None:
    with serve(tmp_path / "models", [split(tiny_model)], settings=QUIET) as server, flights(server) as start:
        running = [start.rest_stream("split", **_LONG), start.grpc_stream("split", **_LONG)]
        (rank,) = rank_pids(server.process.pid)
        os.kill(rank, signal.SIGKILL)
        assert [each.end().reason for each in running] == ["error"] * 2
        assert exit_code(server) == 1, server.log
        assert "rank 1 was killed by SIGKILL" in server.log


@pytest.mark.slow
def test_a_signal_to_all_ranks_lets_streams_finish_and_leaves_nobody(tiny_model: Path, tmp_path: Path) -> None:
    with serve(tmp_path / "models", [split(tiny_model)], settings=QUIET) as server, flights(server) as start:
        running = [start.rest_stream("split", **_SOME), start.grpc_stream("split", **_SOME)]
        (rank,) = rank_pids(server.process.pid)
        for pid in (rank, server.process.pid):  # as Ctrl-C in a terminal, or a container's end, may do
            os.kill(pid, signal.SIGTERM)
        assert [each.end().reason for each in running] == ["length"] * 2
        assert exit_code(server) == 0, server.log
        wait_until(lambda: not alive(rank), "the rank's end")


@pytest.mark.slow
def test_a_killed_server_leaves_no_rank(tiny_model: Path, tmp_path: Path) -> None:
    with serve(tmp_path / "models", [split(tiny_model)], settings=QUIET) as server, flights(server) as start:
        start.rest_stream("split", **_LONG)
        (rank,) = rank_pids(server.process.pid)
        server.process.kill()
        server.process.wait(30)
        wait_until(lambda: not alive(rank), "the rank's end")


@pytest.mark.slow
def test_a_stopped_rank_is_lost_after_its_silence(tiny_model: Path, tmp_path: Path) -> None:
    """No socket reports a machine that hangs. This is tested for an idle server, too."""
    with serve(tmp_path / "models", [split(tiny_model)], settings=QUIET) as server, flights(server) as start:
        running = start.rest_stream("split", **_LONG)
        (rank,) = rank_pids(server.process.pid)
        os.kill(rank, signal.SIGSTOP)
        ending = running.end()
        assert ending.reason == "error"
        assert ".cc" not in repr(ending.replies[-1]), "gloo's message, with the path of its source, is for the log"
        assert exit_code(server) == 1, server.log
        wait_until(lambda: not alive(rank), "the rank's end")


@pytest.mark.slow
def test_a_reload_takes_the_ranks_along_and_an_unload_ends_them(tiny_model: Path, tmp_path: Path) -> None:
    with serve(tmp_path / "models", [split(tiny_model)], settings=QUIET) as server:
        (rank,) = rank_pids(server.process.pid)
        url = f"{server.url}/v2/repository/models/split"
        assert plain_http.post(f"{url}/load", timeout=120).status_code == 200
        assert rank_pids(server.process.pid) == [rank]
        assert rest_unary(server, "split", **_SOME).code == 200
        assert plain_http.post(f"{url}/unload", timeout=60).status_code == 200
        wait_until(lambda: not alive(rank), "the rank's end")
        assert plain_http.post(f"{url}/load", timeout=120).status_code == 200
        assert rest_unary(server, "split", **_SOME).code == 200


@contextmanager
def launched(folder: Path, model: Model) -> Iterator[Server]:
    """Starts the same server by ``torchrun``, with one process for each rank."""
    http_port, grpc_port, metrics_port, rendezvous = free_ports(4)
    (folder / model.name).mkdir(parents=True)
    (folder / model.name / "model-settings.json").write_text(json.dumps(model.settings()))
    ports = {"HTTP_PORT": http_port, "GRPC_PORT": grpc_port, "METRICS_PORT": metrics_port, "HOST": HOST}
    log_path = folder.parent / "torchrun.log"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--master-addr", HOST, "--master-port", str(rendezvous)),
        *("-m", "mlserver_torch_stream.cli.rank", str(folder)),
    ]
    with log_path.open("wb") as log:
        environment = {**os.environ, **{f"MLSERVER_{key}": str(value) for key, value in ports.items()}}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    server = Server(http_port, grpc_port, metrics_port, log_path, process)
    try:
        yield server
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)


def ready(server: Server) -> bool:
    assert server.process.poll() is None, server.log
    try:
        return plain_http.get(f"{server.url}/v2/models/split/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.slow
def test_torchrun_starts_the_same_server_and_its_ranks_end_together(tiny_model: Path, tmp_path: Path) -> None:
    with serve(tmp_path / "models", [Model("split", str(tiny_model))], settings=QUIET) as alone:
        expected = rest_unary(alone, "split", **_SOME).replies[-1].text
    with launched(tmp_path / "launched", split(tiny_model)) as server, flights(server) as start:
        wait_until(lambda: ready(server), "the model", 180)
        assert rest_unary(server, "split", **_SOME).replies[-1].text == expected
        running = start.rest_stream("split", **_SOME)
        server.process.terminate()
        assert running.end().reason == "length", server.log
        server.process.wait(60)
        assert "rank 1 ends" not in server.log, "it was told that it may go"
