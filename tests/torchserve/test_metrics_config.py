"""``metrics.yaml``: a handler finds its metrics where TorchServe's configuration says so, and they come to /metrics."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from mlserver_torch_stream.cli import main
from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.handlers.config.model_config import read_config
from mlserver_torch_stream.handlers.config.worker_settings import find_worker_files
from mlserver_torch_stream.handlers.pool.handler_metrics import HandlerMetrics, HandlerMetricsCollector
from tests.torchserve.workshop import HELLO, ask, run, running, until, write_handler, write_mar

both = pytest.mark.parametrize("which", ["shim", pytest.param("package", marks=pytest.mark.slow)])
METRICS = """
dimensions:
  - &model_name "ModelName"
  - &level "Level"

ts_metrics:
  counter:
    - name: Requests2XX
      unit: Count
      dimensions: [*level, "Hostname"]

model_metrics:
  counter:
    - name: InitializeCallCount
      unit: count
      dimensions: [*model_name, *level]
    - name: InferenceRequestCount
      unit: count
      dimensions: []
  gauge:
    - name: RequestBatchSize
      unit: count
      dimensions: ["ModelName"]
    - name: SizeOfImage
      unit: kB
      dimensions: [*model_name, *level]
  histogram:
    - name: Steps
      unit: count
      dimensions: ["Method"]
"""
# What TorchServe's own example of custom metrics calls, and one that is in no file.
HANDLER = """
from ts.metrics.dimension import Dimension
from ts.metrics.metric_type_enum import MetricTypes

def handle(data, context):
    metrics = context.metrics
    if data is None:
        metrics.add_metric(name="InitializeCallCount", value=1, unit="count", metric_type=MetricTypes.COUNTER)
        return None
    metrics.get_metric("InferenceRequestCount").add_or_update(value=1, dimension_values=[])
    size = metrics.get_metric(metric_name="RequestBatchSize", metric_type=MetricTypes.GAUGE)
    size.add_or_update(value=len(data), dimension_values=[context.model_name])
    metrics.add_size(name="SizeOfImage", value=2.5, idx=None, unit="kB")
    for value in (3, 4):
        metrics.get_metric("Steps", MetricTypes.HISTOGRAM).add_or_update(value, ["a, b: c"])
    metrics.add_time("Own", 7.0, None, "ms", [Dimension("MethodName", "preprocess")], MetricTypes.GAUGE)
    return [sorted(metric.value for metric in metrics.cache)]
"""
_SHOWN = {
    'torchserve_InitializeCallCount_total{Level="Model",ModelName="model",model="m",version=""} 1.0',
    'torchserve_InferenceRequestCount_total{model="m",version=""} 1.0',
    'torchserve_RequestBatchSize{ModelName="model",model="m",version=""} 1.0',
    'torchserve_SizeOfImage{Level="Model",ModelName="model",model="m",version=""} 2.5',
    'torchserve_Steps_count{Method="a, b: c",model="m",version=""} 2.0',
    'torchserve_Steps_sum{Method="a, b: c",model="m",version=""} 7.0',
    'torchserve_Own{Level="Model",MethodName="preprocess",ModelName="model",model="m",version=""} 7.0',
}


@both
def test_a_handler_finds_the_metrics_of_the_file_and_all_that_it_adds_is_shown(tmp_path: Path, which: str) -> None:
    (tmp_path / "m.yaml").write_text(METRICS)
    figures = HandlerMetricsCollector()

    async def scenario() -> None:
        settings = {"metrics_config": str(tmp_path / "m.yaml")}
        async with running(write_handler(tmp_path, HANDLER), which, settings, metrics=figures.of("m", None)) as pool:
            assert json.loads((await ask(pool))[0]) == ["counter", "gauge", "histogram"]

    run(scenario())
    registry = CollectorRegistry()
    registry.register(figures)
    shown = set(generate_latest(registry).decode().splitlines())
    assert not _SHOWN - shown


def test_the_environment_names_the_file_where_the_model_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("server", "own"):
        text = f"model_metrics: {{gauge: [{{name: {name}, unit: ms, dimensions: []}}]}}"
        (tmp_path / f"{name}.yaml").write_text(text)
    monkeypatch.setenv("TS_METRICS_CONFIG", str(tmp_path / "server.yaml"))

    def names(**extra: str) -> list[str]:
        config = find_worker_files(read_config({}, extra), str(tmp_path)).metrics
        return [each["name"] for each in config["model_metrics"]["gauge"]]

    assert names() == ["server"]
    assert names(metrics_config="own.yaml") == ["own"]
    monkeypatch.delenv("TS_METRICS_CONFIG")
    assert names() == ["HandlerTime", "PredictionTime"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ts_metrics: {}", "has no model_metrics"),
        (
            "model_metrics: {summary: []}",
            "model_metrics.summary: the type of a metric must be one of counter, gauge, hist",
        ),
        ("model_metrics: {gauge: {}}", "model_metrics.gauge: must be a list"),
        ("model_metrics: {gauge: [{name: a, unit: ms}]}", r"gauge\[0\].dimensions: must be a list, got None"),
        ("model_metrics: {gauge: [{name: a, unit: ms, dimensions: [1]}]}", r"gauge\[0\].dimensions: .* names, got \[1"),
        ("model_metrics: [", "while parsing"),
    ],
)
def test_a_file_that_is_wrong_is_named_with_the_place(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "m.yaml").write_text(text)
    with pytest.raises(SettingsError, match=rf"(?s)parameters.extra.metrics_config: .*m.yaml: .*{said}"):
        find_worker_files(read_config({}, {"metrics_config": "m.yaml"}), str(tmp_path))


@pytest.mark.parametrize(("given", "said"), [("none.yaml", "no such file: none.yaml"), (3, "a valid string")])
def test_a_file_that_is_not_there_is_named(tmp_path: Path, given: object, said: str) -> None:
    with pytest.raises(SettingsError, match=f"parameters.extra.+metrics_config: .*{said}"):
        find_worker_files(read_config({}, {"metrics_config": given}), str(tmp_path))


def test_import_mar_takes_the_servers_file_along(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "given.yaml").write_text(METRICS)
    properties = tmp_path / "config.properties"
    properties.write_text("metrics_mode=prometheus\nmetrics_config=given.yaml\n")
    mar = write_mar(tmp_path / "a.mar", {"h.py": HELLO}, {"modelName": "ok", "handler": "h.py"})
    command = ["import-mar", mar, "--into", str(tmp_path / "models"), "--properties", str(properties)]
    assert main(command) == 0
    folder = tmp_path / "models/ok"
    extra = json.loads((folder / "model-settings.json").read_text())["parameters"]["extra"]
    assert extra == {"metrics_config": "./metrics.yaml"}
    assert "Steps" in str(find_worker_files(read_config({}, extra), str(folder)).metrics)
    said = capsys.readouterr().out
    assert "not carried over from config.properties: metrics_mode" in said
    assert "not carried over from config.properties: metrics_config" not in said
    (tmp_path / "given.yaml").unlink()
    assert main([*command, "--name", "other"]) == 1
    assert "config.properties: metrics_config: no such file: given.yaml" in capsys.readouterr().err
    assert not (tmp_path / "models/other").exists()


@both
def test_a_value_that_is_no_number_is_a_line_of_the_log_and_fails_no_request(
    tmp_path: Path, which: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    source = """
        def handle(data, context):
            if data is None:
                return None
            context.metrics.add_error("Wrong", "a \\x1b text", [])
            context.metrics.add_counter("Calls", None)
            context.metrics.add_percent("Used", 10**400)
            context.metrics.add_counter("Calls", "2")
            return ["answered"] * len(data)
    """

    async def scenario() -> None:
        metrics = HandlerMetrics()
        async with running(write_handler(tmp_path, source), which, metrics=metrics) as pool:
            assert await ask(pool) == ["answered"]
            await until(lambda: "Metric Used" in caplog.text)
        assert {name: total for (name, _, _), (_, total) in metrics.own.items() if name != "PredictionTime"} == {
            "Calls": 2.0
        }

    run(scenario())
    assert (
        r"Metric Wrong: 'a \x1b text' is not a number" in caplog.text
        and "Metric Calls: None is not a number" in caplog.text
    )
