"""Waits for the server's counters.

Fails with a model's last figures if they never became what was expected.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.server.harness import Server
from tests.server.scrape import Sample, Scrape, on_rest_port

_PREFIX = "torch_stream_"


class Counts:
    """The figures of one model at one time; counters are named without ``_total``."""

    def __init__(self, scrape: Scrape, model: str) -> None:
        self._scrape = scrape
        self._model = model

    def __getitem__(self, name: str) -> float:
        names = (f"{_PREFIX}{name}", f"{_PREFIX}{name}_total")
        found = [each.value for each in self._own() if each.name in names]
        assert found, f"no {name} of {self._model}"
        return sum(found)

    def requests(self, reason: str) -> float:
        return self._labelled("requests", "finish_reason", reason)

    def errors(self, status: int) -> float:
        return self._labelled("request_errors", "status_code", str(status))

    def __str__(self) -> str:
        shown = [each for each in self._own() if each.value and "_seconds" not in each.name]
        return ", ".join(
            f"{each.name.removeprefix(_PREFIX)}{list(each.labels.values())} {each.value:g}" for each in shown
        )

    def _own(self) -> list[Sample]:
        return [each for each in self._scrape.samples if each.labels.get("model") == self._model]

    def _labelled(self, name: str, label: str, value: str) -> float:
        return self._scrape.value(f"{_PREFIX}{name}_total", model=self._model, **{label: value})


def counts(server: Server, model: str) -> Counts:
    return Counts(on_rest_port(server), model)


def until(server: Server, model: str, condition: Callable[[Counts], bool], seconds: float = 30.0) -> Counts:
    """Waits until the figures meet the condition, and returns them."""
    end = time.monotonic() + seconds
    while not condition(now := counts(server, model)):
        assert time.monotonic() < end, f"not within {seconds:g} s: {now}"
        time.sleep(0.03)  # each look takes 10 ms of a core
    return now


def idle(server: Server, model: str) -> Counts:
    """Waits until nothing is running, waiting or held, and returns the figures."""
    names = ("running_sequences", "waiting_requests", "prefilling_requests", "kv_cache_bytes")
    return until(server, model, lambda now: not any(now[name] for name in names))
