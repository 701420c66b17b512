"""Input rows as in OpenAI's batches, output rows in the same format, and no field of either is ignored."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cloud.command import cloud, trouble
from tests.cloud.models import ModelServer

_TALK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
_TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
# Says what it was given, so that what a row asks of its template is in the number of prompt tokens.
_TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{{ flavour }}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)


def _write(folder: Path, rows: list[Any]) -> Path:
    (folder / "in").mkdir()
    (folder / "in" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "in"


def _run(folder: Path, capfd: Any, *options: Any) -> tuple[int, list[dict[str, Any]]]:
    status = cloud("run", "--input", folder, *options)
    return status, [json.loads(line) for line in capfd.readouterr().out.splitlines()]


def _envelope(**changes: Any) -> dict[str, Any]:
    return {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": _TALK, **changes}


_REFUSED = {
    "method": (_envelope(method="GET"), "method", "must be POST, got 'GET'"),
    "a method of a wrong type": (_envelope(method=1), "method", "must be POST, got 1"),
    "a response": ({"input": "x"}, None, "rows for /v1/responses are supported only in a server's batches"),
    "url": (_envelope(url="/v1/embeddings"), "url", "must be one of /v1/chat/completions, /v1/completions"),
    "a url of a wrong type": (_envelope(url=["x"]), "url", "must be one of"),
    "a url of another prompt": (_envelope(url="/v1/completions"), "url", "needs prompt in the body"),
    "an unknown key": (_envelope(priority=1), "priority", "unknown key of a batch line"),
    "stream": ({**_TALK, "stream": True}, "stream", "must be false"),
    "a stream of a wrong type": ({**_TALK, "stream": "no"}, "stream", "must be false"),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_what_a_row_cannot_be_given_is_refused_by_name_before_anybody_is_asked(
    name: str, tmp_path: Path, server: ModelServer, capfd: Any
) -> None:
    row, param, text = _REFUSED[name]
    status, (found,) = _run(_write(tmp_path, [row]), capfd, "--url", server.url)
    error = trouble(found)
    assert status == 1 and not server.asked and error is not None
    assert found["error"] is None and found["response"]["status_code"] == 400
    assert error["param"] == param and error["type"] == "invalid_request_error" and text in error["message"]


def test_a_row_that_names_another_model_is_refused_and_the_names_it_may_use_can_be_given(
    tmp_path: Path, server: ModelServer, capfd: Any
) -> None:
    folder = _write(tmp_path, [{**_TALK, "model": name} for name in ("m", "gpt", "other", 3)])
    status, found = _run(folder, capfd, "--url", server.url, "--served-model-name", "gpt")
    assert status == 1 and [row["response"]["status_code"] for row in found] == [200, 200, 404, 400]
    error = trouble(found[2])
    assert error is not None and (error["code"], error["param"]) == ("model_not_found", "model")
    assert found[0]["response"]["body"]["model"] == "gpt"
    assert {body["inputs"][0]["name"] for body in server.bodies} == {"messages"} and len(server.bodies) == 2


def test_output_rows_have_the_shape_of_openais_batches(tmp_path: Path, server: ModelServer, capfd: Any) -> None:
    server.trouble = lambda prompt, before: 422 if prompt == "bad" else None
    folder = _write(tmp_path, [_envelope(), {"prompt": "bad"}, {"prompt": "abc"}])
    with (folder / "a.jsonl").open("a") as file:
        file.write("{broken\n")
    _, found = _run(folder, capfd, "--url", server.url)
    chat, bad, text, broken = found
    assert all(re.fullmatch("batch_req_[0-9a-f]{32}", row["id"]) for row in found)
    assert len({row["id"] for row in found}) == 4
    assert chat["custom_id"] == "c" and chat["error"] is None and chat["response"]["status_code"] == 200
    assert chat["response"]["request_id"].startswith("req_")
    body = chat["response"]["body"]
    assert body["id"].startswith("chatcmpl-") and body["object"] == "chat.completion" and body["created"] == 1700000000
    assert body["choices"][0]["logprobs"] is None and text["response"]["body"]["id"].startswith("cmpl-")
    assert bad["response"]["status_code"] == 422 and bad["error"] is None
    assert set(bad["response"]["body"]["error"]) == {"message", "type", "param", "code"}
    assert broken["response"] is None and broken["error"]["code"] == "invalid_row"


def test_the_ids_and_the_time_of_a_run_are_the_same_when_it_is_resumed(
    tmp_path: Path, server: ModelServer, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    folder = _write(tmp_path, [{"prompt": f"row {i}"} for i in range(6)])
    run = ("--output", tmp_path / "out", "--url", server.url, "--part-rows", "2")
    _run(folder, capfd, *run)
    parts = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("part-*")}
    for name in ("part-000001.jsonl", "part-000002.jsonl"):
        (tmp_path / "out" / name).unlink()
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_bytes())
    manifest["created"] -= 100  # as if it had begun earlier
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(manifest))
    _run(folder, capfd, *run)
    again = (tmp_path / "out" / "part-000001.jsonl").read_bytes()
    row, earlier = json.loads(again.splitlines()[0]), json.loads(parts["part-000001.jsonl"].splitlines()[0])
    assert row["response"]["body"].pop("created") == manifest["created"]
    earlier["response"]["body"].pop("created")
    assert row == earlier


def _engine(model: Path) -> tuple[Any, ...]:
    return ("--model", model, "--extra", json.dumps({"dtype": "float32", "threads": 1}))


def _templated(tiny_model: Path, folder: Path) -> Path:
    """Returns the model with a template that shows the variables it gets."""
    model = folder / "model"
    model.mkdir()
    for path in tiny_model.iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": _TEMPLATE}))
    (model / "chat_template.jinja").write_text(_TEMPLATE)
    return model


@pytest.mark.long
def test_the_engine_here_honours_what_a_row_says_of_its_template(tiny_model: Path, tmp_path: Path, capfd: Any) -> None:
    pytest.importorskip("torch")
    rows = [
        _TALK,
        {**_TALK, "chat_template_kwargs": {"flavour": "quick brown fox jumps"}},
        {**_TALK, "tools": [_TOOL], "tool_choice": "required", "max_tokens": 64},
        {**_TALK, "tools": [_TOOL], "tool_choice": "none"},
        {**_TALK, "priority": 1, "user": "x", "metadata": {}},
    ]
    status, found = _run(_write(tmp_path, rows), capfd, *_engine(_templated(tiny_model, tmp_path)))
    assert status == 0, [trouble(row) for row in found]
    plain, flavoured, tools, none, ranked = (row["response"]["body"]["usage"]["prompt_tokens"] for row in found)
    assert flavoured > plain and tools > plain and none == plain == ranked


_ENGINE_REFUSES = {
    "stream_mode": {**_TALK, "stream_mode": "prompt"},
    "priority": {**_TALK, "priority": "high"},
    "chat_template_kwargs": {**_TALK, "chat_template_kwargs": {"tokenize": False}},
    "tool_choice": {"prompt": "x", "tool_choice": "none"},
    "tools[0]": {**_TALK, "tools": [3]},
    "use_beam_search": {**_TALK, "use_beam_search": True},
    "model": {**_TALK, "model": "gpt"},
    "echo": {**_TALK, "echo": True},
    "response_format.type": {**_TALK, "response_format": {"type": "json"}},
}


@pytest.mark.long
def test_the_engine_here_refuses_by_name_what_it_cannot_honour(tiny_model: Path, tmp_path: Path, capfd: Any) -> None:
    pytest.importorskip("torch")
    status, found = _run(_write(tmp_path, list(_ENGINE_REFUSES.values())), capfd, *_engine(tiny_model))
    assert status == 1
    errors = [trouble(row) for row in found]
    assert [error and error["param"] for error in errors] == list(_ENGINE_REFUSES)
    assert [row["response"]["status_code"] for row in found] == [
        404 if name == "model" else 400 for name in _ENGINE_REFUSES
    ]


@pytest.mark.long
def test_the_engine_here_gives_logprobs_and_echoes_in_openais_shape(
    tiny_model: Path, tmp_path: Path, capfd: Any
) -> None:
    pytest.importorskip("torch")
    rows = [
        {**_TALK, "logprobs": True, "top_logprobs": 2},
        {"prompt": "The quick", "max_tokens": 3, "logprobs": 2, "echo": True},
    ]
    status, found = _run(_write(tmp_path, rows), capfd, *_engine(tiny_model))
    assert status == 0, found
    chat, text = (row["response"]["body"]["choices"][0] for row in found)
    assert len(chat["logprobs"]["content"]) == 3 and len(chat["logprobs"]["content"][0]["top_logprobs"]) == 2
    shown = [text["logprobs"][name] for name in ("tokens", "token_logprobs", "top_logprobs")]
    assert len(shown[0]) > 3 and {len(each) for each in shown} == {len(shown[0])} and shown[1][0] is None
    assert text["text"].startswith("The quick")
