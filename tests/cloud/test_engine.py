"""The engine in this process as the callable: its answers and refusals, and texts independent of the batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cloud.command import cloud, trouble

pytest.importorskip("torch")

_EXTRA = json.dumps({"dtype": "float32", "threads": 1})


def _run(model: Path, folder: Path, capfd: Any, *options: str) -> tuple[int, list[dict[str, Any]], str]:
    status = cloud("run", "--input", folder, "--model", model, "--extra", _EXTRA, "--as", "jsonl", *options)
    out, err = capfd.readouterr()
    return status, [json.loads(line) for line in out.splitlines()], err


def _write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "in").mkdir(exist_ok=True)
    (folder / "in" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "in"


@pytest.mark.long
def test_rows_are_answered_in_order_and_the_same_in_any_company(tiny_model: Path, tmp_path: Path, capfd: Any) -> None:
    rows = [{"prompt": f"The quick brown fox {i}", "max_tokens": 3 + i % 5} for i in range(12)]
    status, together, err = _run(tiny_model, _write(tmp_path, rows), capfd, "--batch-tokens", "30")
    assert status == 0 and "12 rows, 0 failed" in err
    _, alone, _ = _run(tiny_model, tmp_path / "in", capfd, "--batch-rows", "1", "--batches", "1")
    assert alone == together
    assert [row["response"]["body"]["usage"]["completion_tokens"] for row in alone] == [3 + i % 5 for i in range(12)]
    assert all(row["response"]["body"]["choices"][0]["finish_reason"] == "length" for row in alone)


@pytest.mark.long
def test_a_watchers_batches_are_bounded_by_tokens(tiny_model: Path, tmp_path: Path) -> None:
    """A row has more bytes than the limit of tokens, but fewer than half as many tokens."""
    folder = _write(tmp_path, [{"prompt": f"The quick brown fox {i}", "max_tokens": 1} for i in range(6)])
    watch = ("watch", "--input", folder, "--output", tmp_path / "out", "--poll", "0.05", "--limit", "1")
    model = ("--model", tiny_model, "--extra", _EXTRA, "--batch-tokens", "45", "--metrics", tmp_path / "metrics")
    assert cloud(*watch, "--max-wait", "2", *model) == 0
    assert json.loads((tmp_path / "metrics").read_text())["inference_request_batch_size"]["max"] >= 2


@pytest.mark.long
def test_conversations_defaults_several_answers_and_rows_that_cannot_be_served(
    tiny_model: Path, tmp_path: Path, capfd: Any
) -> None:
    talk = [{"role": "user", "content": "hello"}]
    rows: list[dict[str, Any]] = [
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": talk, "n": 2}},
        {"custom_id": "unknown", "prompt": "x", "max_tokns": 3},
        {"custom_id": "empty", "prompt": ""},
        {"custom_id": "long", "prompt": "fox " * 2000},
        {"custom_id": "logprobs", "prompt": "x", "logprobs": 2},
        {"custom_id": "good", "body": {"model": str(tiny_model), "stream": False, "prompt": "x", "max_tokens": 4}},
    ]
    status, found, _ = _run(tiny_model, _write(tmp_path, rows), capfd, "--parameters", '{"max_tokens": 6}')
    assert status == 1 and [row["custom_id"] for row in found] == [row["custom_id"] for row in rows]
    chat, unknown, empty, long, logprobs, good = found
    body = chat["response"]["body"]
    assert body["object"] == "chat.completion" and [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["choices"][0]["message"]["role"] == "assistant" and body["usage"]["completion_tokens"] <= 12
    assert "max_tokns: unknown parameter; did you mean max_tokens?" in trouble(unknown)["message"]
    assert "prompt: must have" in trouble(empty)["message"] and trouble(long)["type"] == "invalid_request_error"
    assert len(logprobs["response"]["body"]["choices"][0]["logprobs"]["tokens"]) == 6
    assert good["response"]["body"]["usage"]["completion_tokens"] == 4
