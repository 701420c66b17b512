"""Prompts sent as BYTES tensors to a stock MLServer, whose model is none of ours."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlserver_torch_stream.cloud.endpoint import ServerEndpoint
from mlserver_torch_stream.cloud.pipeline import PipelineLimits
from mlserver_torch_stream.cloud.run import CloudRun, stream
from tests.cloud.command import cloud
from tests.cloud.handlers import predictions, rows
from tests.server.harness import Model, Server, serve

_SOURCE = """
from mlserver import MLModel
from mlserver.codecs import StringCodec
from mlserver.types import InferenceResponse, MetadataTensor


class Reverse(MLModel):
    async def load(self):
        self.inputs = [MetadataTensor(name="prompt", datatype="BYTES", shape=[-1, 1])]
        return True

    async def predict(self, payload):
        (tensor,) = payload.inputs
        prompts = self.decode(tensor, default_codec=StringCodec)
        assert tensor.shape == [len(prompts), 1], tensor.shape
        said = getattr(payload.parameters, "said", "")
        texts = [f"{prompt[::-1]}{said}, 1 of {len(prompts)}" for prompt in prompts if len(prompts) == 1 or prompt]
        return InferenceResponse(model_name=self.name, outputs=[StringCodec.encode_output("text", texts)])
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("foreign") / "models"
    folder.mkdir()
    (folder / "reverse.py").write_text(_SOURCE)
    with serve(folder, [Model("m", None, "reverse.Reverse")], settings={"parallel_workers": 0}) as running:
        yield running


def _answer(text: str) -> list[Any]:
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1, 1], "parameters": {"content_type": "str"}}
    return [[{**tensor, "data": [text]}]]


def _write(folder: Path, bodies: list[dict[str, Any]]) -> Path:
    (folder / "in").mkdir()
    (folder / "in" / "a.jsonl").write_text("".join(f"{json.dumps(body)}\n" for body in bodies))
    return folder / "in"


def test_a_batch_of_prompts_is_one_tensor_and_its_answer_is_split_in_order(
    server: Server, tmp_path: Path, capfd: Any
) -> None:
    place = _write(tmp_path, [{"prompt": f"{number}ü"} for number in range(10)])
    run = ("run", "--input", place, "--column", "prompt", "--url", server.url, "--model", "m", "--tensor", "prompt")
    assert cloud(*run, "--batch-rows", "4", "--max-wait", "10") == 0
    sizes = [4] * 8 + [2] * 2
    expected = [_answer(f"ü{number}, 1 of {size}") for number, size in enumerate(sizes)]
    assert [predictions(row) for row in rows(capfd.readouterr().out)] == expected


def _streamed(server: Server, place: Path) -> list[Any]:
    """Returns the predictions of each row, or the message of its failure."""

    async def run() -> list[Any]:
        endpoint = ServerEndpoint(server.url, "m", tensor="prompt")
        limits = PipelineLimits(batch_rows=3, max_wait=10.0, batches=1)
        found = stream(CloudRun(str(place), limits=limits), endpoint)
        outcomes = [result.outcome async for result in found]
        return [each.failure.message if each.failure else (each.response or {})["predictions"] for each in outcomes]

    return asyncio.run(run())


def test_rows_with_other_parameters_are_other_requests_and_messages_are_refused(server: Server, tmp_path: Path) -> None:
    said = [{"prompt": f"{number}", "said": "!"} for number in range(3)]
    mixed: list[dict[str, Any]] = [
        {"prompt": "3", "said": "?"},
        {"prompt": "4"},
        {"messages": [{"role": "user", "content": "5"}]},
    ]
    found = _streamed(server, _write(tmp_path, [*said, *mixed]))
    assert found[:3] == [_answer(f"{number}!, 1 of 3") for number in range(3)]
    assert found[3:] == [
        _answer("3?, 1 of 1"),
        _answer("4, 1 of 1"),
        "a tensor holds a prompt, and cannot hold messages",
    ]


def test_rows_whose_batch_has_an_answer_of_another_length_are_sent_one_by_one(server: Server, tmp_path: Path) -> None:
    """The model leaves out empty prompts, unless they are alone."""
    found = _streamed(server, _write(tmp_path, [{"prompt": text} for text in ("a", "", "b", "c", "d", "e")]))
    assert found == [_answer(f"{text}, 1 of 1") for text in ("a", "", "b", "c", "d", "e")]
