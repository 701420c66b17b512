"""``serve-torchserve``: MLServer gets the settings that a model store and a config.properties define."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mlserver_torch_stream.cli import main, serve_torchserve
from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.handlers.config.model_config import not_honoured, read_config
from mlserver_torch_stream.handlers.config.server_config import HONOURED, ServerConfig
from tests.torchserve.workshop import HELLO, write_mar

_YAML = "batchSize: 4\n"
_METRICS = "model_metrics:\n  counter:\n    - {name: C, unit: count, dimensions: [Level]}\n"


@pytest.fixture(autouse=True)
def _nothing_of_the_tests_own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TS_CONFIG_FILE", "MLSERVER_HTTP_PORT", "MLSERVER_HOST", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def _mar(folder: Path, file: str, name: str | None, version: str | None = "1.0", yaml: str | None = None) -> None:
    store = folder / "model-store"
    store.mkdir(parents=True, exist_ok=True)
    model: dict[str, Any] = {"handler": "h.py", "modelName": name, "modelVersion": version}
    model["configFile"] = "c.yaml" if yaml else None
    files = {"h.py": HELLO, "nested/big.bin": "x"} | ({"c.yaml": yaml} if yaml else {})
    write_mar(store / file, files, {key: value for key, value in model.items() if value is not None})


def _properties(folder: Path, text: str) -> None:
    (folder / "config").mkdir(parents=True, exist_ok=True)
    (folder / "config/config.properties").write_text(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model store with two models, one of them in two versions."""
    folder = tmp_path / "models"
    _mar(folder, "cat-1.mar", "cat", "1.0", _YAML)
    _mar(folder, "cat-2.mar", "cat", "2.0")
    _mar(folder, "dog.mar", "dog")
    return folder


def _prepared(folder: Path, *typed: str) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Returns the settings by name and version, MLServer's variables, and the lines for the user."""
    arguments = serve_torchserve._parser().parse_args([str(folder), *typed])
    into = folder.parent / "written"
    into.mkdir()
    variables, lines = serve_torchserve.prepare(arguments, into)
    settings = [json.loads(path.read_text()) for path in sorted(into.rglob("model-settings.json"))]
    shutil.rmtree(into)
    by_name = {f"{each['name']} {each['parameters'].get('version')}": each["parameters"] for each in settings}
    return by_name, variables, lines


def _extra(folder: Path, model: str, properties: str, *typed: str) -> dict[str, Any]:
    _properties(folder, properties)
    found: dict[str, Any] = _prepared(folder, *typed)[0][model].get("extra", {})
    return found


def test_a_folder_without_a_configuration_is_served_whole_on_this_machine_alone(folder: Path) -> None:
    settings, variables, lines = _prepared(folder)
    store = folder / "model-store"
    assert {model: each["uri"] for model, each in settings.items()} == {
        "cat 1.0": str(store / "cat-1.mar"),
        "cat 2.0": str(store / "cat-2.mar"),
        "dog 1.0": str(store / "dog.mar"),
    }
    assert not any("extra" in each for each in settings.values())
    assert variables == {
        "MLSERVER_HOST": "127.0.0.1",
        "MLSERVER_HTTP_PORT": "8080",
        "MLSERVER_GRPC_PORT": "8081",
        "MLSERVER_METRICS_PORT": "8082",
        "MLSERVER_TORCH_STREAM_GRPC_PORT_TORCHSERVE": "7070",
        "MLSERVER_PARALLEL_WORKERS": "0",
        "MLSERVER_GZIP_ENABLED": "false",
        "MLSERVER_DEBUG": "false",
        "MLSERVER_TORCH_STREAM_SKIP_FAILED_MODELS": "true",
        "MLSERVER_MODEL_REPOSITORY_IMPLEMENTATION": "mlserver_torch_stream.GuardedModelRepository",
    }
    assert lines[0] == "configuration: TorchServe's defaults, no file"
    assert f"model dog 1.0: {store / 'dog.mar'}" in lines


def test_archives_are_chosen_and_named_as_torchserve_does(folder: Path) -> None:
    """Includes an archive without name and version, an unpacked one, and files that are not archives."""
    _mar(folder, "plain.mar", None, None)
    unpacked = folder / "model-store/open"
    (unpacked / "MAR-INF").mkdir(parents=True)
    (unpacked / "MAR-INF/MANIFEST.json").write_text(json.dumps({"model": {"handler": "h.py", "modelName": "open"}}))
    for stray in (".hidden.mar", "notes.txt"):
        (folder / "model-store" / stray).write_text("x")
    (folder / "model-store/lost+found").mkdir()
    everything = {"cat 1.0", "cat 2.0", "dog 1.0", "plain 1.0", "open 1.0"}
    assert set(_prepared(folder)[0]) == everything
    for value, models in (
        ("ALL", everything),
        ("dog.mar", {"dog 1.0"}),
        ("pet=dog.mar, cat-2.mar", {"pet 1.0", "cat 2.0"}),
        ("open", {"open 1.0"}),
    ):
        _properties(folder, f"load_models={value}\n")
        assert set(_prepared(folder)[0]) == models, value
    assert set(_prepared(folder, "--models", "pet=dog.mar", "cat-1.mar")[0]) == {"pet 1.0", "cat 1.0"}


def test_what_models_says_is_weaker_than_the_archives_yaml_and_stronger_than_defaults(folder: Path) -> None:
    own = {"minWorkers": 2, "maxWorkers": 3, "batchSize": 8, "maxBatchDelay": 50, "responseTimeout": 60, "marName": "x"}
    models = json.dumps({"cat": {"1.0": {**own, "defaultVersion": True}, "2.0": {"batchSize": 2, "minWorkers": 0}}})
    text = f"models={models}\ndefault_response_timeout=30\ndefault_startup_timeout=40\ndefault_workers_per_model=5\n"
    _properties(folder, text)
    settings = _prepared(folder)[0]
    assert settings["cat 1.0"]["extra"] == {
        "responseTimeout": 60,
        "startupTimeout": 40,
        "minWorkers": 2,
        "maxWorkers": 3,
        "maxBatchDelay": 50,
        "defaultVersion": True,
    }
    defaults = {"responseTimeout": 30, "startupTimeout": 40, "minWorkers": 5}
    assert settings["cat 2.0"]["extra"] == {**defaults, "batchSize": 2}
    assert settings["dog 1.0"]["extra"] == defaults


def test_a_snapshot_says_which_archives_there_are_and_beats_their_yaml(folder: Path) -> None:
    models = {"tiger": {"1.0": {"marName": "cat-1.mar", "defaultVersion": True, "minWorkers": 1, "batchSize": 16}}}
    snapshot = json.dumps({"name": "startup.cfg", "modelCount": 1, "models": models})
    _properties(folder, f"load_models=all\nmodel_snapshot={snapshot}\n")
    settings = _prepared(folder)[0]
    assert set(settings) == {"tiger 1.0"}
    assert settings["tiger 1.0"]["extra"] == {"minWorkers": 1, "batchSize": 16, "defaultVersion": True}


# A value for each key that is honoured, and what it changes: a model's extra, or a variable.
_MODELS = '{"dog": {"1.0": {"batchSize": 2}}}'
_SNAPSHOT = '{"models": {"dog": {"1.0": {"marName": "dog.mar", "batchSize": 3}}}}'
_CORS = "MLSERVER_CORS_SETTINGS"
_PREFIX = "MLSERVER_TORCH_STREAM_"
_MANAGED = "management_address=http://127.0.0.1:8085\ndisable_token_authorization=true"
_EFFECTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "inference_address": ("http://0.0.0.0:8085", {"MLSERVER_HOST": "0.0.0.0", "MLSERVER_HTTP_PORT": "8085"}),
    "metrics_address": ("http://127.0.0.1:9", {"MLSERVER_METRICS_PORT": "9"}),
    "enable_metrics_api": ("false", {"MLSERVER_METRICS_ENDPOINT": ""}),
    "metrics_mode": ("Prometheus", {"MLSERVER_TORCH_STREAM_TORCHSERVE_METRIC_NAMES": "true"}),
    "grpc_inference_port": ("9", {"MLSERVER_TORCH_STREAM_GRPC_PORT_TORCHSERVE": "9"}),
    "grpc_inference_address": ("127.0.0.1", {"MLSERVER_HOST": "127.0.0.1"}),
    "max_request_size": (
        "99",
        {"MLSERVER_TORCH_STREAM_MAX_BODY_BYTES": "99", "MLSERVER_GRPC_MAX_MESSAGE_LENGTH": "99"},
    ),
    "cors_allowed_origin": ("https://a.org", {_CORS: '{"allow_origins": ["https://a.org"]}'}),
    "cors_allowed_methods": (
        "GET, POST\ncors_allowed_origin=*",
        {_CORS: '{"allow_origins": ["*"], "allow_methods": ["GET", "POST"]}'},
    ),
    "cors_allowed_headers": (
        "X-A\ncors_allowed_origin=*",
        {_CORS: '{"allow_origins": ["*"], "allow_headers": ["X-A"]}'},
    ),
    "number_of_gpu": ("1", {"CUDA_VISIBLE_DEVICES": "4"}),
    "decode_input_request": ("false", {"TS_DECODE_INPUT_REQUEST": "false"}),
    "ts_header_key_sequence_id": ("x-id", {"TS_REQUEST_SEQUENCE_ID": "x-id"}),
    "ts_header_key_sequence_start": ("x-start", {"TS_REQUEST_SEQUENCE_START": "x-start"}),
    "ts_header_key_sequence_end": ("x-end", {"TS_REQUEST_SEQUENCE_END": "x-end"}),
    "default_response_timeout": ("7", {"responseTimeout": 7}),
    "default_startup_timeout": ("7", {"startupTimeout": 7}),
    "default_workers_per_model": ("7", {"minWorkers": 7}),
    "job_queue_size": ("7", {"jobQueueSize": 7}),
    "metrics_config": ("{folder}/metrics.yaml", {"metrics_config": "{folder}/metrics.yaml"}),
    "service_envelope": ("kserve", {"service_envelope": "kserve"}),
    "limit_max_image_pixels": ("false", {"limit_max_image_pixels": False}),
    "blacklist_env_vars": (".*SECRET.*", {"blacklist_env_vars": ".*SECRET.*"}),
    "install_py_dep_per_model": ("true", {"install_py_dep_per_model": True}),
    "models": (_MODELS, {"batchSize": 2}),
    "model_snapshot": (_SNAPSHOT, {"batchSize": 3}),
    "load_models": ("dog=cat-1.mar", {"uri": "{folder}/model-store/cat-1.mar"}),
    "model_store": ("{folder}/other", {"uri": "{folder}/other/dog.mar"}),
    "enable_envvars_config": ("true", {"minWorkers": 9, "jobQueueSize": 9}),
    "use_env_allowed_urls": (f"true\nenable_envvars_config=true\n{_MANAGED}", {f"{_PREFIX}ALLOWED_URLS": "9"}),
    "management_address": (
        "http://0.0.0.0:8085\ndisable_token_authorization=true",
        {f"{_PREFIX}MANAGEMENT_PORT_TORCHSERVE": "8085", f"{_PREFIX}MANAGEMENT_ADDRESS": "0.0.0.0"},
    ),
    "enable_model_api": (f"true\n{_MANAGED}", {f"{_PREFIX}ENABLE_MODEL_API": "true"}),
    "allowed_urls": (f"https://a.org/.*\n{_MANAGED}", {f"{_PREFIX}ALLOWED_URLS": "https://a.org/.*"}),
    "disable_token_authorization": (f"true\n{_MANAGED}", {f"{_PREFIX}DISABLE_TOKEN_AUTHORIZATION": "true"}),
}


@pytest.mark.parametrize("key", sorted(HONOURED))
def test_each_key_that_is_honoured_has_an_effect(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    value, effect = _EFFECTS[key]
    value = value.replace("{folder}", str(folder))
    effect = json.loads(json.dumps(effect).replace("{folder}", str(folder)))
    (folder / "metrics.yaml").write_text(_METRICS)
    (folder / "other").mkdir()
    (folder / "other/dog.mar").write_bytes((folder / "model-store/dog.mar").read_bytes())
    if key == "number_of_gpu":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    if "enable_envvars_config" in key + value:
        for name in ("TS_DEFAULT_WORKERS_PER_MODEL", "TS_JOB_QUEUE_SIZE", "TS_ALLOWED_URLS"):
            monkeypatch.setenv(name, "9")
    config = tmp_path / "own.properties"
    store = "" if key == "model_store" else f"model_store={folder}/model-store\n"
    config.write_text(f"{store}{key}={value}\n")
    arguments = serve_torchserve._parser().parse_args(["--ts-config", str(config)])
    variables, lines = serve_torchserve.prepare(arguments, tmp_path / "written")
    dog = json.loads((tmp_path / "written/dog/1.0/model-settings.json").read_text())["parameters"]
    found = {**variables, **dog, **dog.get("extra", {})}
    assert {name: found.get(name) for name in effect} == effect
    assert not any(line.startswith(f"{key}:") for line in lines)


def test_variables_beat_the_command_line_which_beats_the_file_where_the_file_lets_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TS_LOAD_MODELS", "dog.mar")
    monkeypatch.setenv("TS_SERVICE_ENVELOPE", "kserve")
    monkeypatch.setenv("STORE", str(folder / "model-store"))
    _properties(folder, "load_models=cat-1.mar\nmodel_store=$$STORE$$\n")
    settings, _, lines = _prepared(folder, "--models", "cat-2.mar")
    assert list(settings) == ["cat 2.0"] and "extra" not in settings["cat 2.0"]
    assert "TS_LOAD_MODELS: ignored: enable_envvars_config is not true" in lines
    assert "TS_SERVICE_ENVELOPE: ignored: enable_envvars_config is not true" in lines
    _properties(folder, "load_models=cat-1.mar\nmodel_store=$$STORE$$\nenable_envvars_config=TRUE\n")
    settings, _, lines = _prepared(folder, "--models", "cat-2.mar")
    assert list(settings) == ["dog 1.0"] and settings["dog 1.0"]["extra"] == {"service_envelope": "kserve"}
    assert not any(line.startswith("TS_") for line in lines)
    monkeypatch.setenv("TS_CONFIG_FILE", str(folder / "other.properties"))
    (folder / "other.properties").write_text("load_models=cat-1.mar\n")
    settings, _, lines = _prepared(folder)
    assert list(settings) == ["cat 1.0"] and lines[0] == f"configuration: {folder}/other.properties"


def test_a_variable_of_mlserver_wins_and_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLSERVER_HTTP_PORT", "8080")
    _properties(folder, "inference_address=http://0.0.0.0:8085\nmetrics_address=http://127.0.0.1:8081\n")
    _, variables, lines = _prepared(folder)
    assert "MLSERVER_HTTP_PORT" not in variables
    assert variables["MLSERVER_GRPC_PORT"] == "8083", "8081 is the port of the metrics"
    assert "MLSERVER_HTTP_PORT: 8080 from the environment is used instead of 8085" in lines
    assert "metrics_address: its host is ignored: metrics are on the host of inference_address, 0.0.0.0" in lines


def test_the_management_api_is_opened_only_with_a_token_and_a_port_of_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _properties(folder, "management_address=http://0.0.0.0:8085\nenable_model_api=true\n")
    _, variables, lines = _prepared(folder)
    assert not any("MANAGEMENT" in name for name in variables)
    why = f"set {_PREFIX}MANAGEMENT_TOKEN or {_PREFIX}MANAGEMENT_TOKEN_FILE, or disable_token_authorization=true"
    assert {f"management_address: ignored: {why}", f"enable_model_api: ignored: {why}"} <= set(lines)
    monkeypatch.setenv(f"{_PREFIX}MANAGEMENT_TOKEN", "secret")
    _, variables, lines = _prepared(folder)
    assert variables[f"{_PREFIX}MANAGEMENT_PORT_TORCHSERVE"] == "8085"
    assert variables[f"{_PREFIX}MODEL_STORE"] == str(folder / "model-store")
    assert not any(line.startswith("management_address") for line in lines)
    _properties(folder, "inference_address=http://0.0.0.0:8085\nmanagement_address=http://0.0.0.0:8085\n")
    _, variables, lines = _prepared(folder)
    assert not any("MANAGEMENT" in name for name in variables)
    assert "management_address: ignored: it has the same port as inference_address" in lines


def test_a_host_that_cannot_differ_is_named() -> None:
    _, lines = ServerConfig({"grpc_inference_address": "0.0.0.0"}, environ={}).environment(lambda: 0)
    assert lines == ["grpc_inference_address: ignored: gRPC listens on the host of inference_address, 127.0.0.1"]


def test_gpus_are_hidden_only_where_there_are_more() -> None:
    for given, visible in (("0", {"CUDA_VISIBLE_DEVICES": ""}), ("1", {"CUDA_VISIBLE_DEVICES": "0"}), ("2", {})):
        found, _ = ServerConfig({"number_of_gpu": given}, environ={}).environment(lambda: 2)
        assert {key: value for key, value in found.items() if key.startswith("CUDA")} == visible, given


@pytest.mark.parametrize(
    ("properties", "said"),
    [
        ("keystore=k.p12", "keystore: is not implemented: TLS ends at the ingress"),
        ("private_key_file=k.pem", "private_key_file: is not implemented"),
        ("enable_grpc_ssl=true", "enable_grpc_ssl: is not implemented"),
        ("inference_address=https://127.0.0.1:8443", "inference_address: https is not implemented"),
        ("metrics_address=unix:/tmp/x", "metrics_address: a Unix socket is not implemented"),
        ("inference_address=127.0.0.1:80", "inference_address: must be http://HOST:PORT, got '127.0.0.1:80'"),
        ("inference_address=http://127.0.0.1:70000", "inference_address: must have a port from 1 to 65535"),
        ("metrics_address=http://127.0.0.1:8080", "metrics_address: must not have the same port as inference_address"),
        ("grpc_inference_port=0", "grpc_inference_port: must be from 1 to 65535, got 0"),
        ("max_request_size=large", "max_request_size: must be a whole number, got 'large'"),
        ("number_of_gpu=-1", "number_of_gpu: must not be below 0, got -1"),
        ("service_envelope=\\ud83d", "has half of a surrogate pair"),
        ("max_request_size=0", "max_request_size: must be above 0, got 0"),
        ("load_models=../x.mar", "load_models: ../x.mar is not in the model store"),
        ("load_models=a=https://x.org/a.mar", "load_models: https://x.org/a.mar: nothing is downloaded"),
        ("load_models=a/b=dog.mar", "'a/b' is not a valid name for a model"),
        ("model_snapshot={", "model_snapshot: must be a JSON object of models and their versions"),
        ('model_snapshot={"modelCount":1}', "model_snapshot: must be a JSON object of models and their versions"),
        ('model_snapshot={"models":{"a":{"1":{}}}}', "model_snapshot: a 1: has no marName"),
        (
            'model_snapshot={"models":{"dog":{"2.0":{"marName":"dog.mar"}}}}',
            "model_snapshot: dog 2.0: the archive dog.mar has version 1.0",
        ),
        ("models=[1]", "models: must be a JSON object of models and their versions"),
        ("metrics_config=none.yaml", "metrics_config: no such file: none.yaml"),
        ("job_queue_size=$$NOT_THERE$$", "job_queue_size: the environment variable NOT_THERE is not set"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    folder: Path, capsys: pytest.CaptureFixture[str], properties: str, said: str
) -> None:
    _properties(folder, properties + "\n")
    assert main(["serve-torchserve", str(folder)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error, error


@pytest.mark.parametrize(
    "content",
    [
        b"# f\xfcr alle\r\nload_models=x=dog.mar\r\n",
        b"\xef\xbb\xbfload_models=x=dog.mar\n",
        "# one comment\u2028load_models=all\nload_models=x=dog.mar".encode(),
        b"load_models \\\r = \\\r\n  \\u0078=dog.mar\r",
    ],
    ids=["latin-1", "mark", "one line", "line ends"],
)
def test_a_file_of_any_editor_is_read(folder: Path, content: bytes) -> None:
    _properties(folder, "")
    (folder / "config/config.properties").write_bytes(content)
    assert list(_prepared(folder)[0]) == ["x 1.0"]


@pytest.mark.parametrize("properties", ["load_models=none", "load_models=", 'model_snapshot={"models":{}}'])
def test_a_server_may_start_without_a_model(folder: Path, properties: str) -> None:
    _properties(folder, properties + "\n")
    settings, _, lines = _prepared(folder)
    assert not settings and lines[-1].startswith("no model is loaded: the management API registers models")


def test_what_is_no_folder_or_no_file_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for typed, said in (
        (["serve-torchserve"], "model_store is not set: set it with --model-store"),
        (["serve-torchserve", str(folder / "none")], f"model_store: no such folder: {folder}/none/model-store"),
        (["torchserve", "--start", "--ts-config", "none"], "--ts-config or TS_CONFIG_FILE: no such file: none"),
    ):
        assert main(typed) == 1
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["torchserve", "--stop"])
    assert "--stop: the server runs in the foreground" in capsys.readouterr().err


def test_options_of_torchserves_command_without_an_effect_are_named(folder: Path) -> None:
    options = ["--ncs", "--log-config", "l.xml", "--ppath", "p", "--workflow-store", "w", "--foreground", "--dt"]
    lines = _prepared(folder, *options)[2]
    for start in (
        "--no-config-snapshots: ignored: no snapshot is written",
        "--log-config: ignored",
        "--plugins-path: ignored",
        "workflow_store: ignored: workflows are not carried over",
    ):
        assert any(line.startswith(start) for line in lines), start


def test_an_archive_that_cannot_be_read_costs_its_own_model_alone(folder: Path) -> None:
    broken = folder / "model-store/broken.mar"
    broken.write_bytes(b"PK no zip")
    _mar(folder, "spaced.mar", "a name of words")
    (folder / "model-store/gone.mar").symlink_to("nothing")
    manifest = folder / "model-store/folder/MAR-INF/MANIFEST.json"
    manifest.parent.mkdir(parents=True)
    manifest.symlink_to("/proc/self/mem")  # whose first bytes cannot be read
    settings, variables, lines = _prepared(folder)
    why = [each["extra"]["why"] for name, each in settings.items() if name.endswith(" None")]
    assert [line for line in lines if line.startswith("not served: ")] == [f"not served: {each}" for each in why]
    store = f"{folder}/model-store"
    for place, start in enumerate(
        (
            f"cannot unpack {broken}: ",
            f"{store}/folder: ",
            f"{store}/gone.mar: the model store has no such archive",
            f"{store}/spaced.mar: 'a name of words' is not a valid name",
        )
    ):
        assert why[place].startswith(start)
    assert {"cat 1.0", "cat 2.0", "dog 1.0", "broken.mar None", "folder None"} < set(settings)
    assert variables["MLSERVER_TORCH_STREAM_SKIP_FAILED_MODELS"] == "true"


@pytest.mark.parametrize(
    ("properties", "served", "why"),
    [
        (
            "load_models=none.mar,x=no.mar,dog.mar",
            {"dog 1.0"},
            ["{}/no.mar: the model store", "{}/none.mar: the model store"],
        ),
        ("load_models=x=dog.mar,x=dog.mar", {"x 1.0"}, ["{}/dog.mar: {}/dog.mar is already version 1.0 of x"]),
        ("load_models=dog.mar,dog=cat-1.mar", {"dog 1.0"}, ["{}/cat-1.mar: {}/dog.mar is already version 1.0 of dog"]),
        (
            'model_snapshot={"models":{"a":{"1":{"marName":"no.mar"}}}}',
            set(),
            ["{}/no.mar: the model store has no such archive"],
        ),
    ],
)
def test_an_archive_that_is_missing_or_is_there_twice_costs_its_own_model_alone(
    folder: Path, properties: str, served: set[str], why: list[str]
) -> None:
    _properties(folder, properties)
    settings, _, lines = _prepared(folder)
    assert {name for name in settings if not name.endswith(" None")} == served
    store = f"{folder}/model-store"
    found = sorted(line for line in lines if line.startswith("not served: "))
    assert len(found) == len(why)
    for line, start in zip(found, why, strict=True):
        assert line.startswith(f"not served: {start.format(store, store)}")
        assert line.removeprefix("not served: ") in [each.get("extra", {}).get("why") for each in settings.values()]


def test_values_of_the_yaml_and_overrides_over_them() -> None:
    config = read_config({"batchSize": 4, "maxBatchDelay": 10, "handler": {"x": 1}}, {"batchSize": 8})
    assert (config.batchSize, config.maxBatchDelay, config.minWorkers) == (8, 10, 1)
    strings = read_config({}, {"batchSize": "8", "continuousBatching": "true", "deviceType": "cpu"})
    assert (strings.batchSize, strings.continuousBatching, strings.deviceType) == (8, True, "cpu")


@pytest.mark.parametrize(
    ("yaml", "overrides", "said"),
    [
        ({"batchSize": "four"}, {}, "model-config.yaml: batchSize: .*got 'four'"),
        ({}, {"batchSize": 0}, "parameters.extra: batchSize: .*got 0"),
        ({}, {"batch_size": 1}, "unknown key 'batch_size'; did you mean 'batchSize'"),
        ({"parallelType": "xp"}, {}, "parallelType"),
        ({"torchrun": {"nnodes": 2}}, {}, "torchrun.nnodes"),
        ({"asyncCommunication": True, "continuousBatching": True}, {}, "asyncCommunication cannot be combined"),
        (
            {"parallelType": "tp", "parallelLevel": 2, "continuousBatching": True},
            {},
            "several ranks cannot be combined",
        ),
    ],
)
def test_what_is_wrong_is_named(yaml: dict[str, Any], overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        read_config(yaml, overrides)


@pytest.mark.parametrize(
    ("yaml", "ranks", "broadcasts"),
    [
        ({"parallelType": "pp", "torchrun": {"nproc-per-node": 4, "OMP_NUMBER_THREADS": 2}}, 4, False),
        ({"parallelType": "tp", "parallelLevel": 3}, 3, True),
        ({"parallelType": "pptp", "parallelLevel": 2}, 2, True),
        ({"parallelType": "custom", "torchrun": {"nproc-per-node": 2}}, 2, True),
        ({"parallelType": "custom", "parallelLevel": 4}, 1, True),
        ({"torchrun": {"nproc-per-node": 4}}, 1, True),
    ],
)
def test_ranks_and_who_gets_the_requests(yaml: dict[str, Any], ranks: int, broadcasts: bool) -> None:
    config = read_config(yaml, {})
    assert (config.ranks, config.broadcasts) == (ranks, broadcasts)


def test_what_is_not_honoured_is_named_and_what_is_the_handlers_is_not() -> None:
    yaml = {
        "minWorkers": 0,
        "maxRetryTimeoutInSec": 5,
        "torchrun": {"nproc-per-node": 1, "rdzv-backend": "c10d"},
        "batchsize": 2,
        "handler": {"model_path": "x"},
        "pippy": {"chunks": 1},
    }
    lines = list(not_honoured(yaml, read_config(yaml, {})))
    named = [line.partition(":")[0] for line in lines]
    assert named == ["maxRetryTimeoutInSec", "minWorkers", "torchrun.rdzv-backend", "batchsize"]
    assert "did you mean batchSize" in lines[-1]
