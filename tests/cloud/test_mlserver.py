"""The command against a real MLServer with our runtime: streamed and whole, it answers as the engine does here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cloud.command import cloud
from tests.server.harness import Model, serve

_EXTRA = {"dtype": "float32", "threads": 1}


_TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call>{{ tool.function.name }}{% endfor %}{% for message in messages %}"
    "{{ message.content }}{% endfor %}{% if enable_thinking %}<think>{% else %}<think></think>{% endif %}"
)
_SCHEMA = {
    "type": "object",
    "properties": {"at": {"enum": ["home", "work"]}, "far": {"type": "boolean"}},
    "required": ["at", "far"],
    "additionalProperties": False,
}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": _SCHEMA}}
_TALK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 300, "temperature": 1.0, "seed": 2}


def _check_calls_schemas_and_reasoning(bodies: list[Any]) -> None:
    """Checks the answers to ``_rows_of_calls``."""
    calls, schema, thought = (body["choices"][0] for body in bodies)
    (call,) = calls["message"]["tool_calls"]
    assert calls["finish_reason"] == "tool_calls" and call["function"]["name"] == "look" and call["id"]
    for text in (call["function"]["arguments"], schema["message"]["content"]):
        assert json.loads(text).keys() == {"at", "far"}
    said = thought["message"]
    assert said["reasoning"] == said["reasoning_content"] != "" and said["content"] == ""


def _rows_of_calls() -> list[dict[str, Any]]:
    """Returns a row with a forced call, one with an answer constrained to a schema, and one with reasoning."""
    look = {"type": "function", "function": {"name": "look", "parameters": _SCHEMA}}
    called = {"tools": [look], "tool_choice": "required", "parallel_tool_calls": False}
    thinking = {"reasoning_effort": "high", "max_tokens": 8, "ignore_eos": True}
    none = {"reasoning_effort": "none"}
    return [{**_TALK, **none, **called}, {**_TALK, **none, "response_format": _FORMAT}, {**_TALK, **thinking}]


@pytest.mark.long
def test_rows_may_ask_for_calls_schemas_and_reasoning(tiny_model: Path, tmp_path: Path, capfd: Any) -> None:
    pytest.importorskip("torch")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(map(json.dumps, _rows_of_calls())))
    extra = json.dumps({**_EXTRA, "chat_template": _TEMPLATE})
    assert cloud("run", "--input", tmp_path / "in", "--model", tiny_model, "--extra", extra) == 0
    found = [json.loads(line)["response"]["body"] for line in capfd.readouterr().out.splitlines()]
    _check_calls_schemas_and_reasoning(found)


@pytest.mark.slow
def test_a_server_of_either_spelling_is_asked_for_calls_schemas_and_reasoning(
    tiny_model: Path, tmp_path: Path, capfd: Any
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(map(json.dumps, _rows_of_calls())))
    extra = {**_EXTRA, "chat_template": _TEMPLATE}
    with serve(tmp_path / "served", [Model("m", str(tiny_model), extra=extra)]) as server:
        for options in ((), ("--unary",), ("--api", "openai"), ("--api", "openai", "--unary")):
            assert cloud("run", "--input", tmp_path / "in", "--url", server.url, *options) == 0
            found = [json.loads(line)["response"]["body"] for line in capfd.readouterr().out.splitlines()]
            _check_calls_schemas_and_reasoning(found)


@pytest.mark.slow
def test_a_real_server_and_the_engine_here_answer_alike(tiny_model: Path, tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "in").mkdir()
    rows: list[dict[str, Any]] = [{"prompt": f"The quick brown fox {i}", "max_tokens": 9} for i in range(12)]
    rows.append({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9})
    rows.append({"prompt": "x", "max_tokns": 9})
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    run = ("run", "--input", tmp_path / "in")

    def answers(*options: Any) -> list[Any]:
        assert cloud(*run, *options) == 1
        found = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
        assert "did you mean max_tokens?" in found[-1]["response"]["body"]["error"]["message"]
        bodies = [row["response"]["body"] for row in found[:-1]]
        return [(body["object"], body["choices"], body["usage"]) for body in bodies]

    here = answers("--model", tiny_model, "--extra", json.dumps(_EXTRA))
    with serve(tmp_path / "served", [Model("m", str(tiny_model), extra=_EXTRA)]) as server:
        assert answers("--url", server.url) == here
        assert answers("--url", server.url, "--unary") == here
