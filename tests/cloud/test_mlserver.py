"""The command against a real MLServer with our runtime: streamed and whole, it answers as the engine here does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cloud.command import cloud
from tests.server.harness import Model, serve

_EXTRA = {"dtype": "float32", "threads": 1}


@pytest.mark.slow
def test_a_real_server_and_the_engine_here_answer_alike(tiny_model: Path, tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "in").mkdir()
    rows: list[dict[str, Any]] = [{"prompt": f"The quick brown fox {i}", "max_tokens": 9} for i in range(12)]
    rows.append({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9})
    rows.append({"prompt": "x", "max_tokns": 9})
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    run = ("run", "--input", tmp_path / "in")

    def answers(*options: Any) -> list[Any]:
        assert cloud(*run, *options) == 1
        found = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
        assert "did you mean max_tokens?" in found[-1]["response"]["body"]["error"]["message"]
        bodies = [row["response"]["body"] for row in found[:-1]]
        return [(body["object"], body["choices"], body["usage"]) for body in bodies]

    here = answers("--model", tiny_model, "--extra", json.dumps(_EXTRA))
    with serve(tmp_path / "served", [Model("m", str(tiny_model), extra=_EXTRA)]) as server:
        assert answers("--url", server.url) == here
        assert answers("--url", server.url, "--unary") == here
