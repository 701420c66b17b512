"""The harness of the checks at load: it returns a candidate or a reason, and keeps checks apart by name and inputs."""

import json
import logging
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from mlserver_torch_stream.engine.checks.attention import SameAttention
from mlserver_torch_stream.engine.checks.harness import Check, Verdict, accepted
from mlserver_torch_stream.engine.checks.logits import ExpectedLogits
from mlserver_torch_stream.engine.checks.overlap import Overlap
from mlserver_torch_stream.engine.checks.selfcheck import BatchedLogits, SameLogits
from mlserver_torch_stream.engine.failures import Unsuitable
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.forward.model_step import Way
from mlserver_torch_stream.errors import LoadFailed
from tests.engine.tiny_models import tiny_model


@dataclass(frozen=True)
class Small(Check[int]):
    name: ClassVar[str] = "small"
    limit: int

    def problem(self, candidate: int) -> str | None:
        return None if candidate < self.limit else f"{candidate} is not below {self.limit}"


def test_a_candidate_that_its_check_accepts_is_returned(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        assert accepted("a number", lambda: 3, Small(4), "there is none").candidate == 3
    assert "a number: accepted by small(limit=4)" in caplog.text and "there is none" not in caplog.text


def test_one_that_it_refuses_is_none_and_the_log_says_what_runs_instead(caplog: pytest.LogCaptureFixture) -> None:
    verdict = accepted("a number", lambda: 4, Small(4), "there is none")
    assert (verdict.candidate, verdict.reason, verdict.judged) == (None, "4 is not below 4", True)
    assert caplog.messages == ["there is none: 4 is not below 4"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [(ValueError("two\nlines"), "ValueError: two"), (Unsuitable("no compiler is here"), "no compiler is here")],
)
def test_an_error_of_the_candidate_is_the_reason_in_one_line(error: Exception, reason: str) -> None:
    def make() -> int:
        raise error

    assert accepted("a number", make, Small(4)) == Verdict(None, reason, judged=False)


def test_what_says_nothing_of_the_candidate_fails_the_load() -> None:
    def make() -> int:
        raise LoadFailed("the device is lost")

    with pytest.raises(LoadFailed, match="the device is lost"):
        accepted("a number", make, Small(4))


def test_every_check_of_a_load_has_a_name_of_its_own_and_inputs_that_json_can_hold() -> None:
    model = tiny_model()
    expected, half = ExpectedLogits(model), ExpectedLogits(model, torch.bfloat16)
    checks: list[Check[object]] = [
        *(SameLogits(expected), SameLogits(half), SameLogits(expected, chunked=False)),  # type: ignore[list-item]
        *(SameLogits(expected, page_size=256), SameLogits(expected, rounding="int8")),  # type: ignore[list-item]
        *(BatchedLogits(expected), BatchedLogits(expected, way=Way.ROWS)),  # type: ignore[list-item]
        *(SameAttention(model, Way.PACKED, 16), SameAttention(model, Way.ROWS, 16)),  # type: ignore[list-item]
        Overlap(model, ModelForward(model)),  # type: ignore[list-item]
    ]
    assert len({json.dumps([check.name, check.inputs()], sort_keys=True) for check in checks}) == len(checks)
    assert str(SameAttention(model, Way.PACKED, 16)) == "same attention(way='packed', page_size=16)"
