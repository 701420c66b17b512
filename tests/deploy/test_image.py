"""The image: its Dockerfile passes a linter, copies existing files, fits the manifests, and makes a server."""

from __future__ import annotations

import http.server
import os
import shutil
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.image.dockerfile import Ignore, Instruction, pairs, read_dockerfile
from deploy.image.host_pip import HostPip, read_host_pip
from deploy.image.images import Builder, StepFailed
from deploy.image.prove import CONTEXT, DOCKERFILE, TARGET, TOOLS
from mlserver_torch_stream.engine.native.kernel_variants import runnable
from mlserver_torch_stream.version import __version__
from tests import markdown
from tests.certificates import Authority
from tests.clients.environments import make_environment
from tests.deploy import manifests

_STEPS = read_dockerfile(DOCKERFILE)
_STAGES = {stage.name: stage for stage in _STEPS.stages}
_HEALTHCHECK = DOCKERFILE.with_name("healthcheck.py")
_IMAGE = f"mlserver-torch-stream:{__version__}"
_PROVED_S = 7200.0
_LACKING = [tool for tool in TOOLS if shutil.which(tool) is None]


def _instructions(name: str) -> list[Instruction]:
    """Returns all instructions of a stage and of the stages on which it is built."""
    stage = _STAGES[name]
    return [*(_instructions(stage.base) if stage.base in _STAGES else []), *stage.instructions]


_FINAL = _instructions(TARGET)


def _variables(name: str, target: str = TARGET) -> dict[str, str]:
    found = (pairs(each, {}) for each in _instructions(target) if each.name == name)
    return {key: value for each in found for key, value in each.items()}


def test_the_image_without_a_target_is_that_for_cpus() -> None:
    assert _STEPS.stages[-1].name == TARGET


def test_the_image_for_gpus_has_both_environments_and_a_compiler_and_is_set_as_the_manifests_set_it() -> None:
    steps = _instructions("cuda")
    copied = [each.words({})[-1] for each in steps if each.name == "COPY"]
    assert {"/opt/venv", "/opt/vllm"} <= set(copied)
    assert any("gcc" in each.rest and "python3-dev" in each.rest for each in steps if each.name == "RUN")
    own, environment = (
        _variables("ENV", "cuda"),
        manifests.environment(manifests.kserve_container("kserve/cluster-serving-runtime-gpu.yaml")),
    )
    assert own["MLSERVER_TORCH_STREAM_VLLM_PYTHON"] == "/opt/vllm/bin/python"
    assert {key: environment[key] for key in own.keys() & environment.keys()} == {
        key: value for key, value in own.items() if key in environment
    }
    assert [each.rest for each in steps if each.name == "USER"] == [each.rest for each in _FINAL if each.name == "USER"]


def test_the_manifests_name_the_image_of_this_version() -> None:
    containers = [manifests.kserve_container(), manifests.torchserve_container(), manifests.seldon_container()]
    assert {container["image"] for container in containers} == {_IMAGE}
    assert _variables("ARG")["VERSION"] == __version__
    assert f"-t {_IMAGE} .\n" in DOCKERFILE.read_text() and f"-t {_IMAGE}-gpu " in DOCKERFILE.read_text()


def test_the_image_is_set_as_the_manifests_set_it() -> None:
    """Variables that are the same on every platform are repeated in the manifests, for images of other makers."""
    own = _variables("ENV")
    for container in (manifests.kserve_container(), manifests.seldon_container()):
        environment = manifests.environment(container)
        common = own.keys() & environment.keys()
        assert {key: own[key] for key in common} == {key: environment[key] for key in common}
        assert len(common) >= 6


def test_a_read_only_container_writes_where_the_image_writes() -> None:
    (volumes,) = (each.words({}) for each in _FINAL if each.name == "VOLUME")
    for container in (manifests.kserve_container(), manifests.seldon_container()):
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert set(volumes) <= {mount["mountPath"] for mount in container["volumeMounts"]}


def test_the_user_is_a_number_that_is_not_root_s() -> None:
    """From a name, Kubernetes cannot tell whether ``runAsNonRoot`` is satisfied."""
    (user,) = (each.rest for each in _FINAL if each.name == "USER")
    uid, gid = user.split(":")
    assert int(uid) > 0 and gid == "0"


def test_what_is_copied_is_in_the_context_and_nothing_else() -> None:
    ignore = Ignore(CONTEXT / ".dockerignore")
    copied = [
        word
        for stage in _STEPS.stages
        for each in stage.instructions
        if each.name == "COPY" and "--from=" not in each.rest
        for word in each.words({})[:-1]
    ]
    assert [word for word in copied if ignore.ignores(word) or not (CONTEXT / word).exists()] == []
    assert not ignore.ignores("mlserver_torch_stream/engine/native/kernels/library.cpp")
    others = (".git", ".venv/bin/python", "dist/x.whl", "tests/conftest.py", "mlserver_torch_stream/__pycache__/x.pyc")
    assert [path for path in others if not ignore.ignores(path)] == []
    shown = {path.name for path in CONTEXT.iterdir() if not ignore.ignores(path.name)}
    assert shown <= {word.partition("/")[0] for word in copied}


def test_a_dockerfile_is_read_as_docker_reads_it(tmp_path: Path) -> None:
    text = 'ARG BASE=a\nFROM ${BASE} AS one\n# no\nENV X=1 \\\n# neither\n  Y="2 3"\nFROM one\nCMD ["a b", "$X"]\n'
    (tmp_path / "Dockerfile").write_text(text)
    read = read_dockerfile(tmp_path / "Dockerfile")
    assert read.arguments == {"BASE": "a"} and [(each.base, each.name) for each in read.stages] == [
        ("${BASE}", "one"),
        ("one", "1"),
    ]
    assert pairs(read.stages[0].instructions[0], {}) == {"X": "1", "Y": "2 3"}
    assert read.stages[1].instructions == [Instruction("CMD", '["a b", "$X"]')]
    assert read.stages[1].instructions[0].words({"X": "1"}) == ["a b", "$X"]


def test_a_base_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    builder = Builder(tmp_path, HostPip({}, {}))
    with pytest.raises(StepFailed, match=r"^FROM fedora: the base must be debian:RELEASE-slim"):
        builder.build(DOCKERFILE, CONTEXT, TARGET, "fedora", {})


def test_pip_in_the_steps_has_this_machine_s_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    (tmp_path / "pip.conf").write_text(
        "[global]\nextra-index-url =\n  file:///index/simple\n  https://x/simple\nfind-links = /a\nno-input = true\n"
        "[install]\nfind-links = /wheels\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_CERT", "/etc/own.pem")
    pip = read_host_pip()
    assert pip.settings["extra-index-url"] == "file:///index/simple https://x/simple"
    assert pip.settings["find-links"] == "/wheels" and "no-input" not in pip.settings
    assert pip.binds.pop(pip.settings["cert"]) == Path("/etc/own.pem")
    assert pip.binds == {"/index": Path("/index"), "/wheels": Path("/wheels")}
    monkeypatch.setenv("PIP_CONFIG_FILE", str(pip.write(tmp_path / "written") / "pip.conf"))
    monkeypatch.delenv("PIP_CERT")
    assert read_host_pip().settings == pip.settings


class _Answer(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/v2/health/ready" else 404)
        self.end_headers()

    def log_message(self, *words: object) -> None:
        pass


@contextmanager
def _answering(status: int, context: ssl.SSLContext | None = None) -> Iterator[dict[str, str]]:
    """Runs a server that answers with this status, and yields variables with which it stands for MLServer."""
    handler = type("_Handler", (_Answer,), {"status": status})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield {"MLSERVER_HTTP_PORT": str(server.server_address[1])}
        finally:
            server.shutdown()
            thread.join()


def _health(environment: dict[str, str]) -> int:
    return subprocess.run([sys.executable, str(_HEALTHCHECK)], env=environment, timeout=60).returncode


@pytest.mark.long
def test_a_container_is_healthy_when_its_server_is_ready(tmp_path: Path) -> None:
    with _answering(200) as environment:
        assert _health(environment) == 0
    assert _health(environment) == 1, "there is no server any more"
    with _answering(503) as environment:
        assert _health(environment) == 1
    pair = Authority(tmp_path).sign("server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    with _answering(200, context) as environment:
        assert _health({**environment, "MLSERVER_TORCH_STREAM_TLS_CERT_FILE": str(pair.certificate)}) == 0


@pytest.mark.slow
def test_the_dockerfile_lints_clean(tmp_path: Path) -> None:
    hadolint = make_environment(tmp_path, "hadolint").with_name("hadolint")
    assert subprocess.run([hadolint, DOCKERFILE], timeout=60).returncode == 0
    flawed = tmp_path / "Dockerfile"
    flawed.write_text(DOCKERFILE.read_text().replace("--no-install-recommends ", "").replace("# hadolint", "#"))
    found = subprocess.run([hadolint, flawed], capture_output=True, text=True, timeout=60)
    assert found.returncode == 1 and "DL3015" in found.stdout and "DL3008" in found.stdout


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a root file system and enter it")
@pytest.mark.skipif(bool(_LACKING), reason=f"not installed: {', '.join(_LACKING)}")
def test_buildah_makes_an_image_of_the_dockerfile_that_streams(tiny_model: Path, tmp_path: Path) -> None:
    """Takes minutes: downloads Debian, compiles kernels, and installs torch from the index of ``make install``."""
    options = ["--build-arg", f"TORCH_INDEX={os.environ.get('TORCH_INDEX', '')}"]
    prove = [sys.executable, "-m", "deploy.image.prove", "--work", str(tmp_path), "--model", str(tiny_model)]
    done = subprocess.run(
        [*prove, *options], cwd=markdown.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_PROVED_S
    )
    shutil.rmtree(tmp_path, ignore_errors=True)
    said = done.stdout.decode(errors="replace")
    assert done.returncode == 0, said[-10_000:]
    assert said.count("our own kernels (") == said.count(", prebuilt)") == (2 if runnable() else 0)
    assert said.count(" events, 200 tokens") == 2 and said.endswith("The image streams.\n")
