"""A runtime like MLServer's streaming example, and ours, in one server with our settings, and its clients."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from mlserver.codecs import StringCodec
from mlserver.grpc.converters import ModelInferRequestConverter, ModelInferResponseConverter
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub
from mlserver.types import InferenceRequest, InferenceResponse

from tests.clients.environments import make_environment
from tests.markdown import ROOT
from tests.server import text_example
from tests.server.harness import Model, Server, serve

# A server of its own; MLServer's converters call a deprecated method of pydantic.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince20")]
_WORDS = ["Which", " city", " lies", " on", " the", " Seine?"]
_REQUEST = {
    "inputs": [
        {
            "name": "prompt",
            "shape": [1],
            "datatype": "BYTES",
            "data": ["".join(_WORDS)],
            "parameters": {"content_type": "str"},
        }
    ],
    "outputs": [{"name": "output"}],
}
_TEXT_MODEL = {
    "name": "text-model",
    "implementation": "text_example.TextModel",
    "versions": ["text-model/v1.2.3"],
    "platform": "mlserver",
    "inputs": [{"datatype": "BYTES", "name": "prompt", "shape": [1]}],
    "outputs": [{"datatype": "BYTES", "name": "output", "shape": [1]}],
}
_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """``text-model`` and our ``tiny``, with the settings that this project ships."""
    folder = tmp_path_factory.mktemp("example")
    shutil.copy(text_example.__file__, folder)
    (folder / "models/text-model").mkdir(parents=True)
    (folder / "models/text-model/model-settings.json").write_text(json.dumps(_TEXT_MODEL))
    settings = json.loads((ROOT / "settings.json").read_text())
    assert settings["parallel_workers"] == 0 and settings["gzip_enabled"] is False
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    models = [Model("tiny", str(tiny_model))]
    with serve(folder / "models", models, settings=settings, environment={"PYTHONPATH": path}) as running:
        yield running


def _over_rest(server: Server, model: str, request: dict[str, Any]) -> list[InferenceResponse]:
    url = f"{server.url}/v2/models/{model}/generate_stream"
    with httpx.Client(trust_env=False, timeout=_TIMEOUT_S) as client, client.stream("POST", url, json=request) as reply:
        assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    return [InferenceResponse.model_validate_json(line) for line in lines]


def _over_grpc(server: Server, model: str, request: dict[str, Any]) -> list[InferenceResponse]:
    typed = InferenceRequest.model_validate(request)
    typed.inputs[0] = StringCodec.encode_input(typed.inputs[0].name, typed.inputs[0].data.root)
    message = ModelInferRequestConverter.from_types(typed, model_name=model, model_version=None)

    async def messages() -> AsyncIterator[Any]:
        yield message

    async def read() -> list[InferenceResponse]:
        async with grpc.aio.insecure_channel(server.grpc_target) as channel:
            answers = GRPCInferenceServiceStub(channel).ModelStreamInfer(messages(), timeout=_TIMEOUT_S)
            return [ModelInferResponseConverter.to_types(answer) async for answer in answers]

    return asyncio.run(read())


# As the example's client for REST; prints the objects of the events.
_CONNECT_SSE = """
import json, sys
import httpx
from httpx_sse import connect_sse

url, request = sys.argv[1:]
with httpx.Client(trust_env=False, timeout=60) as client:
    with connect_sse(client, "POST", url, json=json.loads(request)) as source:
        print(json.dumps([json.loads(event.data) for event in source.iter_sse()]))
"""


@pytest.fixture(scope="module")
def httpx_sse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with httpx-sse."""
    return make_environment(tmp_path_factory.mktemp("clients"), "httpx-sse")


@pytest.mark.parametrize("model", ["text-model", "tiny"])
def test_httpx_sse_reads_the_text_that_httpx_reads(server: Server, httpx_sse: Path, model: str) -> None:
    parameters = {"max_tokens": 5, "ignore_eos": True, "temperature": 0}
    request = _REQUEST if model == "text-model" else {"inputs": _REQUEST["inputs"], "parameters": parameters}
    words = [str(httpx_sse), "-c", _CONNECT_SSE, f"{server.url}/v2/models/{model}/generate_stream", json.dumps(request)]
    done = subprocess.run(words, capture_output=True, timeout=_TIMEOUT_S, check=True)
    found = [InferenceResponse.model_validate(event) for event in json.loads(done.stdout)]
    if model == "text-model":
        assert [_texts(answer) for answer in found] == [[word] for word in _WORDS]
    assert _joined(found) == _joined(_over_rest(server, model, request)) != ""


def _texts(answer: InferenceResponse) -> list[str]:
    texts: list[str] = StringCodec.decode_output(answer.outputs[0])
    return texts


def _joined(answers: list[InferenceResponse]) -> str:
    """Joins the texts of the answers, as the number of tokens in each event depends on the reader."""
    return "".join(text for answer in answers for text in _texts(answer))


_READERS = pytest.mark.parametrize("read", [_over_rest, _over_grpc], ids=["rest", "grpc"])


@_READERS
def test_the_examples_clients_read_its_text_word_by_word(server: Server, read: Any) -> None:
    answers = read(server, "text-model", _REQUEST)
    assert [_texts(answer) for answer in answers] == [[word] for word in _WORDS]
    assert {answer.model_name for answer in answers} == {"text-model"}


@_READERS
def test_the_same_clients_read_a_model_of_ours_in_the_same_server(server: Server, read: Any) -> None:
    """The request lists only the output ``text_output``, while the example's request asks for its own outputs."""
    request = {**_REQUEST, "outputs": [{"name": "text_output"}], "parameters": {"max_tokens": 5, "ignore_eos": True}}
    answers = read(server, "tiny", request)
    assert {answer.model_name for answer in answers} == {"tiny"} and _joined(answers)
    finals = [answer.parameters.triton_final_response for answer in answers]
    assert finals == [False] * (len(answers) - 1) + [True]
