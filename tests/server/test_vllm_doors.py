"""A model that vLLM's worker runs, over all ports of a real server: APIs, adapters, metrics, death of the worker.

``tests/engine/wire_worker.py`` stands for vLLM's worker.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import grpc
import pytest
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub

from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.server.rest.adapter_routes import place_of
from tests import plain_http
from tests.engine.wire_worker import CONTEXT, interpreter
from tests.server import openai, v2
from tests.server.conftest import QUIET
from tests.server.harness import Model, Server, get_ready, serve

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def doors(folder: Path, tiny_model: Path) -> Iterator[Server]:
    (folder / "loras" / "late").mkdir(parents=True)
    vllm = {
        "enable_lora": True,
        "marks": str(folder),
        "record": str(folder / "record"),
        "descendants": str(folder / "pids"),
    }
    extra = {"vllm": vllm, "lora_modules": {"early": str(folder / "loras")}}
    environment = {
        "MLSERVER_TORCH_STREAM_VLLM_PYTHON": str(interpreter(folder)),
        "MLSERVER_TORCH_STREAM_RUNTIME_LORA_UPDATING": "true",
        "MLSERVER_TORCH_STREAM_LORA_ROOT": str(folder / "loras"),
        "MLSERVER_TORCH_STREAM_VLLM_METRIC_NAMES": "true",
    }
    models = [Model("tiny", str(tiny_model), extra=extra)]
    with serve(folder / "models", models, settings=QUIET, environment=environment) as running:
        yield running


def requests_of(folder: Path) -> list[dict[str, Any]]:
    messages = [json.loads(line) for line in (folder / "record").read_text().splitlines()]
    return [each for each in messages if each["t"] == "add"]


@pytest.mark.long
def test_every_spelling_gives_the_same_tokens(doors: Server) -> None:
    text = openai.whole(doors, openai.TEXT, openai.prompt(max_tokens=6))["choices"][0]["text"]
    chunks = openai.stream(doors, openai.TEXT, openai.prompt(max_tokens=6))
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == text
    flat = plain_http.post(
        f"{doors.url}/v2/models/tiny/generate",
        json={"text_input": "Hello", "parameters": {"max_tokens": 6}},
        timeout=v2.TIMEOUT_S,
    )
    assert flat.json()["text_output"] == text
    chat = openai.whole(doors, openai.CHAT, openai.talk(max_tokens=6))
    assert chat["usage"]["completion_tokens"] == 6
    assert chat["choices"][0]["finish_reason"] == "length"
    with grpc.insecure_channel(doors.grpc_target) as channel:
        reply = GRPCInferenceServiceStub(channel).ModelInfer(v2.grpc_request("tiny", "Hello", max_tokens=6))
    assert v2.grpc_reply(reply).text == text


def test_prompts_are_scored_on_v1_and_in_v2(doors: Server) -> None:
    asked = openai.prompt("Hello", echo=True, logprobs=1, max_tokens=0)
    choice = openai.whole(doors, openai.TEXT, asked)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Hello", "length")
    first, *others = choice["logprobs"]["token_logprobs"]
    assert first is None and others and all(each < 0 for each in others)
    body = v2.rest_body("Hello", prompt_logprobs=0, max_tokens=1)
    outputs = v2.rest_unary(doors.url, "/v2/models/tiny/infer", body).outputs
    assert [each["logprob"] for each in json.loads(outputs["prompt_logprobs"][0])] == [None, *others]


def test_an_adapter_is_a_model_on_v1_and_a_parameter_in_v2(doors: Server, folder: Path) -> None:
    chat = openai.whole(doors, openai.CHAT, {**openai.talk(max_tokens=2), "model": "early"})
    assert chat["model"] == "early"
    assert requests_of(folder)[-1]["adapter"] == 1
    flat = f"{doors.url}/v2/models/tiny/generate"
    asked = {"text_input": "x", "parameters": {"max_tokens": 2, "lora_name": "early"}}
    assert plain_http.post(flat, json=asked, timeout=v2.TIMEOUT_S).status_code == 200
    assert requests_of(folder)[-1]["adapter"] == 1
    asked["parameters"] = {"lora_name": "earli"}
    refused = plain_http.post(flat, json=asked, timeout=v2.TIMEOUT_S)
    assert refused.status_code == 422
    assert "lora_name: no such adapter is loaded: 'earli'; did you mean 'early'?" in refused.text
    both = openai.post(doors, openai.CHAT, {**openai.talk(), "model": "early", "lora_name": "early"})
    assert (both.status_code, openai.refused(both)["param"]) == (400, "lora_name")
    unknown = openai.post(doors, openai.CHAT, {**openai.talk(), "model": "earli"})
    assert (unknown.status_code, openai.refused(unknown)["code"]) == (404, "model_not_found")


def test_adapters_are_listed_loaded_and_unloaded(doors: Server) -> None:
    def names() -> list[str]:
        shown = plain_http.get(f"{doors.url}/v1/models", timeout=10).json()["data"]
        assert all(each["parent"] == "tiny" for each in shown if each["id"] != "tiny")
        assert all(each["max_model_len"] == CONTEXT for each in shown)
        return [each["id"] for each in shown]

    assert names() == ["tiny", "early"]
    loaded = openai.post(doors, LOAD, {"lora_name": "later", "lora_path": "late"})
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'later' added successfully.")
    assert names() == ["tiny", "early", "later"]
    one = plain_http.get(f"{doors.url}/v1/models/later", timeout=10).json()
    assert (one["id"], one["root"], one["parent"]) == ("later", "later", "tiny")
    openai.whole(doors, openai.TEXT, {**openai.prompt(max_tokens=2), "model": "later"})
    metadata = plain_http.get(f"{doors.url}/v2/models/tiny", timeout=10).json()
    assert metadata["parameters"] == {"lora_adapters": "early,later", "attention": "vllm"}
    for body, field in (
        ({"lora_name": "later", "lora_path": "late"}, "lora_name"),
        ({"lora_name": "tiny", "lora_path": "late"}, "lora_name"),
        ({"lora_name": "x", "lora_path": "../models"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "/etc"}, "lora_path"),
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "late", "lora_pathh": 1}, "lora_pathh"),
        ({"lora_name": "x\n", "lora_path": "late"}, "lora_name"),
    ):
        refused = openai.post(doors, LOAD, body)
        assert (refused.status_code, openai.refused(refused)["param"]) == (400, field), refused.text
    assert openai.post(doors, UNLOAD, {"lora_name": "later"}).status_code == 200
    assert names() == ["tiny", "early"]
    gone = openai.post(doors, UNLOAD, {"lora_name": "later"})
    assert (gone.status_code, openai.refused(gone)["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("off", [False, True])
def test_a_hub_id_is_taken_only_where_the_hub_is_on(off: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1" if off else "0")
    for path, taken in (
        ("org/name", not off),
        ("../name", False),
        ("/etc", False),
        ("name", False),
        ("tests/server", False),
    ):
        with nullcontext() if taken else pytest.raises(InvalidInput, match="lora_path"):
            assert place_of("", path) == path


@pytest.mark.parametrize("path", ["a\0b", "a" * 5_000, "../", "link"])
def test_a_path_that_is_no_folder_below_the_root_is_refused(path: str, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to("/etc")
    with pytest.raises(InvalidInput, match="lora_path"):
        place_of(str(tmp_path / "root"), path)


@pytest.mark.parametrize(
    ("name", "adapter", "message"),
    [
        ("twin", "twin", "parameters.extra.lora_modules: twin is the name of the model itself"),
        ("second", "tiny", "parameters.extra.lora_modules: tiny is the name of model tiny or of its adapter"),
        ("third", "early", "parameters.extra.lora_modules: early is the name of model tiny or of its adapter"),
        ("early", "free", "name: early is the name of an adapter of model tiny"),
    ],
)
def test_a_name_for_two_models_or_adapters_fails_the_load(
    name: str, adapter: str, message: str, doors: Server, folder: Path, tiny_model: Path
) -> None:
    extra = {"vllm": {"enable_lora": True}, "lora_modules": {adapter: str(folder)}}
    place = folder / "models" / name
    place.mkdir()
    (place / "model-settings.json").write_text(json.dumps(Model(name, str(tiny_model), extra=extra).settings()))
    loaded = plain_http.post(f"{doors.url}/v2/repository/models/{name}/load", json={}, timeout=v2.TIMEOUT_S)
    assert loaded.status_code == 500
    assert message in loaded.text


def test_vllms_metrics_are_the_workers_own_numbers(doors: Server) -> None:
    openai.whole(doors, openai.TEXT, openai.prompt(max_tokens=3))
    text = plain_http.get(f"http://127.0.0.1:{doors.metrics_port}/metrics", timeout=10).text
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[:1] != "#"}
    assert values['vllm:generation_tokens_total{model_name="tiny"}'] >= 3
    assert values['vllm:num_requests_running{model_name="tiny"}'] == 0
    assert values['torch_stream_kv_cache_budget_bytes{model="tiny",version=""}'] == 8 * CONTEXT * 1024
    assert not any("early" in name for name in values)


def test_a_server_whose_worker_dies_is_not_ready_until_the_next_one_is(doors: Server, folder: Path) -> None:
    pid = int((folder / "pids").read_text().split()[0])
    os.kill(pid, signal.SIGKILL)
    seen: set[int] = set()
    end = time.monotonic() + 60
    while 503 not in seen or get_ready(doors, "models/tiny").status_code != 200:
        seen.add(get_ready(doors, "models/tiny").status_code)
        assert time.monotonic() < end, seen
    assert openai.whole(doors, openai.TEXT, openai.prompt(max_tokens=2))["usage"]["completion_tokens"] == 2
