"""Errors as REST statuses: never 400 for a registered model, and a bug reveals nothing internal."""

from __future__ import annotations

import pytest
from mlserver.errors import MLServerError, ModelNotFound, ModelNotReady

from mlserver_torch_stream.errors import GenerationFailed, InvalidInput, NotServing, QueueFull, TimedOut
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.request import as_refusal


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (InvalidInput("field", "m"), 422, None),
        (ModelNotFound("m", "v1"), 404, None),
        (QueueFull("m", retry_after=7), 429, 7),
        (NotServing("m"), 503, 1),
        (ModelNotReady("m"), 503, 1),
        (TimedOut("m"), 504, None),
        (GenerationFailed("m"), 500, None),
        (MLServerError("m", 500), 500, None),
        (ValueError("inside"), 500, None),
    ],
)
def test_every_error_has_its_status(error: Exception, status: int, retry_after: int | None) -> None:
    refusal = as_refusal(error)
    assert (refusal.status, refusal.retry_after) == (status, retry_after)
    assert refusal.message and "inside" not in refusal.message


def test_a_name_that_is_unknown_during_a_shutdown_is_refused_as_not_served() -> None:
    """MLServer forgets a model whose load the shutdown interrupts, and a router that got a 404 would forget it, too."""
    lifecycle = Lifecycle()
    lifecycle.begin_shutdown("the server is shutting down")
    refusal = as_refusal(ModelNotFound("m", "v1"), lifecycle.shutdown_reason)
    assert (refusal.status, refusal.message) == (503, "the server is shutting down")
