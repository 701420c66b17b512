"""The dashboard and the alert rules query metrics that a server exports, and get results."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deploy.monitoring import dashboard
from mlserver_torch_stream import client
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.free_port import free_port
from mlserver_torch_stream.server.observability.metrics import EngineMetrics, TokenMetrics, WeightsMetrics
from mlserver_torch_stream.server.observability.request_observer import RequestMetrics
from tests import plain_http
from tests.clients.environments import make_environment
from tests.server.harness import HOST, Model, Server, serve

_FOLDER = dashboard.FILE.parent
_PROMTOOL = shutil.which("promtool")
_PROMETHEUS = shutil.which("prometheus")
_SCRAPES_S = 60


def _rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((_FOLDER / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _series() -> set[str]:
    """Returns the names of all series that a server exports."""
    families = [
        *TokenMetrics(EngineMetrics(), RequestMetrics()).collect(),
        *WeightsMetrics(ProcessResources()).collect(),
    ]
    ends = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}
    return {family.name + end for family in families for end in ends[family.type]}


def test_the_dashboards_file_is_what_its_table_makes() -> None:
    assert json.loads(dashboard.FILE.read_text(encoding="utf-8")) == dashboard.dashboard()


@pytest.mark.parametrize("query", [*dashboard.queries(), *(rule["expr"] for rule in _rules())])
def test_each_query_names_series_that_a_server_exports(query: str) -> None:
    named = set(re.findall(r"torch_stream_\w+", query))
    assert named and named <= _series()


def test_each_rule_has_a_line_in_the_page() -> None:
    page = (_FOLDER.parent.parent / "docs" / "monitoring.md").read_text(encoding="utf-8")
    assert [rule["alert"] for rule in _rules()] == re.findall(r"^\| `(TorchStream\w+)`", page, re.MULTILINE)


@pytest.mark.skipif(_PROMTOOL is None, reason="promtool is not installed")
def test_each_rule_fires_on_its_own_fault_and_none_on_a_healthy_server() -> None:
    for command in (["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]):
        done = subprocess.run(
            [str(_PROMTOOL), *command], cwd=_FOLDER, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    tested = yaml.safe_load((_FOLDER / "alerts_test.yaml").read_text(encoding="utf-8"))["tests"]
    fired = {case["alertname"] for test in tested for case in test["alert_rule_test"] if case.get("exp_alerts")}
    assert fired == {rule["alert"] for rule in _rules()}


@pytest.mark.slow
def test_grafanas_own_types_read_the_dashboard(tmp_path: Path) -> None:
    python = make_environment(tmp_path, "grafana")
    reads = (
        "import json, sys\n"
        "from grafana_foundation_sdk.models.dashboard import Dashboard\n"
        "read = Dashboard.from_json(json.load(open(sys.argv[1])))\n"
        "print(sum(panel.type_val != 'row' for panel in read.panels), len(read.templating.list_val))\n"
    )
    done = subprocess.run(
        [str(python), "-c", reads, str(dashboard.FILE)], capture_output=True, text=True, timeout=60, check=False
    )
    panels = sum(map(len, dashboard.ROWS.values()))
    assert (done.returncode, done.stdout.split()) == (0, [str(panels), "3"]), done.stderr


@pytest.fixture(scope="module")
def scraped(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    """A server, and the address of a Prometheus that scrapes it every second."""
    folder = tmp_path_factory.mktemp("monitoring")
    with serve(
        folder / "models", [Model("tiny", str(tiny_model), extra={"speculative": {"prompt_lookup": 4}})]
    ) as server:
        port = free_port(HOST)
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(_FOLDER / "alerts.yaml")],
            "scrape_configs": [
                {"job_name": "tiny", "static_configs": [{"targets": [f"{HOST}:{server.metrics_port}"]}]}
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
        arguments = [
            str(_PROMETHEUS),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={HOST}:{port}",
        ]
        with (folder / "prometheus.log").open("wb") as log:
            process = subprocess.Popen(arguments, stdout=log, stderr=log)
            try:
                yield server, f"http://{HOST}:{port}"
            finally:
                process.terminate()
                process.wait(timeout=30)


def _ask(prometheus: str, query: str) -> list[dict[str, Any]]:
    try:
        answer = plain_http.get(f"{prometheus}/api/v1/query", params={"query": query}, timeout=10)
    except httpx.TransportError:  # it has not begun to listen
        return []
    if answer.status_code == 503:  # it reads its storage
        return []
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["data"]["result"]
    return found


@pytest.mark.slow
@pytest.mark.skipif(_PROMETHEUS is None, reason="Prometheus is not installed")
def test_prometheus_answers_every_query_of_the_dashboard(scraped: tuple[Server, str]) -> None:
    server, prometheus = scraped
    variables = {"$model": "tiny", "$instance": ".*", "$__rate_interval": "1m"}
    open_queries = dashboard.queries()
    end = time.monotonic() + _SCRAPES_S
    while open_queries and time.monotonic() < end:
        list(client.stream(server.url, "tiny", "one two one two one two", max_tokens=40, ignore_eos=True))
        open_queries = [query for query in open_queries if not _ask(prometheus, _filled(query, variables))]
        time.sleep(1)
    assert open_queries == []
    assert _ask(prometheus, 'ALERTS{alertstate="firing"}') == []


def _filled(query: str, variables: dict[str, str]) -> str:
    for name, value in variables.items():
        query = query.replace(name, value)
    return query
