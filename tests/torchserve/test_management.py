"""TorchServe's management API behind a real MLServer: models of a store, their workers, their versions, and errors."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from collections.abc import Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlserver.settings import Settings

from mlserver_torch_stream.errors import SettingsError
from mlserver_torch_stream.handlers.config.store_files import ManagementRefusal, StoreFiles
from mlserver_torch_stream.server.lifecycle.lifecycle import Lifecycle
from mlserver_torch_stream.server.lifecycle.ports import port_problem
from mlserver_torch_stream.server.management.management_calls import ManagementCalls, check_token, read_token
from mlserver_torch_stream.server.options import ServerOptions
from tests import markdown, plain_http
from tests.scripted_http import serving
from tests.server.harness import HOST, Model, Server, free_ports, serve
from tests.torchserve.predicting import SETTINGS, SHIM, TORCHSERVE
from tests.torchserve.workshop import HELLO, write_handler, write_mar
from tests.waiting import wait_until

_PREFIX = "MLSERVER_TORCH_STREAM"
_TOKEN = "a-secret"
_TIMEOUT_S = 60.0
_JSON, _BAD = {"content-type": "application/json"}, "BadRequestException"

# "sleep 1" takes so long; it says which version it is, with how many requests at once, and describes itself.
_HANDLER = """
import time

class Handler:
    def initialize(self, context):
        self.version = context.manifest["model"].get("modelVersion")

    def handle(self, data, context):
        if context.get_request_header(0, "describe") == "True":
            return [{"labels": ["cat", "dog"]}]
        text = bytes(data[0].get("body") or b"").decode()
        time.sleep(float(text.split()[1]) if text.startswith("sleep") else 0)
        return [f"version {self.version}, {context.system_properties['batch_size']}"] * len(data)
"""
_BROKEN = """
def handle(data, context):
    raise ValueError("no such file: weights.pt")
"""


class Management:
    """A client of the API. ``store`` is the model store's folder."""

    def __init__(self, server: Server, port: int, store: Path) -> None:
        self.server = server
        self.url = f"http://{HOST}:{port}"
        self.store = store

    def ask(self, method: str, path: str, token: str | None = _TOKEN, **options: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {token}"} if token is not None else {}
        headers |= options.pop("headers", {})
        with httpx.Client(verify=False, trust_env=False, timeout=_TIMEOUT_S) as client:
            return client.request(method, f"{self.url}{path}", headers=headers, **options)

    def done(self, method: str, path: str, status: int = 200, **options: Any) -> Any:
        response = self.ask(method, path, **options)
        assert response.status_code == status, response.text
        return response.json()

    def error(self, method: str, path: str, **options: Any) -> tuple[int, str, str]:
        response = self.ask(method, path, **options)
        body = response.json()
        assert list(body) == ["code", "type", "message"] and body["code"] == response.status_code
        return body["code"], body["type"], body["message"]

    def described(self, path: str) -> dict[str, Any]:
        (found,) = self.done("GET", f"/models/{path}")
        return dict(found)

    def predict(self, path: str, text: str = "") -> httpx.Response:
        return plain_http.post(f"{self.server.url}/predictions/{path}", content=text, timeout=_TIMEOUT_S)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Management]:
    folder = tmp_path_factory.mktemp("management")
    store = folder / "store"
    store.mkdir()
    for name, version in (("noop", "1.0"), ("noop", "2.0"), ("plain", None), ("raced", "1.0"), ("leaves", "1.0")):
        model = {"modelName": name, "handler": "handler.py", **({"modelVersion": version} if version else {})}
        write_mar(store / f"{name}{version or ''}.mar", {"handler.py": _HANDLER}, model)
    sized = {"modelName": "sized", "handler": "handler.py", "configFile": "c.yaml"}
    write_mar(store / "sized.mar", {"handler.py": _HANDLER, "c.yaml": "minWorkers: 2\nmaxWorkers: 3\n"}, sized)
    write_mar(store / "broken.mar", {"handler.py": _BROKEN}, {"modelName": "broken", "handler": "handler.py"})
    write_mar(store / "empty.mar", {"handler.py": _BROKEN})
    write_mar(folder / "outside.mar", {"handler.py": _HANDLER}, {"modelName": "outside", "handler": "handler.py"})
    other = {"other.py": HELLO, "handler.py": _HANDLER}
    write_mar(store / "other.mar", other, {"modelName": "other", "handler": "handler.py"})
    started = Model("started", write_handler(folder / "started", HELLO), implementation=TORCHSERVE, extra=SHIM)
    (port,) = free_ports(1)
    (folder / "token").write_text(f"{_TOKEN}\n")
    (folder / "without" / "ts").mkdir(parents=True)
    (folder / "without" / "ts" / "__init__.py").write_text("raise ImportError")  # else each worker imports torch
    environment = {
        f"{_PREFIX}_MANAGEMENT_PORT_TORCHSERVE": str(port),
        f"{_PREFIX}_MANAGEMENT_TOKEN_FILE": str(folder / "token"),
        "PYTHONPATH": str(folder / "without"),
        f"{_PREFIX}_MODEL_STORE": str(store),
        f"{_PREFIX}_ALLOWED_URLS": rf"http://{HOST}:\d+/allowed/.*",
    }
    with serve(folder / "models", [started], settings=SETTINGS, environment=environment) as running:
        yield Management(running, port, store)


def test_an_archive_of_the_model_store_is_named_by_its_file(tmp_path: Path) -> None:
    for store, named in (
        (tmp_path, "a.mar"),
        (tmp_path / "other", str(tmp_path / "a.mar")),
        (None, str(tmp_path / "a.mar")),
    ):
        assert StoreFiles(store, ()).url_of(str(tmp_path / "a.mar")) == named


def test_a_request_needs_the_token(api: Management) -> None:
    for token in (None, "wrong", f"{_TOKEN}x", "two words"):
        code, kind, message = api.error("GET", "/models", token=token)
        assert (code, kind) == (400, "InvalidKeyException") and "Token Authorization failed" in message
    assert api.ask("OPTIONS", "/", token=None).status_code == 200


def test_a_model_is_registered_without_workers_scaled_asked_and_unregistered(api: Management) -> None:
    said = api.done("POST", "/models?url=plain.mar&model_name=mine")
    none = "registered with 0 initial workers. Use scale workers API to add workers for the model."
    assert said["status"] == f'Model "mine" Version: 1.0 {none}'
    refused = api.predict("mine")
    assert refused.status_code == 503 and "Please use scale workers API" in refused.json()["message"]
    described = api.described("mine")
    assert (described["minWorkers"], described["maxWorkers"], described["workers"]) == (0, 0, [])
    assert (
        api.done("PUT", "/models/mine?min_worker=2&synchronous=true")["status"] == "Workers scaled to 2 for model: mine"
    )
    assert api.predict("mine").text == "version None, 1"
    workers = api.described("mine")["workers"]
    assert [worker["status"] for worker in workers] == ["READY", "READY"] and all(w["memoryUsage"] > 0 for w in workers)
    assert len({worker["pid"] for worker in workers}) == 2
    said = api.done("PUT", "/models/mine/1.0?min_worker=1&max_worker=1&synchronous=true")["status"]
    assert said == "Workers scaled to 1 for model: mine, version: 1.0"
    assert len(api.described("mine/1.0")["workers"]) == 1
    assert api.done("PUT", "/models/mine?min_worker=0", 202)["status"] == "Processing worker updates..."
    wait_until(lambda: api.described("mine")["workers"] == [], "no worker")
    assert api.done("DELETE", "/models/mine")["status"] == 'Model "mine" unregistered'
    assert api.error("GET", "/models/mine") == (404, "ModelNotFoundException", "Model not found: mine")
    assert api.predict("mine").status_code == 404


def test_a_description_has_the_fields_of_torchserve(api: Management) -> None:
    api.done("POST", "/models?url=sized.mar&batch_size=3&max_batch_delay=7&response_timeout=50&startup_timeout=60")
    described = api.described("sized")
    workers = described.pop("workers")
    assert described == {
        "modelName": "sized",
        "modelVersion": "1.0",
        "modelUrl": "sized.mar",
        "runtime": "python",
        "minWorkers": 2,
        "maxWorkers": 3,
        "batchSize": 3,
        "maxBatchDelay": 7,
        "responseTimeout": 50,
        "startupTimeout": 60,
        "clientTimeoutInMills": 0,
        "parallelType": "",
        "parallelLevel": 0,
        "deviceType": "",
        "continuousBatching": False,
        "useJobTicket": False,
        "useVenv": False,
        "stateful": False,
        "sequenceMaxIdleMSec": 0,
        "sequenceTimeoutMSec": 0,
        "maxNumSequence": 9,
        "maxSequenceJobQueueSize": 1,
        "loadedAtStartup": False,
        "jobQueueStatus": {"remainingCapacity": 100, "pendingRequests": 0},
    }
    assert [worker["id"] for worker in workers] == ["0", "1"]
    assert set(workers[0]) == {"id", "startTime", "status", "memoryUsage", "pid", "gpu", "gpuUsage"}
    (customized,) = api.done("GET", "/models/sized?customized=true")
    assert customized["customizedMetadata"] == {"labels": ["cat", "dog"]}
    assert api.described("started")["loadedAtStartup"] is True
    assert api.done("GET", "/v1/models/sized") == {"name": "sized", "ready": True}
    api.done("DELETE", "/models/sized/1.0")


def test_versions_of_a_model_and_its_default_one(api: Management) -> None:
    for version in ("1.0", "2.0"):
        said = api.done("POST", f"/models?url=noop{version}.mar&initial_workers=1&synchronous=true")["status"]
        assert said == f'Model "noop" Version: {version} registered with 1 initial workers'
    assert [api.predict(path).text for path in ("noop", "noop/1.0", "noop/2.0")] == [
        f"version {version}, 1" for version in ("1.0", "1.0", "2.0")
    ]
    assert [each["modelVersion"] for each in api.done("GET", "/models/noop/all")] == ["1.0", "2.0"]
    forbidden = (403, "InvalidModelVersionException", "Cannot remove default version for model noop")
    assert api.error("DELETE", "/models/noop") == api.error("DELETE", "/models/noop/1.0") == forbidden
    said = api.done("PUT", "/models/noop/2.0/set-default")["status"]
    assert said == 'Default version successfully updated for model "noop" to "2.0"'
    assert api.predict("noop").text == "version 2.0, 1"
    code, kind, message = api.error("PUT", "/models/noop/3.0/set-default")
    assert (code, kind, message) == (
        404, "ModelVersionNotFoundException", "Model version 3.0 does not exist for model noop"
    )  # fmt: skip
    assert api.error("GET", "/models/noop/3.0")[:2] == (404, "ModelVersionNotFoundException")
    index = plain_http.post(f"{api.server.url}/v2/repository/index", json={}, timeout=_TIMEOUT_S).json()
    assert {(each["name"], each.get("version")) for each in index} >= {("noop", "1.0"), ("noop", "2.0")}
    api.done("DELETE", "/models/noop/1.0")
    api.done("DELETE", "/models/noop")
    assert plain_http.get(f"{api.server.url}/v2/models/noop", timeout=_TIMEOUT_S).status_code == 404


def test_a_model_without_a_version_stays_the_default_beside_versions(api: Management) -> None:
    """Otherwise nobody could call it or unload it."""
    api.done("POST", "/models?url=noop1.0.mar&model_name=started&initial_workers=1")
    assert api.predict("started/1.0").text == "version 1.0, 1"
    assert api.error("PUT", "/models/started/1.0/set-default")[:2] == (409, "ConflictStatusException")
    assert api.predict("started").text == "hellohellohellohello world "
    assert len(api.done("GET", "/models/started/all")) == 2
    api.done("DELETE", "/models/started/1.0")
    assert api.predict("started").text == "hellohellohellohello world "


def test_the_list_has_pages(api: Management) -> None:
    for name in ("aa", "bb"):
        api.done("POST", f"/models?url=plain.mar&model_name={name}")
    whole = api.done("GET", "/models")["models"]
    assert [each["modelName"] for each in whole] == ["aa", "bb", "started"]
    assert whole[0]["modelUrl"] == "plain.mar"
    first = api.done("GET", "/models?limit=2")
    assert first == {"nextPageToken": "2", "models": whole[:2]}
    assert api.done("GET", "/models?limit=2&next_page_token=2") == {"models": whole[2:]}
    for name in ("aa", "bb"):
        api.done("DELETE", f"/models/{name}")


@pytest.mark.parametrize(
    ("query", "code", "kind", "said"),
    [
        ("", 400, "BadRequestException", "Parameter url is required."),
        ("url=", 404, "ModelNotFoundException", "empty url"),
        ("url=missing.mar", 404, "ModelNotFoundException", "Model not found at: missing.mar"),
        ("url=../outside.mar", 404, "ModelNotFoundException", "Relative path is not allowed in url"),
        ("url=/etc/passwd", 404, "ModelNotFoundException", "is not in the model store"),
        ("url=file:///etc/passwd", 404, "ModelNotFoundException", "is not in the model store"),
        ("url=sub/noop1.0.mar", 404, "ModelNotFoundException", "is not in the model store"),
        ("url=s3://bucket/x.mar", 404, "ModelNotFoundException", "does not match any allowed URL(s)"),
        ("url=http://127.0.0.1:1/x.mar", 404, "ModelNotFoundException", "does not match any allowed URL(s)"),
        ("url=http://127.0.0.1:1/allowed/x.mar", 400, "DownloadArchiveException", "Failed to download archive"),
        (
            "url=http://127.0.0.1:1/allowed/x.py",
            400,
            "DownloadArchiveException",
            "does not name a file that ends with .mar",
        ),
        ("url=empty.mar", 400, "InvalidModelException", "it is not a model archive of TorchServe"),
        ("url=plain.mar&model_name=a/b", 400, "BadRequestException", "is not a valid name for a model"),
        ("url=plain.mar&batch_size=many", 400, "BadRequestException", "batch_size: must be a whole number, got 'many'"),
        ("url=plain.mar&batch_size=0", 400, "BadRequestException", "batchSize"),
        ("url=plain.mar&runtime=java", 400, "BadRequestException", "Invalid Runtime: java"),
        ("url=plain.mar&s3_sse_kms=true", 400, "BadRequestException", "s3_sse_kms"),
        ("url=plain.mar&batchsize=2", 400, "BadRequestException", "did you mean 'batch_size'"),
        ("url=broken.mar&initial_workers=1", 500, "InternalServerException", "no such file: weights.pt"),
    ],
)
def test_what_cannot_be_registered_is_refused_with_the_reason(
    api: Management, query: str, code: int, kind: str, said: str
) -> None:
    refused = api.error("POST", f"/models?{query}")
    assert refused[:2] == (code, kind) and said in refused[2]
    assert [each["modelName"] for each in api.done("GET", "/models")["models"]] == ["started"]


def test_methods_and_paths_that_are_none_are_refused(api: Management) -> None:
    for method, path in (("DELETE", "/models"), ("PATCH", "/models/started"), ("GET", "/models/m/1/set-default")):
        assert api.error(method, path)[:2] == (405, "MethodNotAllowedException")
    for path in ("/nothing", "/models/a/b/c/d", "/workflows"):
        assert api.error("GET", path)[:2] == (404, "ResourceNotFoundException")
    refused = api.error("PUT", "/models/started?min_worker=3&max_worker=2")
    assert refused == (400, "BadRequestException", "max_worker cannot be less than min_worker.")
    refused = api.error("PUT", "/models/started?min_worker=1025")
    assert refused == (400, "BadRequestException", "min_worker: must not be above 1024")
    assert api.error("PUT", "/models/absent?min_worker=1")[:2] == (404, "ModelNotFoundException")
    assert api.error("DELETE", "/models/absent")[:2] == (404, "ModelNotFoundException")


def test_the_document_names_every_path(api: Management) -> None:
    paths = api.done("OPTIONS", "/")["paths"]
    assert (
        set(paths["/models"]) == {"get", "post"} and "put" in paths["/models/{model_name}/{model_version}/set-default"]
    )
    assert api.done("OPTIONS", "/models/started")["openapi"] == "3.0.1"


def test_parameters_may_be_a_json_object_and_name_another_handler(api: Management) -> None:
    body = {"url": "other.mar", "handler": "other.py", "initial_workers": 1, "synchronous": True}
    assert "registered with 1" in api.done("POST", "/models", json=body)["status"]
    assert api.predict("other").text == "hellohellohellohello world "
    api.done("DELETE", "/models/other")


def test_of_registrations_of_one_model_at_the_same_time_one_is_done(api: Management) -> None:
    with ThreadPoolExecutor(8) as threads:
        path = "/models?url=raced1.0.mar&initial_workers=1&synchronous=true"
        statuses = [each.status_code for each in threads.map(lambda _: api.ask("POST", path), range(8))]
    assert sorted(statuses) == [200] + [409] * 7
    assert api.predict("raced").text == "version 1.0, 1"
    with ThreadPoolExecutor(2) as threads:  # an unregistration and a registration in turn
        removed = threads.submit(api.ask, "DELETE", "/models/raced")
        wait_until(lambda: api.ask("GET", "/models/raced").status_code == 404, "unregistered")
        assert api.done("POST", path)["status"] and removed.result().status_code == 200
    assert api.predict("raced").text == "version 1.0, 1"
    api.done("DELETE", "/models/raced")


@pytest.mark.long
def test_requests_in_flight_are_finished_where_their_model_is_unregistered(api: Management) -> None:
    api.done("POST", "/models?url=leaves1.0.mar&initial_workers=1")
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(api.predict, "leaves", "sleep 2")
        wait_until(lambda: api.described("leaves")["jobQueueStatus"]["pendingRequests"] == 0 and _busy(api), "busy")
        removed = threads.submit(api.ask, "DELETE", "/models/leaves")
        answered = running.result()
        assert (answered.status_code, answered.text) == (200, "version 1.0, 1")
        assert removed.result().status_code == 200
    assert api.predict("leaves").status_code == 404


def _busy(api: Management) -> bool:
    return api.server.counters("leaves").get("handler_batches", 0) >= 1


def test_an_archive_is_downloaded_from_an_allowed_url_only_and_removed_with_its_model(
    api: Management, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    for place in ("allowed", "elsewhere"):
        (site / place).mkdir(parents=True)
        write_mar(site / place / "far.mar", {"handler.py": _HANDLER}, {"modelName": "far", "handler": "handler.py"})

    class Pages(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/allowed/away.mar":
                self.send_response(302)
                self.send_header("location", "/elsewhere/far.mar")
                self.end_headers()
                return
            super().do_GET()

    with serving(partial(Pages, directory=str(site))) as url:
        for refused in ("elsewhere/far.mar", "allowed/away.mar"):
            code, kind, message = api.error("POST", f"/models?url={url}/{refused}")
            assert (code, kind) == (404, "ModelNotFoundException") and "/elsewhere/far.mar does not match" in message
        write_mar(site / "allowed" / "bad.mar", {"handler.py": _HANDLER})
        for _ in range(2):  # what is no archive does not stay in the model store
            assert api.error("POST", f"/models?url={url}/allowed/bad.mar")[1] == "InvalidModelException"
        assert "registered" in api.done("POST", f"/models?url={url}/allowed/far.mar")["status"]
        assert api.described("far")["modelUrl"] == f"{url}/allowed/far.mar" and (api.store / "far.mar").is_file()
        assert api.error("POST", f"/models?url={url}/allowed/far.mar")[2] == "Model file already exists far.mar"
    api.done("DELETE", "/models/far")
    assert not [path for path in api.store.iterdir() if "far" in path.name or "bad" in path.name]


def test_a_downloaded_archive_that_cannot_be_registered_does_not_stay(api: Management, tmp_path: Path) -> None:
    """Otherwise it could not be downloaded again after it is repaired.

    Of simultaneous downloads of one file, one succeeds.
    """
    site = tmp_path / "allowed"
    site.mkdir()
    model = {"modelName": "mended", "handler": "handler.py"}
    write_mar(site / "mended.mar", {"handler.py": _BROKEN}, model)
    write_mar(site / "second.mar", {"handler.py": _HANDLER}, model)
    (site / "none.mar").write_text("no archive")
    with serving(partial(SimpleHTTPRequestHandler, directory=str(tmp_path))) as pages:
        url = f"/models?initial_workers=1&synchronous=true&url={pages}/allowed"
        assert api.error("POST", f"{url}/mended.mar")[0] == 500
        assert api.error("POST", f"{url}/none.mar")[0] == 400
        write_mar(site / "mended.mar", {"handler.py": _HANDLER}, model)
        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(lambda _: api.ask("POST", f"{url}/mended.mar").status_code, range(4)))
        assert sorted(answers) == [200, 500, 500, 500]
        assert api.error("POST", f"{url}/second.mar")[0] == 409
    assert api.predict("mended").text == "version None, 1"
    stored = {path.name for path in api.store.iterdir()}
    assert "mended.mar" in stored and not stored & {"none.mar", "second.mar"}
    api.done("DELETE", "/models/mended")


def test_a_path_is_that_of_the_request_line_and_quoted_in_the_log(api: Management) -> None:
    """The header Host does not change it, and an encoded question mark belongs to the path."""
    for host in ("x/models/started#", "[", "x?"):
        assert api.done("GET", "/models", headers={"host": host})["models"]
    for path in ("/models%3Fx", "/mo%0Adels", "/models/started%3Fx"):
        assert api.error("GET", path)[0] == 404
    wait_until(lambda: "GET '/mo\\ndels' 404" in api.server.log, "the line about the path")
    assert "A request failed" not in api.server.log


def test_values_that_no_model_can_have_are_refused(api: Management) -> None:
    assert api.error("POST", "/models", content=b'{"url": "\\ud800.mar"}', headers=_JSON)[:2] == (400, _BAD)
    late = api.error("PUT", f"/models/started?min_worker=1&timeout={'9' * 400}")
    assert late == (400, _BAD, "timeout: must not be above 2147483647 seconds")
    assert api.error("PUT", "/models/started//set-default")[:2] == (404, "ModelVersionNotFoundException")


def test_an_asynchronous_registration_is_answered_at_once_and_goes_on(api: Management) -> None:
    said = api.done("POST", "/models?url=noop1.0.mar&initial_workers=1&synchronous=false", 202)
    assert said == {"status": "Processing worker updates..."}
    wait_until(lambda: len(api.described("noop")["workers"]) == 1, "a worker")
    assert api.predict("noop").text == "version 1.0, 1"
    api.done("DELETE", "/models/noop")
    api.done("POST", "/models?url=broken.mar&initial_workers=1&synchronous=false", 202)
    wait_until(lambda: api.ask("GET", "/models/broken").status_code == 404, "gone")
    wait_until(lambda: "Management API: Failed to start workers for model broken" in api.server.log, "the reason")


def test_the_commands_of_the_page_work(api: Management) -> None:
    (block,) = [each for each in markdown.blocks("docs/torchserve.md") if "url=assistant.mar" in each.code]
    model = {"modelName": "assistant", "handler": "handler.py"}
    write_mar(api.store / "assistant.mar", {"handler.py": _HANDLER}, model)
    commands = block.code.replace("http://127.0.0.1:8085", api.url).replace("secret", _TOKEN)
    commands = commands.replace("curl ", "curl -sS --fail ")
    subprocess.run(["bash", "-euc", commands], capture_output=True, timeout=_TIMEOUT_S, check=True)
    assert api.ask("GET", "/models/assistant").status_code == 404
    (api.store / "assistant.mar").unlink()


# --- the port and its token ---


@pytest.mark.parametrize("taken", ["http_port", "grpc_port", "metrics_port", "another process"])
def test_a_port_of_the_management_api_that_is_taken_is_named(taken: str) -> None:
    ports = dict(zip(("http_port", "grpc_port", "metrics_port"), free_ports(3), strict=True))
    with socket.create_server((HOST, 0)) as other:
        port = ports.get(taken, other.getsockname()[1])
        problem = port_problem(Settings(host=HOST, **ports), ServerOptions(management_port_torchserve=port))
    assert problem is not None and f"port {port} ({_PREFIX}_MANAGEMENT_PORT_TORCHSERVE)" in problem


@pytest.mark.slow
def test_a_request_that_runs_at_the_end_of_the_server_gets_its_reason(tmp_path: Path) -> None:
    """The request is a download that stalls."""
    (tmp_path / "store").mkdir()
    started = Model("started", write_handler(tmp_path / "started", HELLO), implementation=TORCHSERVE, extra=SHIM)
    (port,) = free_ports(1)
    environment = {
        f"{_PREFIX}_MANAGEMENT_PORT_TORCHSERVE": str(port),
        f"{_PREFIX}_MANAGEMENT_TOKEN": _TOKEN,
        f"{_PREFIX}_MODEL_STORE": str(tmp_path / "store"),
        f"{_PREFIX}_ALLOWED_URLS": ".*",
    }
    with (
        serve(tmp_path / "models", [started], settings=SETTINGS, environment=environment) as running,
        socket.create_server((HOST, 0)) as silent,
        ThreadPoolExecutor(1) as threads,
    ):
        api = Management(running, port, tmp_path / "store")
        path = f"/models?url=http://{HOST}:{silent.getsockname()[1]}/far.mar"
        asked = threads.submit(api.error, "POST", path)
        silent.settimeout(30)
        with silent.accept()[0]:
            running.process.send_signal(signal.SIGTERM)
            assert asked.result(30) == (503, "ServiceUnavailableException", "the server is shutting down")
            assert running.process.wait(30) == 0
        assert "Traceback" not in running.log


def test_models_are_registered_only_where_the_settings_let_them() -> None:
    async def refused(change: Awaitable[Any]) -> None:
        with pytest.raises(ManagementRefusal, match="enable_model_api") as refusal:
            await change
        assert refusal.value.status == 405

    async def scenario() -> None:
        models: Any = None  # which is not reached
        calls = ManagementCalls(models, Lifecycle(), registers=False)
        await refused(calls.register({"url": "plain.mar"}))
        await refused(calls.unregister("plain", None))

    asyncio.run(scenario())


def test_the_token_comes_from_a_setting_or_a_file_or_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("of-a-file\n")
    assert read_token(ServerOptions(management_token="x")) == "x"
    assert read_token(ServerOptions(management_token_file=str(tmp_path / "token"))) == "of-a-file"
    assert read_token(ServerOptions(disable_token_authorization=True)) is None
    check_token(None, None)
    for options in (ServerOptions(), ServerOptions(management_token_file=str(tmp_path / "none"))):
        with pytest.raises(SettingsError, match="MANAGEMENT_TOKEN"):
            read_token(options)
