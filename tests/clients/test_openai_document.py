"""The OpenAPI document of ``/v1`` is valid, a real server matches it, and no input causes a status 500."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.clients.environments import make_environment
from tests.server.conftest import QUIET
from tests.server.harness import Model, Server, serve

_EXAMPLES = 60  # of each kind and path
_BOUND_S = 900
_RUN = {"cwd": Path(__file__).parent, "capture_output": True, "text": True, "timeout": _BOUND_S}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def short(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose answers are short, whatever is requested."""
    folder = tmp_path_factory.mktemp("document") / "models"
    with serve(folder, [Model("tiny", str(tiny_model), extra={"max_model_len": 128})], settings=QUIET) as running:
        yield running


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("environments"), "schemathesis")


@pytest.fixture(scope="module")
def document(short: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("document") / "openapi.json"
    path.write_bytes(httpx.get(f"{short.url}/v1/openapi.json").raise_for_status().content)
    return path


def test_a_validator_accepts_it(python: Path, document: Path) -> None:
    subprocess.run([str(python), "-m", "openapi_spec_validator", str(document)], check=True, timeout=_BOUND_S)


def test_the_server_keeps_to_it(short: Server, python: Path, document: Path) -> None:
    """Tests a loaded model without versions.

    The fuzzer sends no short ``timeout``, which would cause a 504, and no ``bad_words``, which cause a 500 if they
    exclude all that a constraint allows. The server may still refuse what the document accepts, such as a prompt that
    is longer than the context.
    """
    described = json.loads(document.read_text())
    anthropic = ("MessagesRequest", "CountTokensRequest")
    for name in ("ChatCompletionRequest", "CompletionRequest", "ModelResponseRequest", *anthropic):
        parameters = described["components"]["schemas"][name]["properties"]
        parameters["model"] = {"enum": ["tiny"]}
        del parameters["model_version"], parameters["timeout"], parameters["bad_words"]
    narrowed = document.with_name("narrowed.json")
    narrowed.write_text(json.dumps({**described, "servers": [{"url": "/"}]}))
    options = ["--phases=coverage,fuzzing", f"--max-examples={_EXAMPLES}", "--generation-deterministic"]
    options += ["--exclude-checks=positive_data_acceptance", "--continue-on-failure", "--no-color"]
    options += ["--request-timeout=60", "--exclude-path-regex=^/v1/(files|batches)"]  # tests/batches has those
    command = [str(python.with_name("schemathesis")), "run", str(narrowed), "--url", short.url, *options]
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "bad_input_is_named"}
    done = subprocess.run(command, **_RUN, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    assert "Traceback" not in short.log


_GENERATED = """
import sys
from v1_client import Client
from v1_client.api.default import create_chat_completion, create_completion, create_response, list_models
from v1_client.models import ChatCompletionRequest, CompletionRequest, ModelResponseRequest

client = Client(base_url=sys.argv[1], raise_on_unexpected_status=True)
assert [model.id for model in list_models.sync(client=client).data] == ["tiny"]
asked = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
answer = create_chat_completion.sync(client=client, body=ChatCompletionRequest.from_dict(asked))
assert answer.choices[0].message.content and answer.usage.completion_tokens == 3
asked = {"model": "tiny", "prompt": "Hello", "max_tokens": 3, "top_k": 5}
assert create_completion.sync(client=client, body=CompletionRequest.from_dict(asked)).choices[0].text
asked = {"model": "tiny", "input": "Hello", "max_output_tokens": 3, "ignore_eos": True}
answer = create_response.sync(client=client, body=ModelResponseRequest.from_dict(asked))
assert answer.output[0].content[0].text and answer.usage.output_tokens == 3
asked = {"model": "tiny", "prompt": "Hello"}
refused = create_completion.sync(client=client, body=CompletionRequest.from_dict({**asked, "n": 10**9}))
assert refused.error.param == "n"
"""


def test_a_generator_makes_a_client_of_it(
    short: Server, document: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("generated")
    python = make_environment(folder, "openapi-python-client")
    options = ["--path", str(document), "--meta", "none", "--output-path", str(folder / "v1_client")]
    generator = str(python.with_name("openapi-python-client"))
    generated = subprocess.run([generator, "generate", *options], **_RUN, check=True)
    assert "will not be generated" not in generated.stdout + generated.stderr
    command = [str(python), "-c", _GENERATED, short.url]
    done = subprocess.run(command, **{**_RUN, "cwd": folder}, check=False)
    assert done.returncode == 0, done.stderr
