"""``mlserver-torch-stream rank``: what it needs of whoever starts it."""

from __future__ import annotations

import pytest

from mlserver_torch_stream.cli import main


def test_a_rank_that_nobody_told_its_number_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert main(["rank", "/models"]) == 2
    assert "RANK, WORLD_SIZE, MASTER_PORT not set: start this with torchrun" in capsys.readouterr().err
