"""Rows that name a LoRA adapter. ``tests/engine/wire_worker.py`` stands for vLLM's worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.batches.api import Api, row
from tests.batches.conftest import serve_batches
from tests.engine.wire_worker import interpreter
from tests.server import openai
from tests.server.harness import Model, Server

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def adapted(folder: Path, tiny_model: Path) -> Iterator[Server]:
    (folder / "loras" / "late").mkdir(parents=True)
    vllm = {"enable_lora": True, "record": str(folder / "record"), "step_s": 0.02, "max_num_seqs": 2}
    extra = {"vllm": vllm, "lora_modules": {"early": str(folder / "loras")}}
    environment = {
        "MLSERVER_TORCH_STREAM_VLLM_PYTHON": str(interpreter(folder)),
        "MLSERVER_TORCH_STREAM_RUNTIME_LORA_UPDATING": "true",
        "MLSERVER_TORCH_STREAM_LORA_ROOT": str(folder / "loras"),
    }
    models = [Model("tiny", str(tiny_model), extra=extra)]
    with serve_batches(folder / "models", models, folder / "store", environment) as running:
        yield running


@pytest.mark.long
def test_a_row_is_answered_by_the_adapter_that_it_names(adapted: Server, folder: Path) -> None:
    with Api(adapted.url) as api:
        names = ["tiny", "early", "tiny", "earli"]
        ended = api.wait(api.create([row(number, model=name) for number, name in enumerate(names)])["id"])
        assert ended["request_counts"] == {"total": 4, "completed": 3, "failed": 1}
        answers = api.lines(ended["output_file_id"])
        (failed,) = api.lines(ended["error_file_id"])
    assert [each["response"]["body"]["model"] for each in answers] == names[:3]
    assert failed["custom_id"] == "row-3"
    assert (failed["response"]["status_code"], failed["response"]["body"]["error"]["code"]) == (404, "model_not_found")
    messages = map(json.loads, (folder / "record").read_text().splitlines())
    asked = [each["adapter"] for each in messages if each["t"] == "add"]
    assert sorted(asked, key=str) == [1, None, None]


@pytest.mark.long
def test_rows_wait_for_an_adapter_that_is_unloaded_and_loaded_again(adapted: Server) -> None:
    late = {"lora_name": "late", "lora_path": "late"}
    assert openai.post(adapted, LOAD, late).status_code == 200
    with Api(adapted.url) as api:
        begun = api.create([row(number, model="late", max_tokens=20) for number in range(40)])["id"]
        api.wait(begun, "in_progress", done=16)
        assert openai.post(adapted, UNLOAD, late | {"lora_path": ""}).status_code == 400  # no such key there
        assert openai.post(adapted, UNLOAD, {"lora_name": "late"}).status_code == 200
        assert api.batch(begun)["status"] == "in_progress"
        assert openai.post(adapted, LOAD, late).status_code == 200
        assert api.wait(begun)["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
