"""OpenAI's Responses API on a real server: its items, its events, its statuses, its refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests import plain_http
from tests.server import v2
from tests.server.conftest import QUIET
from tests.server.harness import Model, Server, serve
from tests.server.openai import CHAT, post, refused, talk, whole

PATH = "/v1/responses"
_TOOLS = (
    "{% for tool in tools or [] %}<tool_call>{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function.name }}{% for key in call.function.arguments %} {{ key }}{% endfor %}"
    "{% endfor %}{% endfor %}"
)
_REASONING = _TOOLS + "<|assistant|>{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}<think>\n{# </think> #}"
_PARAMETERS = {
    "type": "object",
    "properties": {"at": {"enum": ["home", "work", "the end"]}, "far": {"type": "boolean"}},
    "required": ["at", "far"],
    "additionalProperties": False,
}
_LOOK = {"type": "function", "name": "look", "parameters": _PARAMETERS, "strict": True}
_CALL: dict[str, Any] = {
    "tools": [_LOOK],
    "tool_choice": {"type": "function", "name": "look"},
    "max_output_tokens": 200,
    "temperature": 1.0,
    "seed": 3,
}
_SHORT = {"max_output_tokens": 12, "temperature": 0.9, "seed": 5, "ignore_eos": True}
_ENDS = {"max_output_tokens": 12, "logit_bias": {"1": 100}, "min_tokens": 4}
_OWN_IDS = ("id", "item_id", "call_id", "created_at", "sequence_number")


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = [
        Model("tiny", str(tiny_model), extra={"chat_template": _TOOLS}),
        Model("thinks", str(tiny_model), extra={"chat_template": _REASONING}),
    ]
    with serve(tmp_path_factory.mktemp("responses"), models, settings=QUIET) as server:
        yield server


def ask(said: Any = "Hello", **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": said, **more}


def events(server: Server, body: dict[str, Any], path: str = PATH) -> list[dict[str, Any]]:
    """Returns the events of a stream.

    They must have their own names and gapless numbers, and no ``[DONE]`` after them.
    """
    response = post(server, path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if lines:
            name, data = lines
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    return found


def kinds(messages: list[dict[str, Any]]) -> list[str]:
    """Returns the types in order, without repetitions."""
    said = [each["type"].removeprefix("response.") for each in messages]
    return [kind for at, kind in enumerate(said) if at == 0 or said[at - 1] != kind]


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_ids(each) for key, each in value.items() if key not in _OWN_IDS}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


def _text(response: dict[str, Any]) -> str:
    (item,) = response["output"]
    (part,) = item["content"]
    return str(part["text"])


def _deltas(messages: list[dict[str, Any]], kind: str) -> str:
    return "".join(each["delta"] for each in messages if each["type"] == f"response.{kind}.delta")


@pytest.mark.parametrize("prefix", ["", "/openai"])
def test_a_stream_builds_up_the_response_that_is_answered_whole(served: Server, prefix: str) -> None:
    asked = ask(**_SHORT, metadata={"a": "b"}, instructions="Be short.")
    answer = whole(served, prefix + PATH, asked)
    messages = events(served, asked, prefix + PATH)
    assert kinds(messages) == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    assert answer["object"] == "response" and answer["id"].startswith("resp_") and answer["output"][0]["id"]
    last = messages[-1]["response"]
    for each in (answer, last):
        del each["usage"]["input_tokens_details"]
    assert without_ids(last) == without_ids(answer)
    assert _deltas(messages, "output_text") == _text(answer) != ""
    (done,) = [each for each in messages if each["type"] == "response.output_item.done"]
    assert done["item"] == last["output"][0] and done["item"]["status"] == answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    begun = messages[0]["response"]
    assert begun["status"] == "in_progress" and begun["output"] == [] and begun["usage"] is None
    for each in (begun, answer):
        assert each["metadata"] == {"a": "b"} and each["instructions"] == "Be short." and each["store"] is False
    assert answer["usage"]["output_tokens"] == 12 == answer["usage"]["total_tokens"] - answer["usage"]["input_tokens"]


def test_a_response_that_ends_by_itself_is_completed(served: Server) -> None:
    answer = whole(served, PATH, ask(**_ENDS))
    assert answer["status"] == "completed" and answer["incomplete_details"] is None
    assert answer["output"][0]["status"] == "completed"
    assert events(served, ask(**_ENDS))[-1]["type"] == "response.completed"


def test_the_text_is_that_of_a_chat(served: Server) -> None:
    """Each kind of item gives the same text as a chat message with the same content."""
    items = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "input_text", "text": "Whe"}, {"type": "input_text", "text": "re?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": None, "call_id": "c", "name": "look", "arguments": '{"at": "home"}'},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "at home"}]},
    ]
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": "home"}'}}
    messages = [
        {"role": "system", "content": "First."},
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "reasoning": "Hm.", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "at home"},
    ]
    short = {"seed": 5, "temperature": 0.9, "ignore_eos": True}
    chat = whole(served, CHAT, talk(messages=messages, **short, max_tokens=12))
    answer = whole(served, PATH, ask(items, instructions="First.", **short, max_output_tokens=12))
    assert _text(answer) == chat["choices"][0]["message"]["content"]
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_a_call_is_an_item_and_its_answer_continues_the_conversation(served: Server) -> None:
    answer, messages = whole(served, PATH, ask(**_CALL)), events(served, ask(**_CALL))
    (call,) = answer["output"]
    assert (call["type"], call["name"], call["status"], answer["status"]) == (
        *("function_call", "look"),
        *("completed", "completed"),
    )
    jsonschema.validate(json.loads(call["arguments"]), _PARAMETERS)
    assert kinds(messages) == [
        *("created", "in_progress", "output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    assert _deltas(messages, "function_call_arguments") == call["arguments"]
    added = messages[2]["item"]
    assert added["call_id"].startswith("call_") and added["name"] == "look" and added["arguments"] == ""
    assert messages[-1]["response"]["output"][0]["call_id"] == added["call_id"]
    turns: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
    for turn in range(3):
        (call,) = whole(served, PATH, ask(turns, **_CALL))["output"]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": f"no, {turn}"}
        turns += [call, output]
    assert _text(whole(served, PATH, ask(turns, **_SHORT)))


_CUSTOM = {"type": "custom", "name": "say", "description": "Says it."}
_LARK = """
start: begin line+ "end" LF?
begin: "*** Begin\\n"
line: ("+" | "-") /[ab"]{2}/ LF -> one

%import common.LF
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("format", "expression"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "grammar", "syntax": "regex", "definition": 'say "[a-c]{3}"\n(é|😀)!'}, 'say "[a-c]{3}"\n(é|😀)!'),
        ({"type": "grammar", "syntax": "lark", "definition": _LARK}, '\\*\\*\\* Begin\n([+-][ab"]{2}\n)+end\n?'),
    ],
)
def test_a_custom_tool_is_called_with_a_text(served: Server, format: Any, expression: str | None) -> None:
    tool = {**_CUSTOM, **({} if format is None else {"format": format})}
    more = {"tools": [tool], "tool_choice": {"type": "custom", "name": "say"}, "max_output_tokens": 400}
    asked = ask(**{**_CALL, **more})
    answer, messages = whole(served, PATH, asked), events(served, asked)
    (call,) = answer["output"]
    assert (call["type"], call["name"]) == ("custom_tool_call", "say") and "arguments" not in call
    assert call["status"] == answer["status"]
    assert _deltas(messages, "custom_tool_call_input") == call["input"]
    if expression is not None:
        assert answer["status"] == "completed" and re.fullmatch(expression, call["input"]), call["input"]
        assert kinds(messages)[2:6] == [
            *("output_item.added", "custom_tool_call_input.delta"),
            *("custom_tool_call_input.done", "output_item.done"),
        ]
    (done,) = [each for each in messages if each["type"] == "response.custom_tool_call_input.done"]
    assert done["input"] == call["input"]
    output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}
    assert _text(whole(served, PATH, ask([{"role": "user", "content": "Hello"}, call, output], **_SHORT)))


def test_a_tool_of_a_namespace_is_called_by_both_names(served: Server) -> None:
    tools = [{"type": "namespace", "name": "eyes", "description": "d", "tools": [_LOOK, {**_CUSTOM, "format": None}]}]
    choice = {"type": "function", "name": "eyes.look"}
    (call,) = whole(served, PATH, ask(**{**_CALL, "tools": tools, "tool_choice": choice}))["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "eyes", "look")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "no"}
    assert _text(whole(served, PATH, ask([call, output], tools=tools, **_SHORT)))


def test_a_request_of_codex_is_taken(served: Server) -> None:
    """The request is as Codex's command line sends it, except for its prompts."""
    asked = ask(
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
        instructions="You are an agent.",
        tools=[{**_LOOK, "strict": False}, _CUSTOM],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"effort": "medium", "summary": "auto"},
        store=False,
        include=["reasoning.encrypted_content"],
        service_tier="priority",
        prompt_cache_key="k",
        text={"verbosity": "medium"},
        client_metadata={"x-codex-installation-id": "a"},
        model="thinks",
        **_SHORT,
    )
    assert events(served, asked)[-1]["type"] == "response.incomplete"


def test_a_call_that_is_cut_off_is_incomplete(served: Server) -> None:
    cut = whole(served, PATH, ask(**{**_CALL, "max_output_tokens": 24}))
    assert cut["status"] == "incomplete" and cut["output"][-1]["status"] == "incomplete"


def test_several_calls_are_items_of_their_own(served: Server) -> None:
    """The bias keeps the answer from ending after its first call."""
    asked = ask(**{**_CALL, "tool_choice": "required", "logit_bias": {"1": -100}, "max_output_tokens": 400})
    messages = events(served, asked)
    output = messages[-1]["response"]["output"]
    calls = [item for item in output if item["type"] == "function_call"]  # what is cut off behind them is text
    assert len(calls) > 1 and calls == output[: len(calls)]
    assert len({item["call_id"] for item in calls}) == len({item["id"] for item in calls}) == len(calls)
    for index, item in enumerate(calls):
        of_item = [each for each in messages if each.get("output_index") == index]
        assert _deltas(of_item, "function_call_arguments") == item["arguments"]


def test_reasoning_is_an_item_before_the_text(served: Server) -> None:
    asked = ask(model="thinks", **_SHORT)
    answer, messages = whole(served, PATH, asked), events(served, asked)
    (item,) = answer["output"]
    assert item["type"] == "reasoning" and item["summary"] == [] and item["status"] == "incomplete"
    assert kinds(messages) == [
        *("created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    assert _deltas(messages, "reasoning_text") == item["content"][0]["text"] != ""
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": 12}
    longer = whole(served, PATH, {**asked, "reasoning": {"effort": "high", "summary": "auto"}})
    assert longer["usage"]["input_tokens"] > answer["usage"]["input_tokens"]
    assert longer["reasoning"] == {"effort": "high", "summary": "auto"}


def test_a_text_is_kept_to_its_format(served: Server) -> None:
    described = {"type": "json_schema", "name": "place", "schema": _PARAMETERS, "strict": True}
    asked = ask(text={"format": described}, max_output_tokens=300, temperature=1.2, seed=5)
    for response in (whole(served, PATH, asked), events(served, asked)[-1]["response"]):
        jsonschema.validate(json.loads(_text(response)), _PARAMETERS)
        assert response["text"] == {"format": described} and response["status"] == "completed"
    loose = whole(served, PATH, ask(text={"format": {"type": "json_object"}}, max_output_tokens=20))
    assert _text(loose).startswith("{")
    assert _text(whole(served, PATH, ask(text={"format": {"type": "text"}}, **_SHORT)))


def test_log_probabilities_are_those_of_a_chat(served: Server) -> None:
    include = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    short = {"temperature": 0, "ignore_eos": True}
    chat = whole(served, CHAT, talk(max_tokens=6, logprobs=True, top_logprobs=2, **short))
    asked = ask(max_output_tokens=6, **include, **short)
    part = whole(served, PATH, asked)["output"][0]["content"][0]
    assert part["logprobs"] == chat["choices"][0]["logprobs"]["content"] and len(part["logprobs"]) == 6
    deltas = [each for each in events(served, asked) if each["type"] == "response.output_text.delta"]
    assert [entry for each in deltas for entry in each["logprobs"]] == part["logprobs"]
    assert whole(served, PATH, ask(**_SHORT))["output"][0]["content"][0]["logprobs"] == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "model"),
        ({"model": "tiny"}, "input"),
        (ask(""), "input"),
        (ask([]), "input"),
        (ask(["Hello"]), "input[0]"),
        (ask([{"type": "item_reference", "id": "x"}]), "input[0].type"),
        (ask([{"role": "user"}]), "input[0].content"),
        (ask([{"role": "user", "content": "a", "colour": "red"}]), "input[0].colour"),
        (ask([{"role": "user", "content": [{"type": "input_image"}]}]), "input[0].content[0].type"),
        (ask([{"role": "user", "content": [{"type": "input_text"}]}]), "input[0].content[0].text"),
        (ask([{"type": "reasoning", "encrypted_content": "x"}]), "input[0].encrypted_content"),
        (ask([{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]), "input[0].arguments"),
        (ask([{"type": "function_call", "call_id": "c", "name": "f", "arguments": "3"}]), "input[0].arguments"),
        (ask([{"type": "function_call_output", "output": "x"}]), "input[0].call_id"),
        (ask("word " * 2000), "input"),
        (ask(store=True), "store"),
        (ask(background=True), "background"),
        (ask(previous_response_id="resp_1"), "previous_response_id"),
        (ask(conversation="conv_1"), "conversation"),
        (ask(prompt={"id": "p"}), "prompt"),
        (ask(truncation="often"), "truncation"),
        (ask(max_tool_calls=3), "max_tool_calls"),
        (ask(max_tokens=3), "max_tokens"),
        (ask(max_output_tokens=0), "max_output_tokens"),
        (ask(n=2), "n"),
        (ask(top_logprobs=3), "top_logprobs"),
        (ask(include=["everything"]), "include[0]"),
        (ask(tools=[{"type": "web_search"}]), "tools[0].type"),
        (ask(tools=[{"type": "function"}]), "tools[0].name"),
        (ask(tools=[_LOOK, _LOOK]), "tools[1].name"),
        (ask(tools=[_LOOK], tool_choice={"type": "allowed_tools"}), "tool_choice"),
        (ask(tools=[_LOOK], tool_choice={"type": "function", "name": "go"}), "tool_choice"),
        (ask(tool_choice="required"), "tool_choice"),
        (ask(text={"format": {"type": "json"}}), "text.format.type"),
        (ask(text={"format": {"type": "json_schema", "name": "x"}}), "text.format.schema"),
        (ask(text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "no"}}}), "text.format.schema"),
        (ask(text={"format": {"type": "text", "name": "x"}}), "text.format.name"),
        (ask(text={"verbosity": "high"}), "text.verbosity"),
        (ask(reasoning={"effort": "low"}), "reasoning.effort"),
        (ask(reasoning={"summary": "detailed"}), "reasoning.summary"),
        (ask(metadata={"a": 1}), "metadata.a"),
        (ask(response_format={"type": "text"}), "response_format"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_asked_for_is_refused_by_name(
    served: Server, body: dict[str, Any], param: str, stream: bool
) -> None:
    response = post(served, PATH, {**body, "stream": stream})
    assert response.status_code == 400
    error = refused(response)
    assert error["param"] == param and error["message"].startswith(param) and error["type"] == "invalid_request_error"


def test_what_asks_for_nothing_is_taken(served: Server) -> None:
    nothing = {
        **dict.fromkeys(("previous_response_id", "conversation", "prompt", "text", "reasoning", "include", "tools")),
        **{"store": False, "background": False, "truncation": "disabled", "service_tier": "auto", "user": "me"},
        **{"metadata": None, "parallel_tool_calls": True, "tool_choice": "auto", "prompt_cache_key": "k"},
    }
    assert _text(whole(served, PATH, ask(**_SHORT, **nothing))) == _text(whole(served, PATH, ask(**_SHORT)))
    option = {"stream_options": {"include_obfuscation": True}}
    assert refused(post(served, PATH, ask(**option)))["param"] == "stream_options"
    assert events(served, ask(**_SHORT, **option))


@pytest.mark.long
def test_a_failure_in_a_stream_is_a_failed_response_and_an_error(slow: Server) -> None:
    """SDKs raise at the error event; the text generated before it is in the failed response."""
    messages = events(slow, ask(max_output_tokens=900, ignore_eos=True, timeout=1_500_000))
    *before, failed, error = messages
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert _text(failed["response"]) == _deltas(before, "output_text") != ""
    assert failed["response"]["output"][0]["status"] == "incomplete"
    assert error["type"] == "error" and error["error"]["type"] == "server_error"
    assert error["message"] == failed["response"]["error"]["message"] and "exceeded its timeout" in error["message"]


def test_responses_and_events_are_as_the_document_describes_them(served: Server) -> None:
    document = plain_http.get(f"{served.url}/v1/openapi.json", timeout=v2.TIMEOUT_S).json()
    assert PATH in document["paths"]

    def fits(name: str, value: Any) -> None:
        jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}", **document}).validate(value)

    for asked in (ask(**_SHORT), ask(**_CALL), ask(model="thinks", **_SHORT)):
        fits("ModelResponseRequest", asked)
        fits("ModelResponse", whole(served, PATH, asked))
        for message in events(served, asked):
            fits("ModelResponseEvent", message)
