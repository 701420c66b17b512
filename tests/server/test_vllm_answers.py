"""Answers of SmolLM2 from vLLM itself over a real server: every API, tools, schemas, stop strings, streams that are
left, priorities, time limits and scores. vLLM takes minutes to start.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from threading import Event
from typing import Any

import grpc
import jsonschema
import pytest
import torch
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import plain_http
from tests.engine.real_vllm import NEEDS_VLLM, UNLIKELY_S, smollm2
from tests.server import openai, test_messages, test_responses, triton_wire, v2
from tests.server.harness import Server
from tests.server.openai import CHAT, TEXT, joined, prompt, stream, talk, texts, whole
from tests.server.vllm_server import vllm_server

pytestmark = NEEDS_VLLM
_V2 = "/v2/models/tiny"
_QUESTION = "What is the capital of France?"
_GREEDY = {"max_tokens": 24, "temperature": 0}
_LONG = {"max_tokens": 400, "temperature": 0, "ignore_eos": True}
_SLOTS = 4
_CLOSE = 1e-3  # vLLM sums in another order
_MOST_AFTER_LEAVING = 16  # tokens of 400: those on their way to the client, and two steps
_AREA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "kilometres": {"type": "integer", "maximum": 99}},
    "required": ["city", "kilometres"],
    "additionalProperties": False,
}
_LOOK = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": _AREA, "strict": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    extra = {
        "max_model_len": 512,
        "kv_cache_memory": "256MiB",
        "threads": None,
        "vllm": {"enforce_eager": True, "max_num_seqs": _SLOTS},
    }
    names = {"MLSERVER_TORCH_STREAM_VLLM_METRIC_NAMES": "true"}
    with vllm_server(tmp_path_factory.mktemp("v"), smollm2(), extra, triton=True, **names) as running:
        yield running


def _chunk_texts(response: Any) -> str:
    return "".join(json.loads(event)["text_output"] for event in openai.events(response))


def _joined_deltas(events: list[dict[str, Any]], kind: str) -> str:
    found = [each["delta"] for each in events if each["type"] == kind]
    return "".join(each if isinstance(each, str) else each["text"] for each in found)


def test_every_api_gives_the_same_text_for_a_greedy_prompt(server: Server) -> None:
    """The prompt is a conversation, or the text or the token ids of which it consists."""
    said = [{"role": "user", "content": _QUESTION}]
    ids = whole(server, "/tokenize", {"model": "tiny", "messages": said})["tokens"]
    text = whole(server, "/detokenize", {"model": "tiny", "tokens": ids})["prompt"]
    body = v2.rest_body(text, **_GREEDY)
    spoken = v2.rest_body(inputs=[v2.bytes_tensor("messages", json.dumps(said))], **_GREEDY)
    flat = {"text_input": text, "parameters": _GREEDY}
    post = partial(plain_http.post, timeout=v2.TIMEOUT_S)
    talked, asked = talk(_QUESTION, **_GREEDY), prompt(text, **_GREEDY)
    responded = test_responses.ask(_QUESTION, max_output_tokens=24, temperature=0)
    message = test_messages.ask(_QUESTION, **_GREEDY)
    wire = v2.grpc_request("tiny", text, **_GREEDY)
    found = {
        "infer": v2.rest_unary(server.url, f"{_V2}/infer", body).text,
        "infer_stream": v2.joined(v2.rest_stream(server.url, f"{_V2}/infer_stream", body)),
        "messages in V2": v2.rest_unary(server.url, f"{_V2}/infer", spoken).text,
        "generate": post(f"{server.url}{_V2}/generate", json=flat).json()["text_output"],
        "generate_stream": _chunk_texts(post(f"{server.url}{_V2}/generate_stream", json=flat)),
        "completions": texts(whole(server, TEXT, asked))[0],
        "completions of ids": texts(whole(server, TEXT, {**asked, "prompt": ids}))[0],
        "streamed completions": joined(stream(server, TEXT, asked))[0],
        "chat": texts(whole(server, CHAT, talked))[0],
        "streamed chat": joined(stream(server, CHAT, talked))[0],
        "responses": whole(server, test_responses.PATH, responded)["output"][0]["content"][0]["text"],
        "streamed responses": _joined_deltas(test_responses.events(server, responded), "response.output_text.delta"),
        "messages": whole(server, test_messages.PATH, message)["content"][0]["text"],
        "streamed messages": _joined_deltas(test_messages.events(server, message), "content_block_delta"),
    }
    with grpc.insecure_channel(server.grpc_target) as channel:
        stub = GRPCInferenceServiceStub(channel)
        found["ModelInfer"] = v2.grpc_reply(stub.ModelInfer(wire)).text
        found["ModelStreamInfer"] = v2.joined(map(v2.grpc_reply, stub.ModelStreamInfer(iter([wire]))))
    with grpc.insecure_channel(server.triton_target) as channel:
        found["Triton's ModelInfer"] = triton_wire.infer(channel, wire).text
        found["Triton's stream"] = v2.joined(each.reply for each in triton_wire.replies(channel, wire))
    assert set(found.values()) == {found["infer"]}, found
    assert "Paris" in found["infer"]


def test_a_forced_call_and_a_schema_hold_streamed_and_whole(server: Server) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "area", "schema": _AREA, "strict": True}}
    asked = talk(_QUESTION, max_tokens=100, temperature=0, response_format=schema)
    (text,) = texts(whole(server, CHAT, asked))
    jsonschema.validate(json.loads(text), _AREA)
    assert joined(stream(server, CHAT, asked)) == [text]
    named = {"type": "function", "function": {"name": "look"}}
    asked = talk(_QUESTION, max_tokens=100, temperature=0, tools=[_LOOK], tool_choice=named)
    choice = whole(server, CHAT, asked)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "look"
    jsonschema.validate(json.loads(call["function"]["arguments"]), _AREA)
    deltas = [each["choices"][0]["delta"] for each in stream(server, CHAT, asked) if each["choices"]]
    parts = [part["function"] for delta in deltas for part in delta.get("tool_calls", [])]
    assert "".join(part.get("arguments", "") for part in parts) == call["function"]["arguments"]


def test_a_stop_string_across_the_border_of_two_tokens_ends_the_answer_there(server: Server) -> None:
    asked = prompt("Once upon a time", **_GREEDY, ignore_eos=True, skip_special_tokens=False)
    shown = whole(server, TEXT, {**asked, "logprobs": 0})["choices"][0]
    tokens, text = shown["logprobs"]["tokens"], shown["text"]
    assert "".join(tokens) == text
    for before, (one, two) in enumerate(pairwise(tokens)):
        stop, start = one[-2:] + two[:2], len("".join(tokens[: before + 1])) - 2
        if before > 2 and len(stop) == 4 and text.index(stop) == start:
            break
    else:
        raise AssertionError(tokens)
    choice = whole(server, TEXT, {**asked, "stop": [stop]})["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[:start], "stop")
    chunks = stream(server, TEXT, {**asked, "stop": [stop]})
    assert joined(chunks) == [text[:start]]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def _generated(server: Server) -> float:
    """Returns how many tokens vLLM has generated by its own count."""
    text = plain_http.get(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=10).text
    (line,) = [each for each in text.splitlines() if each.startswith("vllm:generation_tokens_total{")]
    return float(line.rpartition(" ")[2])


def _leave_rest(server: Server) -> None:
    with plain_http.stream(
        "POST", f"{server.url}{TEXT}", json=prompt(**_LONG, stream=True), timeout=v2.TIMEOUT_S
    ) as response:
        assert next(response.iter_lines()).startswith("data: {")


def _leave_grpc(server: Server) -> None:
    with grpc.insecure_channel(server.grpc_target) as channel:
        call = GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([v2.grpc_request("tiny", "Hello", **_LONG)]))
        next(call)
        call.cancel()


@pytest.mark.parametrize("leave", [_leave_rest, _leave_grpc])
def test_vllm_stops_generating_when_a_client_leaves(server: Server, leave: Callable[[Server], None]) -> None:
    """The engine takes vLLM's counts only while it has requests, so another request runs afterwards. A sequence that
    vLLM still had would get a token in each of its steps.
    """
    whole(server, TEXT, prompt(**_GREEDY))  # so that no kernel is made below
    before = _generated(server)
    leave(server)
    server.wait_for("tiny", lambda counters: counters["running_sequences"] == 0, UNLIKELY_S)
    whole(server, TEXT, prompt(**{**_LONG, "max_tokens": 100}))
    assert 0 < _generated(server) - before - 100 <= _MOST_AFTER_LEAVING


def test_a_waiting_request_of_a_higher_priority_is_answered_first(server: Server) -> None:
    """The answers that run meanwhile end one after another, so that one slot after another becomes free."""
    begun: list[str] = []

    def ask(name: str, started: Event, **more: Any) -> None:
        body = prompt(name, **{**_LONG, "stream": True, **more})
        with plain_http.stream("POST", f"{server.url}{TEXT}", json=body, timeout=UNLIKELY_S) as response:
            for line in response.iter_lines():
                if line.startswith("data: {") and not started.is_set():
                    begun.append(name)
                    started.set()

    late = [f"late {number}" for number in range(5)]
    names = [*(f"run {number}" for number in range(_SLOTS)), *late, "urgent"]
    events = {name: Event() for name in names}
    with ThreadPoolExecutor(len(names)) as pool:
        asked = [
            pool.submit(ask, name, events[name], max_tokens=200 + 60 * number)
            for number, name in enumerate(names[:_SLOTS])
        ]
        assert all(events[name].wait(UNLIKELY_S) for name in names[:_SLOTS])
        for waiting, name in enumerate(names[_SLOTS:], 1):
            more = {"priority": 1} if name == "urgent" else {}
            asked.append(pool.submit(ask, name, events[name], max_tokens=30, **more))
            server.wait_for("tiny", lambda counters, least=waiting: counters["waiting_requests"] >= least, UNLIKELY_S)  # type: ignore[misc]
        for each in asked:
            each.result(UNLIKELY_S)
    assert set(begun[:_SLOTS]) == set(names[:_SLOTS])
    assert "urgent" in begun[_SLOTS : _SLOTS + 2], begun  # vLLM may have taken one of the others before


def test_an_answer_that_takes_too_long_ends_with_its_text_so_far(server: Server) -> None:
    before = _generated(server)
    body = v2.rest_body("Hello", **{**_LONG, "timeout": 1_000_000})
    replies = v2.rest_stream(server.url, f"{_V2}/infer_stream", body)
    assert replies[-1].finish_reason == "timeout"
    assert v2.joined(replies)
    time.sleep(1)
    assert _generated(server) - before < _LONG["max_tokens"]


@pytest.mark.parametrize("count", [0, 2])
def test_the_scores_of_a_prompt_are_those_of_transformers(server: Server, count: int) -> None:
    ids = AutoTokenizer.from_pretrained(smollm2()).encode(f"{_QUESTION} It is a city of towers, bridges and 42 cafés.")
    model = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.float32)
    with torch.inference_mode():
        table = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    asked = prompt(ids, echo=True, logprobs=3, temperature=0, max_tokens=count, ignore_eos=True)
    choice = whole(server, TEXT, asked)["choices"][0]
    shown = choice["logprobs"]
    assert len(shown["tokens"]) == len(ids) + count
    assert shown["token_logprobs"][0] is None
    own = [float(table[at, token_id]) for at, token_id in enumerate(ids[1:])]
    assert shown["token_logprobs"][1 : len(ids)] == pytest.approx(own, abs=_CLOSE)
    for at, top in enumerate(shown["top_logprobs"][1 : len(ids)]):
        assert sorted(top.values())[-3:] == pytest.approx(sorted(table[at].topk(3).values.tolist()), abs=_CLOSE)
    assert joined(stream(server, TEXT, asked)) == [choice["text"]]
