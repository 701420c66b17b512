"""Anthropic's Messages API on a real server: its events, its blocks, its errors, its count of tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests import plain_http
from tests.server import v2
from tests.server.conftest import QUIET
from tests.server.harness import Model, Server, serve
from tests.server.openai import CHAT, post, talk, whole
from tests.server.test_responses import _PARAMETERS, _REASONING, _TOOLS

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
_LOOK = {"name": "look", "description": "Looks.", "input_schema": _PARAMETERS, "strict": True}
_CALL: dict[str, Any] = {
    "tools": [_LOOK],
    "tool_choice": {"type": "tool", "name": "look"},
    "max_tokens": 200,
    "temperature": 1.0,
    "seed": 3,
}
_SHORT = {"max_tokens": 12, "temperature": 0.9, "seed": 5, "ignore_eos": True}
_STOPS = {"max_tokens": 12, "logit_bias": {"1": 100}, "min_tokens": 4}


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = [
        Model("tiny", str(tiny_model), extra={"chat_template": _TOOLS}),
        Model("thinks", str(tiny_model), extra={"chat_template": _REASONING}),
    ]
    environment = {"MLSERVER_TORCH_STREAM_MODEL_ALIASES": "claude-*=tiny, gpt-4o = thinks"}
    with serve(tmp_path_factory.mktemp("messages"), models, settings=QUIET, environment=environment) as server:
        yield server


def ask(said: Any = "Hello", **more: Any) -> dict[str, Any]:
    messages = said if isinstance(said, list) else [{"role": "user", "content": said}]
    return {"model": "tiny", "messages": messages, **more}


def events(server: Server, body: dict[str, Any], path: str = PATH) -> list[dict[str, Any]]:
    """Returns the events of a stream, each of which has its own name, and nothing follows them."""
    response = post(server, path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.split("\n\n"):
        if block:
            name, data = block.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


def refusal(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert body.keys() == {"type", "error"} and body["type"] == "error" and body["error"].keys() == {"type", "message"}
    error: dict[str, Any] = body["error"]
    return error


def kinds(messages: list[dict[str, Any]]) -> list[str]:
    """Returns the types of messages, blocks and deltas, without repetitions."""
    said = [
        "+".join([each["type"], *(each[key]["type"] for key in ("content_block",) if key in each)])
        if "delta" not in each or each["type"] == "message_delta"
        else each["delta"]["type"]
        for each in messages
    ]
    return [kind for at, kind in enumerate(said) if at == 0 or said[at - 1] != kind]


def built(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the message that a client builds from the events, as Anthropic's SDK does."""
    message: dict[str, Any] = messages[0]["message"]
    for each in messages:
        if each["type"] == "content_block_start":
            assert each["index"] == len(message["content"])
            message["content"].append({**each["content_block"], "": ""})
        elif each["type"] == "content_block_delta":
            block, delta = message["content"][each["index"]], each["delta"]
            (key,) = delta.keys() - {"type"}
            block["" if key == "partial_json" else key] = block.get("" if key == "partial_json" else key) + delta[key]
        elif each["type"] == "content_block_stop":
            block = message["content"][each["index"]]
            spelled = block.pop("")
            if block["type"] == "tool_use":
                block["input"] = json.loads(spelled or "{}")
        elif each["type"] == "message_delta":
            message = {**message, **each["delta"], "usage": {**message["usage"], **each["usage"]}}
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [
        {key: each for key, each in block.items() if key not in ("id", "signature")} for block in message["content"]
    ]
    usage = {key: each for key, each in message["usage"].items() if key.startswith("output")}
    return {**message, "id": "", "content": content, "usage": usage}


@pytest.mark.long
@pytest.mark.parametrize("prefix", ["", "/openai"])
def test_a_stream_builds_up_the_message_that_is_answered_whole(served: Server, prefix: str) -> None:
    asked = ask(**_SHORT, system="Be short.", metadata={"user_id": "a"}, service_tier="auto")
    messages, answer = events(served, asked, prefix + PATH), whole(served, prefix + PATH, asked)
    assert kinds(messages) == [
        *("message_start", "ping", "content_block_start+text", "text_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    begun = messages[0]["message"]
    assert begun["content"] == [] and begun["stop_reason"] is None and begun["usage"]["input_tokens"] > 0
    last = built(messages)
    assert without_ids(last) == without_ids(answer)
    assert last["id"].startswith("msg_") and answer["type"] == "message" and answer["role"] == "assistant"
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
    (block,) = answer["content"]
    assert block["type"] == "text" and block["text"]
    assert answer["usage"]["output_tokens"] == 12
    chat = whole(
        served, CHAT, talk(messages=[{"role": "system", "content": "Be short."}, *asked["messages"]], **_SHORT)
    )
    assert chat["choices"][0]["message"]["content"] == block["text"]
    counted = answer["usage"]
    assert counted["input_tokens"] + counted["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]


def test_why_a_message_ended_is_said(served: Server) -> None:
    assert whole(served, PATH, ask(**_STOPS))["stop_reason"] == "end_turn"
    text = whole(served, PATH, ask(**_SHORT))["content"][0]["text"]
    mark = text[3:6]
    for answer in (
        whole(served, PATH, ask(**_SHORT, stop_sequences=[mark])),
        built(events(served, ask(**_SHORT, stop_sequences=[mark]))),
    ):
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", mark)
        assert answer["content"][0]["text"] == text[: text.index(mark)]


def test_without_a_bound_the_answer_fills_the_context(served: Server) -> None:
    (model,) = [each for each in plain_http.get(f"{served.url}/v1/models").json()["data"] if each["id"] == "tiny"]
    answer = whole(served, PATH, ask(ignore_eos=True))
    assert answer["stop_reason"] == "model_context_window_exceeded"
    used = answer["usage"]
    assert sum(used[f"{kind}_tokens"] for kind in ("input", "cache_read_input", "output")) == model["max_model_len"]


def test_a_tool_is_used_and_its_result_continues_the_conversation(served: Server) -> None:
    messages, answer = events(served, ask(**_CALL)), whole(served, PATH, ask(**_CALL))
    assert kinds(messages) == [
        *("message_start", "ping", "content_block_start+tool_use", "input_json_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert without_ids(built(messages)) == without_ids(answer)
    (block,) = answer["content"]
    assert (block["type"], block["name"], answer["stop_reason"]) == ("tool_use", "look", "tool_use")
    jsonschema.validate(block["input"], _PARAMETERS)
    turns: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
    for turn in range(3):
        answer = whole(served, PATH, ask(turns, **{**_CALL, "tool_choice": {"type": "any"}}))
        (block, *_) = answer["content"]
        result = {"type": "tool_result", "tool_use_id": block["id"], "content": f"no, {turn}", "is_error": True}
        turns += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
    assert whole(served, PATH, ask(turns, **_SHORT))["content"][0]["text"]


def test_the_blocks_are_the_messages_of_a_chat(served: Server) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Whe", **cached}, {"type": "text", "text": "re?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "Let me see.", "citations": None},
                {"type": "tool_use", "id": "c", "name": "look", "input": {"at": "home"}, "caller": None},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "at home"}]},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": "home"}'}}
    messages = [
        {"role": "system", "content": "First.\nSecond."},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "reasoning": "Hm.", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "at home"},
        {"role": "user", "content": "And?"},
    ]
    system = [{"type": "text", "text": "First.", **cached}, {"type": "text", "text": "Second."}]
    chat = whole(served, CHAT, talk(messages=messages, **_SHORT))
    answer = whole(served, PATH, ask(turns, system=system, **_SHORT))
    assert answer["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    count = whole(served, COUNT, {"model": "tiny", "messages": turns, "system": system})
    assert count == {"input_tokens": chat["usage"]["prompt_tokens"]}
    with_tools = whole(served, COUNT, {"model": "tiny", "messages": turns, "system": system, "tools": [_LOOK]})
    assert with_tools["input_tokens"] > count["input_tokens"]


def test_reasoning_is_a_block_before_the_text(served: Server) -> None:
    asked = ask(model="thinks", thinking={"type": "enabled", "budget_tokens": 1024}, **_SHORT)
    messages, answer = events(served, asked), whole(served, PATH, asked)
    assert kinds(messages) == [
        *("message_start", "ping", "content_block_start+thinking", "thinking_delta", "signature_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert without_ids(built(messages)) == without_ids(answer)
    (block,) = answer["content"]
    assert block["thinking"] and block["signature"]
    assert answer["usage"]["output_tokens_details"] == {"thinking_tokens": 12}
    longer = whole(served, COUNT, ask(model="thinks", output_config={"effort": "max"}))
    assert longer["input_tokens"] > whole(served, COUNT, ask(model="thinks"))["input_tokens"]


def test_an_answer_is_kept_to_its_schema(served: Server) -> None:
    described = {"format": {"type": "json_schema", "schema": _PARAMETERS}}
    answer = whole(served, PATH, ask(output_config=described, max_tokens=300, temperature=1.2, seed=5))
    jsonschema.validate(json.loads(answer["content"][0]["text"]), _PARAMETERS)


def test_a_client_may_use_names_of_its_own(served: Server) -> None:
    assert whole(served, PATH, ask(model="claude-opus-4-5[1m]", **_SHORT))["model"] == "tiny"
    assert whole(served, CHAT, talk(model="gpt-4o", max_tokens=2))["model"] == "thinks"
    assert plain_http.get(f"{served.url}/v1/models/claude-x").json()["id"] == "tiny"


def test_headers_of_anthropics_clients_are_accepted_and_answers_have_an_id(served: Server) -> None:
    beta = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b", "x-api-key": "k", "x-request-id": "mine"}
    response = post(served, PATH, ask(**_SHORT), **beta)
    assert response.headers["request-id"] == "mine" and response.json()["id"] == "msg_mine"


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a",
                                                     "content": [{"type": "image", "source": {}}]}]}]},
         "messages[0].content[0].content[0].type"),
        ({"system": [{"type": "image", "source": {}}]}, "system[0].type"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
         "messages[0].content[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{**_LOOK, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{**_LOOK, "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type"),
        ({"tools": [_LOOK], "tool_choice": {"type": "tool", "name": "go"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"container": "x"}, "container"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"nobody_knows_it": 1}, "nobody_knows_it"),
        ({"model": "thinks", "thinking": {"type": "disabled"}}, "thinking"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_for_is_refused_by_name(served: Server, more: dict[str, Any], field: str) -> None:
    for path in (PATH, COUNT) if not {"max_tokens", "container", "stop_sequences"} & more.keys() else (PATH,):
        response = post(served, path, {**ask(), **more})
        assert response.status_code == 400
        error = refusal(response)
        assert error["type"] == "invalid_request_error" and error["message"].startswith(f"{field}: "), error


def test_errors_have_anthropics_types(served: Server) -> None:
    response = post(served, PATH, ask(model="nobody"))
    assert response.status_code == 404 and refusal(response)["type"] == "not_found_error"
    too_long = post(served, PATH, ask("Hello " * 5000))
    assert too_long.status_code == 400 and refusal(too_long)["message"].startswith("prompt is too long")


@pytest.mark.long
def test_an_error_after_the_first_token_is_an_event(slow: Server) -> None:
    *before, last = events(slow, ask(max_tokens=900, ignore_eos=True, timeout=1_500_000))
    assert last["type"] == "error" and last["error"]["type"] == "timeout_error"
    assert kinds(before)[-1] == "text_delta"


def test_silence_is_bridged_by_pings(slow: Server) -> None:
    """The prefill takes longer than the interval between two pings."""
    response = post(slow, PATH, ask("Hello " * 12, max_tokens=2, stream=True))
    first, *_ = response.text.split("\n\n")
    assert first == 'event: ping\ndata: {"type":"ping"}' and ": ping" not in response.text.replace("event: ping", "")


def test_a_text_is_tokenized_and_back(served: Server) -> None:
    asked = {"model": "tiny", "prompt": "Hello there", "return_token_strs": True}
    answer = whole(served, "/tokenize", asked)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) and answer["max_model_len"] > 0
    assert whole(served, "/detokenize", {"model": "tiny", "tokens": answer["tokens"]}) == {"prompt": "Hello there"}
    messages = talk(messages=[{"role": "user", "content": "Hello"}])
    usage = whole(served, CHAT, {**messages, "max_tokens": 1})["usage"]
    chat = whole(served, "/tokenize", messages)
    assert chat["count"] == usage["prompt_tokens"] and chat["token_strs"] is None
    long = plain_http.post(f"{served.url}/tokenize", json={"model": "tiny", "prompt": "Hello " * 9000}, timeout=60)
    assert long.status_code == 400 and long.json()["error"]["code"] == "context_length_exceeded"
    assert served.log.count(long.headers["x-request-id"]) == 1
    for path, body, field in (
        ("/tokenize", {"model": "tiny"}, "prompt"),
        ("/tokenize", {"prompt": "a"}, "model"),
        ("/detokenize", {"model": "tiny", "tokens": [10**9]}, "tokens[0]"),
        ("/detokenize", {"model": "tiny", "tokens": "a"}, "tokens"),
        ("/detokenize", {"model": "tiny", "tokens": []}, "tokens"),
    ):
        response = plain_http.post(f"{served.url}{path}", json=body, timeout=v2.TIMEOUT_S)
        assert response.status_code == 400 and response.json()["error"]["param"] == field, response.text
