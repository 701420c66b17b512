"""A spelling of one's own is one file and one row: a real server streams it, with its own errors and its own end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlserver_torch_stream.client import EventParser
from tests.server import v2
from tests.server.conftest import QUIET
from tests.server.harness import Model, Server, serve

_RUNTIME = "tests.server.trial_spelling.TrialRuntime"
_HANDLER = "def handle(data, context):\n    return None if data is None else ['x']\n"


@pytest.fixture(scope="module")
def trial(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The 40th decode step of each engine fails. ``handler`` is loaded first or later, and has no row of its own."""
    folder = tmp_path_factory.mktemp("trial")
    (folder / "handler.py").write_text(_HANDLER)
    models = [
        Model("tiny", str(tiny_model), implementation=_RUNTIME),
        Model("broken", str(tiny_model), implementation=_RUNTIME, extra={"max_model_len": 1000}),
        Model("handler", f"{folder / 'handler.py'}:handle", implementation="mlserver_torch_stream.TorchServeRuntime"),
    ]
    environment = {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "MLSERVER_TORCH_STREAM_FAULTS": "decode:40:raise",
    }
    with serve(folder / "models", models, settings=QUIET, environment=environment) as running:
        yield running


def _post(server: Server, body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/trial/chat", json=body, timeout=v2.TIMEOUT_S)


def _events(response: httpx.Response) -> list[str]:
    return list(EventParser().feed(response.content))


def test_it_streams_and_ends_in_its_own_words(trial: Server) -> None:
    response = _post(trial, {"model": "tiny", "say": "Hello", "live": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *messages, usage, end = _events(response)
    assert end == "[FIN]" and json.loads(usage) == {"used": 5}
    text = "".join(json.loads(message)["piece"] for message in messages)
    assert _post(trial, {"model": "tiny", "say": "Hello"}).json() == {"pieces": [text]}
    body = v2.rest_body("Hello", max_tokens=5, ignore_eos=True)
    there = httpx.post(f"{trial.url}/v2/models/tiny/infer", json=body, timeout=v2.TIMEOUT_S).json()["outputs"]
    assert [text] == next(output["data"] for output in there if output["name"] == "text_output")


def test_its_errors_are_its_own(trial: Server) -> None:
    wrong = _post(trial, {"model": "tiny", "say": 3, "live": True})
    assert wrong.status_code == 400
    assert wrong.json() == {"problem": {"what": "say: must be a string", "where": "say"}}
    unknown = _post(trial, {"model": "nowhere", "say": "Hello"})
    assert unknown.status_code == 404 and "nowhere" in unknown.json()["problem"]["what"]
    unread = httpx.post(f"{trial.url}/trial/chat", content=b"{", timeout=v2.TIMEOUT_S)
    assert unread.status_code == 400 and unread.json()["problem"]["where"] == "body"
    handler = _post(trial, {"model": "handler", "say": "Hello"})
    assert handler.status_code == 400 and handler.json()["problem"]["where"] == "model"


def test_a_failure_in_its_stream_has_no_end_of_its_own(trial: Server) -> None:
    events = _events(_post(trial, {"model": "broken", "say": "Hello", "live": True, "limit": 200}))
    assert "[FIN]" not in events
    assert "piece" in json.loads(events[0]) and "problem" in json.loads(events[-1])
