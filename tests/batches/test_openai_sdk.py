"""The openai SDK with a server that is killed in the middle of a batch."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.batches.api import Api
from tests.batches.conftest import SLOW, serve_batches
from tests.clients.environments import make_environment
from tests.server.harness import Model

_SCRIPT = Path(__file__).with_name("sdk_batch.py")
_ROWS, _TOKENS, _PART = 200, 6, 16

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sdk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has the SDK."""
    return make_environment(tmp_path_factory.mktemp("sdk"), "openai")


def _run(sdk: Path, task: str, url: str, value: object) -> Any:
    command = [str(sdk), str(_SCRIPT), task, url, str(value)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_200_rows_by_the_sdk_survive_kill_9_once_each_in_order_and_none_is_answered_twice(
    sdk: Path, tiny_model: Path, tmp_path: Path
) -> None:
    store, models = tmp_path / "store", [Model("tiny", str(tiny_model), extra={"max_num_seqs": 4})]
    with serve_batches(tmp_path / "first", models, store, SLOW) as server, Api(server.url) as api:
        made = _run(sdk, "submit", server.url, _ROWS)
        api.wait(made["batch"], "in_progress", done=_ROWS // 3)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(20)
    delivered = _PART * len(list(store.rglob("part-*.jsonl")))
    assert _ROWS // 3 < delivered < _ROWS
    with serve_batches(tmp_path / "second", models, store) as server, Api(server.url) as api:
        found = _run(sdk, "collect", server.url, made["batch"])
        assert found["status"] == "completed"
        assert found["counts"] == {"total": _ROWS, "completed": _ROWS, "failed": 0}
        assert found["ids"] == [f"row-{n}" for n in range(_ROWS)]
        answered = server.counters("tiny")["generation_tokens"]
        assert answered == _TOKENS * (_ROWS - delivered)
        again = _run(sdk, "collect", server.url, _run(sdk, "submit", server.url, 8)["batch"])
        assert again["answers"] == found["answers"][:8]  # some of them from before the kill
        assert _run(sdk, "errors", server.url, made["batch"]) == {
            "file": ["NotFoundError", 404, None],
            "batch": ["NotFoundError", 404, None],
            "window": ["BadRequestError", 400, "completion_window"],
            "purpose": ["BadRequestError", 400, "purpose"],
            "size": ["APIStatusError", 413, None],
            "cancel": ["BadRequestError", 400, "batch_id"],
        }
