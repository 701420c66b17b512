"""An engine that dies: its streams end with an error, it is restarted, and at the fourth time the process ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.conftest import QUIET
from tests.server.harness import Model, exit_code, get_ready, serve
from tests.server.inflight import flights, rest_unary

_FATAL = {"max_tokens": 80, "ignore_eos": True}  # gets to the fortieth decode step of an engine
_SHORT = {"max_tokens": 2, "ignore_eos": True}
_DEATHS_SURVIVED = 3


@pytest.mark.slow
def test_an_engine_is_started_anew_and_when_it_stays_dead_the_process_fails(tiny_model: Path, tmp_path: Path) -> None:
    models = [Model("mortal", str(tiny_model)), Model("other", str(tiny_model))]
    environment = {"MLSERVER_TORCH_STREAM_FAULTS": "decode:40:death,decode:1:slow=0.03"}
    with (
        serve(tmp_path / "models", models, settings=QUIET, environment=environment) as server,
        flights(server) as start,
    ):
        for _ in range(_DEATHS_SURVIVED):
            assert start.rest_stream("mortal", **_FATAL).end().reason == "error"
            assert rest_unary(server, "mortal", **_SHORT).code == 200, "it serves anew"
        assert get_ready(server).status_code == 200
        assert server.process.poll() is None
        last = [start.rest_stream("mortal", **_FATAL), start.grpc_stream("mortal", **_FATAL)]
        assert [each.end().reason for each in last] == ["error"] * 2, "every client is told before the process ends"
        assert exit_code(server) == 1, server.log
        assert "the engine of model 'mortal' died" in server.log
