"""Reads a server's metrics as a scraper does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from tests import plain_http
from tests.server.harness import HOST, Server


@dataclass(frozen=True)
class Sample:
    name: str
    labels: dict[str, str]
    value: float


class Scrape:
    """One answer of a metrics endpoint."""

    def __init__(self, text: str) -> None:
        self.samples = [
            Sample(sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]

    def value(self, name: str, **labels: str) -> float:
        """Returns the sum of all series with these labels; there must be at least one."""
        found = [each.value for each in self.samples if each.name == name and labels.items() <= each.labels.items()]
        assert found, f"no {name} with {labels}"
        return sum(found)

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """Returns the series that are not 0, by a label's value."""
        series = (each for each in self.samples if each.name == name and labels.items() <= each.labels.items())
        return {each.labels[label]: each.value for each in series if each.value}

    def names(self, prefix: str) -> set[str]:
        return {each.name for each in self.samples if each.name.startswith(prefix)}

    def label_values(self, prefix: str) -> Iterator[tuple[str, str]]:
        for each in self.samples:
            if each.name.startswith(prefix):
                yield from each.labels.items()


def on_metrics_port(server: Server) -> Scrape:
    return Scrape(plain_http.get(f"http://{HOST}:{server.metrics_port}/metrics", timeout=30).raise_for_status().text)


def on_rest_port(server: Server) -> Scrape:
    return Scrape(plain_http.get(f"{server.url}/metrics", timeout=30).raise_for_status().text)


def settled(server: Server, condition: Callable[[Scrape], bool], seconds: float = 30.0) -> Scrape:
    """Waits until a scrape meets the condition: a request is counted just after its last byte is sent."""
    end = time.monotonic() + seconds
    while not condition(scrape := on_rest_port(server)):
        assert time.monotonic() < end, [each for each in scrape.samples if each.name.startswith("torch_stream_")]
        time.sleep(0.04)  # each look takes 10 ms of a core
    return scrape
