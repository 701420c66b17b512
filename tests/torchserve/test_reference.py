"""docs/torchserve-reference.md, row by row: what its tables say of a call, a name or a key is true."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mlserver_torch_stream.errors import LoadFailed, SettingsError
from mlserver_torch_stream.handlers.config.archive import open_archive
from mlserver_torch_stream.handlers.config.model_config import KEYS, not_honoured, read_config
from mlserver_torch_stream.handlers.config.properties import (
    CARRIED,
    ELSEWHERE,
    METRICS_CONFIG,
    carried,
    not_carried_over,
    read_properties,
)
from mlserver_torch_stream.handlers.config.server_config import HONOURED, ServerConfig
from mlserver_torch_stream.handlers.pool.handler_request import HandlerRequest, RequestPart
from mlserver_torch_stream.handlers.worker.handler import BUILT_IN
from tests.torchserve.workshop import run, running, write_handler

_PAGE = Path(__file__).parent.parent.parent / "docs/torchserve-reference.md"
_VERDICTS = {"supported", "package", "named", "refused", "carried over", "honoured", "ignored"}
both = pytest.mark.parametrize("which", ["shim", pytest.param("package", marks=pytest.mark.slow)])


@cache
def _table(section: str) -> Mapping[str, tuple[str, str]]:
    """Returns for each key of a section what the page says of it, and its note. `a` with `b` are one key."""
    text = _PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]
    found = {}
    for keys, verdict, *note in rows[1:]:
        assert verdict in _VERDICTS, keys
        for key in re.findall(r"`[^`]+`(?: with `[^`]+`)?", keys):
            assert key not in found, key
            found[key.replace("`", "")] = (verdict, " ".join(note))
    assert found, section
    return found


def _keys(section: str, verdict: str) -> set[str]:
    return {key for key, (said, _) in _table(section).items() if said == verdict}


# --- what a handler calls: each row is evaluated in a handler, and has a value ---

_EVALUATES = """
import json
from ts.handler_utils.utils import send_intermediate_predict_response as send
from ts.metrics.metric_type_enum import MetricTypes

def handle(data, context):
    if data is None:
        context.cache, context.kv_cache = {"made": "at load"}, [1]
        return None
    names = {**globals(), "context": context}
    return [{name: eval(expression, names) for name, expression in data[0]["body"].items()}]
"""
_CONTEXT: Mapping[str, tuple[str, Any]] = {
    "model_name": ("context.model_name", "model"),
    "manifest": ("context.manifest['model']['handler']", "handler.py"),
    "model_yaml_config": ("context.model_yaml_config", {"batchSize": 2, "maxBatchDelay": 0, "mine": [1]}),
    "system_properties": (
        "{name: value for name, value in context.system_properties.items()"
        " if name not in ('model_dir', 'server_version')}",
        {"gpu_id": None, "batch_size": 2, "server_name": "MMS", "limit_max_image_pixels": True},
    ),
    "request_ids": ("context.request_ids[0]", "r-1"),
    "get_request_id": ("context.get_request_id(0)", "r-1"),
    "get_request_header": ("[context.get_request_header(0, name) for name in ('x-from', 'none')]", ["me", None]),
    "get_all_request_header": ("context.get_all_request_header(0)['x-from']", "me"),
    "request_processor": ("context.request_processor[0].get_request_property('x-from')", "me"),
    "get_sequence_id": ("context.get_sequence_id(0)", "s-1"),
    "header_key_sequence_id": ("context.header_key_sequence_id", "ts_request_sequence_id"),
    "header_key_sequence_start": ("context.header_key_sequence_start", "ts_request_sequence_start"),
    "header_key_sequence_end": ("context.header_key_sequence_end", "ts_request_sequence_end"),
    "set_response_content_type": ("context.set_response_content_type(0, 'application/json')", None),
    "get_response_content_type": ("context.get_response_content_type(0)", "application/json"),
    "set_response_header": ("context.set_response_header(0, 'x-mine', 'yes')", None),
    "get_response_headers": ("context.get_response_headers(0)['x-mine']", "yes"),
    "set_response_status": ("context.set_response_status(201, 'made', 0)", None),
    "get_response_status": ("context.get_response_status(0)", [201, "made"]),
    "set_all_response_status": ("context.set_all_response_status(202) or context.get_response_status(0)[0]", 202),
    "metrics": ("context.metrics.model_name", "model"),
    "cache": ("context.cache", {"made": "at load"}),
    "kv_cache": ("context.kv_cache", [1]),
    "stopping_criteria": ("context.stopping_criteria", None),
    "cl_socket": ("send(['ahead'], context.request_ids, 'ok', 200, context)", None),
}
_METRICS: Mapping[str, tuple[str, Any]] = {
    "add_metric": ("context.metrics.add_metric('Any', 3, 'count', metric_type=MetricTypes.GAUGE)", None),
    "add_counter": ("context.metrics.add_counter('Counter', 2)", None),
    "add_time": ("context.metrics.add_time('Time', 1.5, unit='s')", None),
    "add_size": ("context.metrics.add_size('Size', 4, unit='kB')", None),
    "add_percent": ("context.metrics.add_percent('Percent', 50)", None),
    "add_error": ("context.metrics.add_error('Error', 1)", None),
    "get_metric": ("context.metrics.get_metric('HandlerTime', MetricTypes.GAUGE).metric_name", "HandlerTime"),
    "add_metric_to_cache": (
        "context.metrics.add_metric_to_cache('Own', 'ms', ['A'], MetricTypes.HISTOGRAM).add_or_update(7, ['x'])",
        None,
    ),
    "cache": ("'Own' in context.metrics.cache[MetricTypes.HISTOGRAM]", True),
    "set_request_ids": ("context.metrics.set_request_ids({0: 'r-1'})", None),
}
_SHOWN = {
    ("Any", "gauge"): 3.0,
    ("Counter", "counter"): 2.0,
    ("Time", "gauge"): 1.5,
    ("Size", "gauge"): 4.0,
    ("Percent", "gauge"): 50.0,
    ("Error", "counter"): 1.0,
    ("Own", "histogram"): 7.0,
}


@both
def test_the_context_and_its_metrics_have_what_the_page_says(tmp_path: Path, which: str) -> None:
    assert set(_CONTEXT) == _keys("Context", "supported") == set(_table("Context"))
    assert set(_METRICS) == _keys("Metrics", "supported") == set(_table("Metrics"))
    calls = {f"context {name}": call for name, call in _CONTEXT.items()}
    calls |= {f"metrics {name}": call for name, call in _METRICS.items()}
    body = json.dumps({name: expression for name, (expression, _) in calls.items()}).encode()
    config = {"batchSize": 2, "maxBatchDelay": 0, "mine": [1]}
    headers = {"x-from": "me", "ts_request_sequence_id": "s-1"}

    async def scenario() -> None:
        async with running(write_handler(tmp_path, _EVALUATES, config), which) as pool:
            asked = HandlerRequest("r-1", [RequestPart("body", "application/json", body)], headers)
            ahead, last = [piece async for piece in pool.submit(asked)]
            assert ahead.value == b"ahead"
            assert json.loads(last.value) == {name: value for name, (_, value) in calls.items()}
            assert (last.content_type, last.status, last.headers) == ("application/json", 202, {"x-mine": "yes"})
            shown = {(name, kind): total for (name, kind, _), (_, total) in pool.metrics.own.items()}
            assert {key: shown.get(key) for key in _SHOWN} == _SHOWN

    run(scenario())


@pytest.mark.long
@both
def test_what_can_be_imported_is_what_the_page_says(which: str) -> None:
    table = _table("Imports")
    program = f"""
import importlib, importlib.util, json
from mlserver_torch_stream.handlers.worker.handler import provide_ts
provide_ts({which!r})

def there(path):
    try:
        return bool(path) and importlib.util.find_spec("ts." + path) is not None
    except ModuleNotFoundError:
        return False

def has(path):
    if there(path):
        return True
    module, _, name = path.rpartition(".")
    return there(module) and hasattr(importlib.import_module("ts." + module), name)

print("@" + json.dumps({{path: has(path) for path in {sorted(table)!r}}}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.rpartition("@")[2])
    assert found == {path: which == "package" or verdict == "supported" for path, (verdict, _) in table.items()}


def test_handlers_of_torchserves_own_are_those_of_the_page() -> None:
    """test_built_in and test_bad_handlers test that they run or are refused."""
    assert set(_table("Handlers of TorchServe's own")) == set(BUILT_IN)


# --- keys: of a manifest, of a YAML, of the environment ---


def _archive(folder: Path, manifest: Mapping[str, Any]) -> str:
    (folder / "MAR-INF").mkdir(parents=True, exist_ok=True)
    (folder / "MAR-INF/MANIFEST.json").write_text(json.dumps(manifest))
    (folder / "config.yaml").write_text("batchSize: 3")
    (folder / "weights").write_text("w")
    (folder / "h.py").write_text(
        "def handle(data, context):\n    return None if data is None else [[data, context.manifest['model']]]"
    )
    return str(folder)


def test_the_manifest_means_what_the_page_says(tmp_path: Path) -> None:
    """test_import_mar tests that `import-mar` keeps name and version and names the requirements."""
    model = {
        "modelName": "m",
        "modelVersion": "1",
        "handler": "h.py",
        "modelFile": "model.py",
        "serializedFile": "weights",
        "configFile": "config.yaml",
        "envelope": "body",
        "requirementsFile": "requirements.txt",
    }
    manifest = {"runtime": "python3", "model": model, "createdOn": "today", "archiverVersion": "0.12.0"}
    given = {*manifest, *(f"model.{key}" for key in model)} - {"model"}
    assert given == set(_table("Manifest"))
    with pytest.raises(LoadFailed, match="runtime 'LSP'"):
        open_archive(_archive(tmp_path, {**manifest, "runtime": "LSP"}), None)

    async def scenario() -> None:
        async with running(_archive(tmp_path, manifest)) as pool:
            (piece,) = [p async for p in pool.submit(HandlerRequest("r", [RequestPart("body", "text/plain", b"x")]))]
            assert json.loads(piece.value) == [["x"], model] and pool.config.batchSize == 3
        with pytest.raises(
            LoadFailed, match="unknown envelope 'paper'; the envelopes are body, json, kserve, kservev2"
        ):
            async with running(_archive(tmp_path, {**manifest, "model": {**model, "envelope": "paper"}})):
                pass

    run(scenario())


_YAML: Mapping[str, Any] = {
    "deviceType": "cpu",
    "deviceIds": [1, 2],
    "parallelType": "pptp",
    "useJobTicket": True,
    "continuousBatching": True,
    "sequenceBatching": True,
    "asyncCommunication": True,
    "useVenv": True,
    "torchrun.rdzv-backend": "c10d",
}


@pytest.mark.parametrize("key", sorted(_table("model-config.yaml")))
def test_a_key_of_the_yaml_means_what_the_page_says(key: str) -> None:
    verdict, _ = _table("model-config.yaml")[key]
    yaml: dict[str, Any] = {}
    for part in key.split(" with "):
        outer, _, inner = part.partition(".")
        value = _YAML.get(part, 2)
        yaml |= {outer: {inner: value}} if inner else {outer: value}
    if "parallelType with" in key:
        yaml["parallelLevel"] = 2
    if verdict == "refused":
        with pytest.raises(SettingsError, match=re.escape(key.rpartition(" with ")[2])):
            read_config(yaml, {})
        return
    config = read_config(yaml, {})
    named = [line.partition(":")[0] for line in not_honoured(yaml, config)]
    assert named == ([key] if verdict == "named" else [])
    if verdict == "supported" and key in KEYS:
        assert json.loads(json.dumps(getattr(config, key))) == yaml[key]
    elif verdict == "supported" and "." in key:
        assert config.torchrun is not None and 2 in config.torchrun.model_dump().values()


def test_the_page_has_all_keys_of_the_yaml() -> None:
    assert {key.partition(".")[0] for key in _table("model-config.yaml")} >= set(KEYS)


def test_the_environment_means_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """test_ranks tests the environment of ranks."""
    source = """
        import os

        def handle(data, context):
            if data is None:
                return None
            names = [context.header_key_sequence_id, context.header_key_sequence_start, context.header_key_sequence_end]
            return [[type(data[0]["body"]).__name__, context.get_sequence_id(0), names]]
    """
    variables = {"TS_DECODE_INPUT_REQUEST": "false"}
    variables |= {f"TS_REQUEST_SEQUENCE_{kind}": f"x-{kind}" for kind in ("ID", "START", "END")}
    ranks = {"LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    elsewhere = {"TS_METRICS_CONFIG"}  # test_metrics_config
    assert set(variables) | ranks | elsewhere == set(_table("Environment of the server"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    async def scenario() -> None:
        async with running(write_handler(tmp_path, source)) as pool:
            asked = HandlerRequest("r", [RequestPart("body", "application/json", b"{}")], {"x-ID": "s"})
            (piece,) = [p async for p in pool.submit(asked)]
            assert json.loads(piece.value) == ["bytearray", "s", ["x-ID", "x-START", "x-END"]]

    run(scenario())


# --- config.properties ---

_METRICS_FILE = "model_metrics: {counter: [{name: C, unit: count, dimensions: [Level]}]}"


def test_each_key_of_config_properties_is_carried_over_or_named_as_the_page_says() -> None:
    table = _table("config.properties")
    by_themselves = {"models", METRICS_CONFIG}  # test_import_mar
    assert set(table) == {*CARRIED, *ELSEWHERE, *by_themselves}
    for key, (verdict, note) in table.items():
        if key in by_themselves:
            continue
        given = {key: "7"}
        lines, extra = list(not_carried_over(given, "m", None)), carried(given, "m", None, {})
        if verdict == "carried over":
            assert note == f"`{CARRIED[key]}`" and extra == {CARRIED[key]: 7} and not lines
        else:
            assert verdict == "named" and lines == [f"{key}: {note}"] and not extra
    assert set(carried({key: "7" for key in CARRIED}, "m", None, {})) <= set(KEYS)


def test_each_key_of_a_servers_config_properties_is_what_the_page_says(tmp_path: Path) -> None:
    """test_layout tests that a key that is honoured has its effect."""
    table = _table("config.properties of a server")
    assert set(table) == set(_table("config.properties"))
    assert {key for key, (verdict, _) in table.items() if verdict == "honoured"} == HONOURED
    file = tmp_path / "config.properties"
    (tmp_path / "true").write_text(_METRICS_FILE)
    for key, (verdict, note) in table.items():
        file.write_text(f"{key}=true\n")
        if verdict == "refused":
            with pytest.raises(SettingsError, match=f"{key}: is not implemented: {note}"):
                ServerConfig.read(file, {}, {})
            continue
        lines = list(ServerConfig.read(file, {}, {}).ignored())
        expected = [f"{key}: ignored: {note}"] if verdict == "ignored" else []
        assert [line for line in lines if line.startswith(f"{key}:")] == expected, key


def test_each_key_has_the_variable_that_the_page_says(tmp_path: Path) -> None:
    text = _PAGE.read_text().partition("\n## config.properties of a server\n")[2].partition("Each key may be a")[2]
    without = set(re.findall(r"`([a-z_]+)`", text.partition("but not")[2].partition("as in TorchServe")[0]))
    without |= {"enable_envvars_config", "use_env_allowed_urls"}
    file = tmp_path / "config.properties"
    file.write_text("enable_envvars_config=true\nuse_env_allowed_urls=true\n")
    (tmp_path / "mine").write_text(_METRICS_FILE)
    for key, (verdict, _) in _table("config.properties of a server").items():
        if verdict == "refused":
            continue
        name = f"TS_{key.removeprefix('ts_').upper()}".replace("TOKEN_EXPIRATION_MIN", "TOKEN_EXPIRATION_TIME_MIN")
        assert (ServerConfig.read(file, {}, {name: "mine"}).properties.get(key) == "mine") == (key not in without), key


_PROPERTIES = """
# a comment that ends with \\
default_response_timeout = 30
default_workers_per_model: 0
! another
inference_address=http://0.0.0.0:8080
models={\\
  "m": {\\
    "1.0": {"defaultVersion": true, "marName": "m.mar", "minWorkers": 2, "batchSize": 8,\\
      "responseTimeout": 60, "odd": 1},\\
    "2.0": {"batchSize": 16}\\
  }\\
}
"""


def test_a_models_own_settings_beat_the_defaults_and_its_yaml_beats_both() -> None:
    given = read_properties(_PROPERTIES)
    assert given["inference_address"] == "http://0.0.0.0:8080"
    assert carried(given, "m", "1.0", {}) == {"responseTimeout": 60, "minWorkers": 2, "batchSize": 8}
    assert carried(given, "m", "1.0", {"batchSize": 1}) == {"responseTimeout": 60, "minWorkers": 2}
    assert carried(given, "m", "2.0", {}) == {"responseTimeout": 30, "batchSize": 16}
    assert carried(given, "other", None, {}) == {"responseTimeout": 30}
    lines = list(not_carried_over(given, "m", "1.0"))
    assert [line.partition(":")[0] for line in lines] == ["inference_address", "models.m.odd"]
    assert list(not_carried_over({"paper": "1"}, "m", None)) == ["paper: TorchServe 0.12 does not know it either"]


def test_what_java_reads_is_read() -> None:
    assert read_properties("a=\\ud83d\\ude00") == {"a": "😀"}
    text = "a\\ b = c\\\\\nd:e\\u0041\n  f   g h  \nempty=\ni=\\ x\\ty\n"
    expected = {"a b": "c\\", "d": "eA", "f": "g h  ", "empty": "", "i": " x\ty"}
    assert read_properties(text) == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"default_response_timeout": "soon"}, "default_response_timeout: must be a whole number, got 'soon'"),
        ({"models": "[1]"}, "models: must be a JSON object"),
        ({"models": "{"}, "models: must be a JSON object"),
        ({"models": '{"m": {"1": 3}}'}, "models: must be a JSON object"),
    ],
)
def test_properties_that_are_wrong_are_named(given: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        carried(given, "m", "1", {})
