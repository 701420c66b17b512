"""Writes dashboard.json, the Grafana dashboard of the server's metrics: ``python deploy/monitoring/dashboard.py``.

The panels are in the table ``ROWS``; the rest is what Grafana requires around them. Units have Grafana's names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from string import ascii_uppercase
from typing import Any

FILE = Path(__file__).with_name("dashboard.json")
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_ONLY = '{model=~"$model", instance=~"$instance"}'
_WIDTH = 24  # of Grafana's grid


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel. ``queries`` has the PromQL of each legend, in which ``@`` stands for the selected models and servers.

    The axis ends at ``most``. ``kind`` is Grafana's name of the type; a ``stat`` shows only the last value.
    """

    title: str
    help: str
    unit: str
    queries: dict[str, str]
    kind: str = "timeseries"
    stacked: bool = False
    most: float | None = None
    thresholds: tuple[float, ...] = ()  # from the first on orange, from the second on red


def _rate(metric: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate(torch_stream_{metric}@[$__rate_interval]))"


def _sum(metric: str) -> str:
    return f"sum(torch_stream_{metric}@)"


def _quantiles(metric: str, *shares: float) -> dict[str, str]:
    buckets = _rate(f"{metric}_seconds_bucket", "le")
    return {f"p{share * 100:g}": f"histogram_quantile({share}, {buckets})" for share in shares}


ROWS: dict[str, list[Panel]] = {
    "At a glance": [
        Panel("Tokens per second", "Generated.", "short", {"tokens/s": _rate("generation_tokens_total")}, "stat"),
        Panel(
            "First token, p95",
            "The time from a request's start to its first event.",
            "s",
            _quantiles("time_to_first_token", 0.95),
            "stat",
            thresholds=(2, 5),
        ),
        Panel(
            "Between tokens, p99",
            "The time between two tokens of a sequence.",
            "s",
            _quantiles("inter_token_latency", 0.99),
            "stat",
            thresholds=(0.2, 0.5),
        ),
        Panel(
            "Waiting requests",
            "Prompts in the queue.",
            "short",
            {"waiting": _sum("waiting_requests")},
            "stat",
            thresholds=(1, 16),
        ),
        Panel(
            "KV cache",
            "The share of the budget that sequences hold; near 1 they are preempted.",
            "percentunit",
            {"held": f"{_sum('kv_cache_bytes')} / {_sum('kv_cache_budget_bytes')}"},
            "stat",
            thresholds=(0.8, 0.95),
        ),
        Panel(
            "Failed requests",
            "The share of requests that failed through the server's fault: 500, 503, 504.",
            "percentunit",
            {
                "failed": "sum(rate(torch_stream_request_errors_total"
                '{model=~"$model", instance=~"$instance", status_code=~"500|503|504|other"}[$__rate_interval])) / '
                + _rate("requests_total")
            },
            "stat",
            thresholds=(0.001, 0.01),
        ),
    ],
    "Requests": [
        Panel(
            "Requests per second, by their end",
            "A request has the finish reason of its worst sequence; refused requests never reached the engine.",
            "reqps",
            {"{{finish_reason}}": _rate("requests_total", "finish_reason")},
            stacked=True,
        ),
        Panel(
            "In the server",
            "Sequences that decode; prompts that are computed, that wait, or that still arrive.",
            "short",
            {
                "decoding": _sum("running_sequences"),
                "prefilling": _sum("prefilling_requests"),
                "waiting": _sum("waiting_requests"),
                "prompts still arriving": _sum("open_prompts"),
            },
        ),
    ],
    "Latency": [
        Panel(
            "To the first token",
            "The time in the queue and for the prompt.",
            "s",
            _quantiles("time_to_first_token", 0.5, 0.95, 0.99),
        ),
        Panel(
            "Between tokens",
            "The time between two tokens of a sequence.",
            "s",
            _quantiles("inter_token_latency", 0.5, 0.95, 0.99),
        ),
        Panel(
            "In the queue",
            "The time before the prompt is computed.",
            "s",
            _quantiles("request_queue_time", 0.5, 0.95, 0.99),
        ),
        Panel(
            "Whole requests",
            "The time from a request's start to its last event.",
            "s",
            _quantiles("e2e_request_latency", 0.5, 0.95, 0.99),
        ),
    ],
    "Work": [
        Panel(
            "Tokens per second",
            "Prompt tokens are computed, or found in the prefix cache.",
            "short",
            {
                "generated": _rate("generation_tokens_total"),
                "of prompts, computed": _rate("prefill_tokens_total"),
                "of prompts, from the prefix cache": _rate("prefix_cache_hit_tokens_total"),
            },
        ),
        Panel(
            "Tokens per step",
            "How many sequences share a decode step.",
            "short",
            {"tokens/step": f"{_rate('generation_tokens_total')} / {_rate('decode_steps_total')}"},
        ),
        Panel(
            "Hits",
            "The shares of prompt tokens that the prefix cache held, and of prompt lookup's drafts that were right.",
            "percentunit",
            {
                "prefix cache": f"{_rate('prefix_cache_hit_tokens_total')} / "
                f"({_rate('prefix_cache_hit_tokens_total')} + {_rate('prefill_tokens_total')})",
                "drafts": f"{_rate('accepted_draft_tokens_total')} / {_rate('draft_tokens_total')}",
            },
            most=1,
        ),
        Panel(
            "KV cache",
            "Pages and states that sequences hold, pages that are kept for later prompts, and the budget.",
            "bytes",
            {
                "held": _sum("kv_cache_bytes"),
                "prefix cache": _sum("prefix_cache_bytes"),
                "budget": _sum("kv_cache_budget_bytes"),
            },
        ),
    ],
    "Trouble": [
        Panel(
            "Errors per second, by status",
            "The status is that of REST, for gRPC calls too.",
            "reqps",
            {"{{status_code}}": _rate("request_errors_total", "status_code")},
            stacked=True,
        ),
        Panel(
            "Interrupted sequences per second",
            "A preempted sequence is computed again and loses nothing.",
            "short",
            {
                "preempted": _rate("num_preemptions_total"),
                "cancelled": _rate("cancelled_sequences_total"),
                "timed out": _rate("timed_out_sequences_total"),
            },
        ),
        Panel(
            "Wasted tokens per second",
            "Decoded in a step that began after their client had left.",
            "short",
            {"wasted": _rate("wasted_tokens_total")},
        ),
        Panel(
            "Models and engines",
            "Fewer engines than models: an engine is dead, or models share one.",
            "short",
            {
                "loaded models": 'sum(torch_stream_loaded_models{instance=~"$instance"})',
                "engines": 'sum(torch_stream_engines{instance=~"$instance"})',
                "copies of weights": 'sum(torch_stream_loaded_weights{instance=~"$instance"})',
            },
        ),
    ],
}


def queries() -> list[str]:
    """Returns the PromQL of all panels, with Grafana's variables."""
    return [query.replace("@", _ONLY) for panel in chain(*ROWS.values()) for query in panel.queries.values()]


def dashboard() -> dict[str, Any]:
    """Returns the dashboard in the format that Grafana imports, schema version 39 (Grafana 11)."""
    return {
        "annotations": {"list": []},
        "description": "Streams of tokens on MLServer: load, latency, work and trouble.",
        "editable": True,
        "graphTooltip": 1,
        "links": [],
        "panels": _panels(),
        "refresh": "10s",
        "schemaVersion": 39,
        "tags": ["mlserver", "llm"],
        "templating": {"list": [_source(), _variable("model", "model"), _variable("instance", "server")]},
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "title": "mlserver-torch-stream",
        "uid": "mlserver-torch-stream",
        "version": 1,
    }


def _panels() -> list[dict[str, Any]]:
    built: list[dict[str, Any]] = []
    top = 0
    for title, panels in ROWS.items():
        built.append(_placed({"type": "row", "title": title, "collapsed": False, "panels": []}, 0, top, _WIDTH, 1))
        height = 4 if panels[0].kind == "stat" else 8
        width = _WIDTH // len(panels)
        for column, panel in enumerate(panels):
            built.append(_placed(_panel(panel), column * width, top + 1, width, height))
        top += height + 1
    return [{"id": number, **panel} for number, panel in enumerate(built, 1)]


def _placed(panel: dict[str, Any], x: int, y: int, width: int, height: int) -> dict[str, Any]:
    return {**panel, "gridPos": {"x": x, "y": y, "w": width, "h": height}}


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "thresholds": _thresholds(panel.thresholds)}
    if panel.most is not None:
        defaults["max"] = panel.most
    options: dict[str, Any] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"}
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        defaults["custom"] = {"fillOpacity": 30 if panel.stacked else 8, "showPoints": "never", "stacking": stacking}
        options = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    else:
        defaults["color"] = {"mode": "thresholds"}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {"refId": letter, "datasource": _SOURCE, "expr": query.replace("@", _ONLY), "legendFormat": legend}
            for letter, (legend, query) in zip(ascii_uppercase, panel.queries.items(), strict=False)
        ],
    }


def _thresholds(values: tuple[float, ...]) -> dict[str, Any]:
    steps = [{"color": color, "value": value} for color, value in zip(("orange", "red"), values, strict=False)]
    return {"mode": "absolute", "steps": [{"color": "green", "value": None}, *steps]}


def _source() -> dict[str, Any]:
    return {"type": "datasource", "name": "datasource", "label": "Prometheus", "query": "prometheus"}


def _variable(label: str, shown: str) -> dict[str, Any]:
    query = f"label_values(torch_stream_running_sequences, {label})"
    return {
        "type": "query",
        "name": label,
        "label": shown,
        "datasource": _SOURCE,
        "definition": query,
        "query": {"query": query, "refId": label},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=2) + "\n", encoding="utf-8")
