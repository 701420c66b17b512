"""Parameters that vLLM's clients send, to a real server that ignores unknown ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import QUIET
from tests.server.harness import Model, Server, serve
from tests.server.openai import CHAT, TEXT, events, post, prompt, refused, stream, talk, whole

_SHORT = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = {"MLSERVER_TORCH_STREAM_UNKNOWN_PARAMETERS": "ignore"}
    models = [Model("tiny", str(tiny_model), extra={"chat_template": _TEMPLATE})]
    with serve(tmp_path_factory.mktemp("vllm"), models, settings=QUIET, environment=environment) as server:
        yield server


@pytest.mark.long
def test_an_unknown_parameter_is_ignored_and_named_in_a_header_and_in_the_log(served: Server) -> None:
    unknown = {"nobody_knows_it": 1, "über\r\nx: y": 2}
    response = post(served, CHAT, talk(**_SHORT, **unknown))
    assert response.status_code == 200 and response.headers["x-ignored-parameters"] == (
        "nobody_knows_it, %C3%BCber%0D%0Ax%3A%20y"
    )
    streamed = post(served, CHAT, talk(**_SHORT, **unknown, stream=True))
    assert streamed.headers["x-ignored-parameters"] == response.headers["x-ignored-parameters"] and events(streamed)
    assert "x-ignored-parameters" not in post(served, CHAT, talk(**_SHORT)).headers
    assert "are ignored: nobody_knows_it, " in served.log
    assert refused(post(served, CHAT, talk(audio={"voice": "x"})))["param"] == "audio"


@pytest.mark.parametrize(("path", "asked"), [(CHAT, talk(**_SHORT, n=2)), (TEXT, prompt(**_SHORT))])
def test_token_ids_are_those_of_the_prompt_and_of_the_answer(served: Server, path: str, asked: dict[str, Any]) -> None:
    asked = {**asked, "return_token_ids": True}
    answer, chunks = whole(served, path, asked), stream(served, path, asked)
    held = [answer] if path == CHAT else answer["choices"]
    (ids,) = (each["prompt_token_ids"] for each in held)
    assert len(ids) == answer["usage"]["prompt_tokens"]
    for choice in answer["choices"]:
        parts = [each for chunk in chunks for each in chunk["choices"] if each["index"] == choice["index"]]
        assert [token for part in parts for token in part.get("token_ids", ())] == choice["token_ids"]
        assert len(choice["token_ids"]) == _SHORT["max_tokens"]
        shown = [each for each in (chunks if path == CHAT else parts) if "prompt_token_ids" in each]
        assert {json.dumps(each["prompt_token_ids"]) for each in shown} == {json.dumps(ids)}
        assert len(shown) == len(answer["choices"])
    assert "token_ids" not in json.dumps(whole(served, path, {**asked, "return_token_ids": False}))


def test_the_text_of_a_conversation_ends_as_its_client_says(served: Server) -> None:
    """The answer is the same as to a prompt with the text that the template should make, written by hand."""
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good"}]
    for more, ending in (
        ({}, ""),
        ({"add_generation_prompt": True}, "<|assistant|>"),
        ({"add_generation_prompt": False}, ""),
    ):
        answer = whole(served, CHAT, talk(messages=turns, **_SHORT, **more))
        text = f"<|user|>Hello<|assistant|>Good{ending}"
        by_hand = whole(served, TEXT, prompt(text, **_SHORT, add_special_tokens=False))
        assert answer["choices"][0]["message"]["content"] == by_hand["choices"][0]["text"], more
        assert answer["usage"]["prompt_tokens"] == by_hand["usage"]["prompt_tokens"]


def test_a_hosted_tool_is_left_out_with_a_warning(served: Server) -> None:
    tools = [{"type": "web_search", "external_web_access": False}]
    body = {"model": "tiny", "input": "Hello", "max_output_tokens": 6, "ignore_eos": True, "tools": tools}
    response = post(served, "/v1/responses", body)
    warning, message = response.json()["output"]
    assert (warning["type"], message["type"]) == ("warning", "message") and "tools[0].type=web_search" in str(warning)
    assert response.headers["x-ignored-parameters"] == "tools%5B0%5D.type%3Dweb_search"
    turns = [{"role": "user", "content": "Hello"}, warning, message, {"role": "user", "content": "And?"}]
    assert post(served, "/v1/responses", {**body, "input": turns, "tools": []}).json()["output"][0]["type"] == "message"
    hosted = [{"type": "web_search_20250305", "name": "web_search"}]
    asked = {"model": "tiny", "messages": turns[:1], "max_tokens": 6, "tools": hosted}
    assert post(served, "/v1/messages", asked).json()["content"]
