"""A server is killed in the middle of a batch, and another one starts on the same store."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.batches.api import Api, row
from tests.batches.conftest import SLOW, serve_batches
from tests.server.harness import Model

_ROWS, _TOKENS, _PART = 56, 6, 16


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_after_a_signal_every_row_is_delivered_once_and_none_is_answered_again_after_its_delivery(
    tiny_model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    store, models = tmp_path / "store", [Model("tiny", str(tiny_model), extra={"max_num_seqs": 4})]
    rows = [row(n, max_tokens=_TOKENS, ignore_eos=True) for n in range(_ROWS)]
    with serve_batches(tmp_path / "first", models, store, SLOW) as server, Api(server.url) as api:
        batch = api.create(rows)
        api.wait(batch["id"], "in_progress", done=_PART)
        server.process.send_signal(number)
        server.process.wait(20)
    delivered = _PART * len(list(store.rglob("part-*.jsonl")))
    assert _PART <= delivered < _ROWS
    with serve_batches(tmp_path / "second", models, store) as server, Api(server.url) as api:
        ended = api.wait(batch["id"])
        assert ended["status"] == "completed"
        assert ended["request_counts"] == {"total": _ROWS, "completed": _ROWS, "failed": 0}
        lines = api.lines(ended["output_file_id"])
        assert [line["custom_id"] for line in lines] == [f"row-{n}" for n in range(_ROWS)]
        assert len({line["id"] for line in lines}) == _ROWS
        assert server.counters("tiny")["generation_tokens"] == _TOKENS * (_ROWS - delivered)
