"""docs/moving-from-torchserve.md, block by block in its order: its files, TorchServe's commands, and ours."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import markdown
from tests.clients.environments import make_environment
from tests.markdown import Block
from tests.server.harness import Server, free_ports, serve
from tests.torchserve.workshop import without_torchserve, write_mar

_PAGE = "docs/moving-from-torchserve.md"
_BLOCKS = markdown.blocks(_PAGE)
_FILE = re.compile(r"# (\S+)\n")  # the first line of a block that is a file
_OURS = "mlserver-torch-stream "
_BIN = Path(sys.executable).parent
_TIMEOUT_S = 120.0
_MANAGEMENT = "MLSERVER_TORCH_STREAM_MANAGEMENT_PORT_TORCHSERVE"


class _Reader:
    """Follows the page in one folder. At most one server runs at a time."""

    def __init__(self, folder: Path, archiver: str | None) -> None:
        self.folder = folder
        self._archiver = archiver
        self._servers = ExitStack()
        self._server: Server | None = None
        (self._management,) = free_ports(1)
        self.typed: list[str] = []  # of TorchServe's
        (folder.parent / "path").mkdir()
        self._environment = without_torchserve(folder.parent / "path")

    def close(self) -> None:
        self._servers.close()

    def do(self, block: Block) -> None:
        if name := _FILE.match(block.code):
            (self.folder / name[1]).write_text(block.code)
        elif block.language == "sh":
            self._theirs(block.code.strip())
        elif block.code.startswith(f"{_OURS}torchserve "):
            self._start(block.code.strip())
        elif not block.code.startswith("kubectl "):
            self._run(block)

    def shown_at_the_start(self, text: str) -> None:
        assert self._server is not None
        markdown.compare(text, self._server.log)

    def _theirs(self, line: str) -> None:
        self.typed.append(line)
        words = shlex.split(line)
        if words[0] == "torch-model-archiver":
            (self.folder / "model_store").mkdir()
            if self._archiver is None:
                _pack(self.folder, words)
            else:
                subprocess.run([self._archiver, *words[1:]], cwd=self.folder, check=True, timeout=_TIMEOUT_S)

    def _start(self, line: str) -> None:
        assert line == f"{_OURS}{self.typed[-1]}", "the command is TorchServe's own"
        environment = {_MANAGEMENT: str(self._management), **self._environment}
        running = serve(self.folder, [], command=shlex.split(line), environment=environment)
        self._server = self._servers.enter_context(running)

    def _run(self, block: Block) -> None:
        """Runs a block. If it ends with the start of a server, checks a prediction of that server, and stops it."""
        code = block.code
        if "mlserver start " in code:
            code, _, folder = code.partition("mlserver start ")
            self._finish(block, code)
            environment = {"MLSERVER_PARALLEL_WORKERS": "0", **self._environment}
            with serve(self.folder / folder.strip(), [], environment=environment) as server:
                self._check_prediction(server)
            return
        self._finish(block, code)

    def _finish(self, block: Block, code: str) -> None:
        server = self._server
        assert server is not None
        ports = {"8080": server.http_port, "8081": self._management, "8082": server.metrics_port}
        here = re.sub(r"(?<=127\.0\.0\.1:)(8080|8081|8082)", lambda match: str(ports[match[0]]), code)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", here],
            cwd=self.folder,
            env={**os.environ, "PYTHONWARNINGS": "ignore", "PATH": f"{_BIN}{os.pathsep}{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        assert block.output is not None, "the page shows what a command prints"
        markdown.compare(block.output, done.stdout)

    def _check_prediction(self, server: Server) -> None:
        url = f"{server.url}/predictions/hello"
        done = subprocess.run(["curl", "-s", url, "-d", "data=Ada"], capture_output=True, text=True, timeout=_TIMEOUT_S)
        assert done.stdout == "hello Ada"


def _pack(folder: Path, words: list[str]) -> None:
    """Writes what torch-model-archiver would make with these arguments."""
    given = dict(zip(words[1::2], words[2::2], strict=True))
    name, handler = given["--model-name"], given["--handler"]
    model = {"modelName": name, "modelVersion": given["--version"], "handler": handler}
    write_mar(folder / given["--export-path"] / f"{name}.mar", {handler: (folder / handler).read_text()}, model)


@pytest.fixture(params=["packed_alike", pytest.param("torch-model-archiver", marks=pytest.mark.slow)])
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[_Reader]:
    archiver = None
    if request.param == "torch-model-archiver":
        archiver = str(make_environment(tmp_path, request.param).with_name(request.param))
    reader = _Reader(tmp_path / "desk", archiver)
    reader.folder.mkdir()
    yield reader
    reader.close()


@pytest.mark.long
def test_each_step_of_the_guide_does_what_the_page_shows(reader: _Reader) -> None:
    for block in _BLOCKS:
        reader.do(block)
        if block.code.startswith(f"{_OURS}torchserve "):
            assert block.output is not None
            reader.shown_at_the_start(block.output)
    assert [line.split()[0] for line in reader.typed] == ["torch-model-archiver", "torchserve"]


def test_every_block_of_the_guide_is_one_that_is_run() -> None:
    assert {block.language for block in _BLOCKS} == {"python", "properties", "sh", "bash"}
    for block in _BLOCKS:
        assert block.language in ("sh", "bash") or _FILE.match(block.code), str(block)
        if block.code.startswith("kubectl "):
            files = [word for word in shlex.split(block.code) if word.endswith(".yaml")]
            assert files and all((markdown.ROOT / file).is_file() for file in files)
