"""The log lines of a load: when a stage begins, that it goes on, and how long it took."""

from __future__ import annotations

import logging
import re
import threading

import pytest

from mlserver_torch_stream.engine.stage_log import stage

logger = logging.getLogger("tests.stages")


def test_a_long_stage_says_that_it_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with stage(logger, "Baking", every=0.01):
        while not any("so far" in line for line in caplog.messages):
            threading.Event().wait(0.01)
    assert caplog.messages[0] == "Baking"
    assert "s so far" in caplog.messages[1]
    assert re.fullmatch(r"Baking took \d+\.\d s", caplog.messages[-1])


def test_a_stage_that_fails_has_no_last_line_and_leaves_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="burnt"), stage(logger, "Baking"):
        raise ValueError("burnt")
    assert caplog.messages == ["Baking"]
    assert set(threading.enumerate()) <= before
