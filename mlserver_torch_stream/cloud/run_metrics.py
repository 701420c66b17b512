"""Counts the work of a run. Metrics that Beam's RunInference also has have the same names as there."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlserver_torch_stream.cloud.rows import Outcome, Row


@dataclass
class Distribution:
    """The count, sum, minimum and maximum of whole numbers, like Apache Beam's distribution metric."""

    count: int = 0
    sum: int = 0
    min: int | None = None
    max: int | None = None

    def update(self, value: int) -> None:
        self.count += 1
        self.sum += value
        self.min = value if self.min is None else min(self.min, value)
        self.max = value if self.max is None else max(self.max, value)

    def as_dict(self) -> dict[str, Any]:
        """Returns the count, sum, minimum, maximum and mean; the last three are None if nothing was counted."""
        mean = self.sum / self.count if self.count else None
        return {"count": self.count, "sum": self.sum, "min": self.min, "max": self.max, "mean": mean}


@dataclass
class BusyTime:
    """The share of the time in which at least one row was being inferred. The time is measured from the first start to
    the last end.

    ``spans`` are the busy spans, in order and without overlaps.
    """

    spans: list[tuple[float, float]] = field(default_factory=list)

    def add(self, began: float, ended: float) -> None:
        """Adds a busy span. Adding is fast if the spans arrive nearly in the order of their ends."""
        first = last = bisect_left(self.spans, began, key=lambda span: span[1])
        while last < len(self.spans) and self.spans[last][0] <= ended:
            last += 1
        joined = self.spans[first:last]
        if joined:
            began, ended = min(began, joined[0][0]), max(ended, joined[-1][1])
        self.spans[first:last] = [(began, ended)]

    def share(self) -> float | None:
        """Returns the share of busy time, from 0 to 1; None before any row was inferred."""
        whole = self.spans[-1][1] - self.spans[0][0] if self.spans else 0.0
        return sum(ended - began for began, ended in self.spans) / whole if whole > 0 else None


@dataclass
class RunMetrics:
    """The counters of one run."""

    rows: int = 0  # rows that were delivered
    failed: int = 0  # rows that were delivered with a failure
    input_bytes: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    retries: int = 0
    refused_events: int = 0
    num_inferences: int = 0
    failed_batches_counter: int = 0
    peak_undelivered: int = 0
    peak_undelivered_bytes: int = 0  # bytes of their input
    inference_request_batch_size: Distribution = field(default_factory=Distribution)
    inference_request_batch_byte_size: Distribution = field(default_factory=Distribution)
    inference_batch_latency_micro_secs: Distribution = field(default_factory=Distribution)
    load_model_latency_milli_secs: Distribution = field(default_factory=Distribution)
    model_byte_size: Distribution = field(default_factory=Distribution)
    busy: BusyTime = field(default_factory=BusyTime)

    def batch_failed(self) -> None:
        """Counts a batch that failed as a whole."""
        self.failed_batches_counter += 1

    def batch_inferred(self, rows: Sequence[Row], outcomes: Sequence[Outcome], began: float, now: float) -> None:
        """Counts a batch that was inferred.

        A batch that is cancelled, for example because the run ends early, counts neither as inferred nor as failed.
        """
        self.num_inferences += sum(outcome.failure is None or not outcome.failure.shared for outcome in outcomes)
        self.inference_request_batch_size.update(len(rows))
        self.inference_request_batch_byte_size.update(sum(row.size for row in rows))
        self.inference_batch_latency_micro_secs.update(round((now - began) * 1e6))
        for outcome in outcomes:
            self.busy.add(*(outcome.span or (began, now)))
            self.prompt_tokens += outcome.prompt_tokens
            self.completion_tokens += outcome.completion_tokens

    def retried(self, error: Exception) -> None:
        """Counts a call that is retried."""
        self.retries += 1

    def delivered(self, row: Row, outcome: Outcome) -> None:
        """Counts a row whose outcome was delivered, and the bytes of its input."""
        self.rows += 1
        self.failed += outcome.failure is not None
        self.input_bytes += row.size

    def as_dict(self) -> dict[str, Any]:
        """Returns all metrics by name, as JSON-serializable values."""
        found: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Distribution):
                found[name] = value.as_dict()
            elif not isinstance(value, BusyTime):
                found[name] = value
        return {**found, "busy_share": self.busy.share()}
