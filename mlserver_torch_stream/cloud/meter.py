"""Counts what a run does; the names of the figures are those of Beam's RunInference where it has them.

Knows no clock: times are passed in, in seconds of a clock that never goes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlserver_torch_stream.cloud.rows import Outcome, Row


@dataclass
class Distribution:
    """Count, sum, least and greatest of whole numbers, as Beam's distributions."""

    count: int = 0
    sum: int = 0
    min: int | None = None
    max: int | None = None

    def update(self, value: int) -> None:
        self.count += 1
        self.sum += value
        self.min = value if self.min is None else min(self.min, value)
        self.max = value if self.max is None else max(self.max, value)

    def figures(self) -> dict[str, Any]:
        mean = self.sum / self.count if self.count else None
        return {"count": self.count, "sum": self.sum, "min": self.min, "max": self.max, "mean": mean}


@dataclass
class Busy:
    """How much of the time since its first batch at least one batch was being inferred."""

    running: int = 0
    began: float | None = None
    idle_since: float | None = None
    idle: float = 0.0
    ended: float = 0.0

    def enter(self, now: float) -> None:
        if self.began is None:
            self.began = now
        elif self.running == 0 and self.idle_since is not None:
            self.idle += now - self.idle_since
        self.running += 1

    def leave(self, now: float) -> None:
        self.running -= 1
        self.ended = now
        if self.running == 0:
            self.idle_since = now

    def share(self) -> float | None:
        """Between the first batch's start and the last one's end; None before any batch has ended."""
        if self.began is None or self.ended <= self.began:
            return None
        return 1.0 - self.idle / (self.ended - self.began)


@dataclass
class Meter:
    """The counters of one run."""

    rows: int = 0  # delivered
    failed: int = 0  # of them
    input_bytes: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    retries: int = 0
    num_inferences: int = 0
    failed_batches_counter: int = 0
    peak_undelivered: int = 0
    peak_undelivered_bytes: int = 0  # of their input
    inference_request_batch_size: Distribution = field(default_factory=Distribution)
    inference_request_batch_byte_size: Distribution = field(default_factory=Distribution)
    inference_batch_latency_micro_secs: Distribution = field(default_factory=Distribution)
    load_model_latency_milli_secs: Distribution = field(default_factory=Distribution)
    model_byte_size: Distribution = field(default_factory=Distribution)
    busy: Busy = field(default_factory=Busy)

    def batch_started(self, rows: Sequence[Row], now: float) -> None:
        self.busy.enter(now)
        self.num_inferences += len(rows)
        self.inference_request_batch_size.update(len(rows))
        self.inference_request_batch_byte_size.update(sum(row.size for row in rows))

    def batch_ended(self, began: float, now: float, failed: bool) -> None:
        self.busy.leave(now)
        self.failed_batches_counter += failed
        self.inference_batch_latency_micro_secs.update(round((now - began) * 1e6))

    def inferred(self, outcomes: Sequence[Outcome]) -> None:
        self.prompt_tokens += sum(outcome.prompt_tokens for outcome in outcomes)
        self.completion_tokens += sum(outcome.completion_tokens for outcome in outcomes)

    def retried(self, error: Exception) -> None:
        self.retries += 1

    def delivered(self, row: Row, outcome: Outcome) -> None:
        self.rows += 1
        self.failed += outcome.failure is not None
        self.input_bytes += row.size

    def figures(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Distribution):
                found[name] = value.figures()
            elif not isinstance(value, Busy):
                found[name] = value
        return {**found, "busy_share": self.busy.share()}
