"""A batch from its creation to its files: what is answered, which rows are refused, and what its status shows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.batches.api import Api, error, row
from tests.server.harness import Server


def test_every_row_is_answered_once_in_order_and_the_objects_are_openais(api: Api) -> None:
    batch = api.create([row(n) for n in range(40)], metadata={"who": "a test"})
    assert batch["object"] == "batch" and batch["status"] == "validating"
    assert batch["expires_at"] == batch["created_at"] + 24 * 3600
    ended = api.wait(batch["id"])
    assert ended["status"] == "completed" and ended["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
    assert ended["error_file_id"] is None and ended["errors"] is None and ended["metadata"] == {"who": "a test"}
    times = [ended[f"{each}_at"] for each in ("created", "in_progress", "finalizing", "completed")]
    assert times == sorted(times)
    lines = api.lines(ended["output_file_id"])
    assert [line["custom_id"] for line in lines] == [f"row-{n}" for n in range(40)]
    assert {frozenset(line) for line in lines} == {frozenset({"id", "custom_id", "response", "error"})}
    response = lines[7]["response"]
    assert response["status_code"] == 200 and response["body"]["object"] == "chat.completion"
    assert response["body"]["choices"][0]["message"]["role"] == "assistant"
    assert len({line["id"] for line in lines}) == 40
    file = api.client.get(f"/files/{ended['output_file_id']}").json()
    content = api.client.get(f"/files/{ended['output_file_id']}/content")
    assert file["purpose"] == "batch_output" and file["bytes"] == len(content.content)


def test_a_row_that_cannot_be_answered_is_in_the_error_file_and_stops_no_other(api: Api) -> None:
    bad: list[Any] = [
        row(1, model="absent"),
        row(2, model=None),
        "not json",
        row(4, temperature="hot"),
        row(5, unknown=1),
        {**row(6), "url": "/v1/completions", "body": {"model": "tiny", "prompt": "x"}},
        {**row(7), "url": "/v1/embeddings"},
        {**row(8), "method": "GET"},
        {**row(9), "extra": 1},
        row(10, stream=True),
        row(11, priority=1),
        row(12, n=1_000_000_000),
        '"a string"',
        row(14, messages=[]),
        row(15, model_version="1"),
    ]
    ended = api.wait(api.create([row(0), *bad, row(16)])["id"])
    assert ended["status"] == "completed"
    assert ended["request_counts"] == {"total": 17, "completed": 2, "failed": 15}
    assert [line["custom_id"] for line in api.lines(ended["output_file_id"])] == ["row-0", "row-16"]
    failed = api.lines(ended["error_file_id"])
    name = ended["input_file_id"]
    assert [line["custom_id"] for line in failed] == [
        each["custom_id"] if isinstance(each, dict) else f"{name}.jsonl:{n}" for n, each in enumerate(bad, 2)
    ]
    params = [line["response"]["body"]["error"]["param"] if line["response"] else None for line in failed]
    assert params == [
        *("model", "model", None, "temperature", "unknown", "url", "url", "method"),
        *("extra", "stream", "priority", "n", None, "messages", "model_version"),
    ]
    statuses = [line["response"]["status_code"] if line["response"] else line["error"]["code"] for line in failed]
    assert statuses == [404, 400, "invalid_row", *[400] * 9, "invalid_row", 400, 400]


def test_rows_name_their_models_and_prompts_are_answered_too(api: Api) -> None:
    asked = {"prompt": "row", "max_tokens": 4, "temperature": 0}
    rows = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"model": name, **asked}}
        for name in ("other", "tiny")
    ]
    ended = api.wait(api.create(rows, endpoint="/v1/completions")["id"])
    bodies = [line["response"]["body"] for line in api.lines(ended["output_file_id"])]
    assert [body["model"] for body in bodies] == ["other", "tiny"]
    assert {body["object"] for body in bodies} == {"text_completion"}
    assert bodies[0]["choices"][0]["text"] == bodies[1]["choices"][0]["text"]


def test_rows_of_responses_have_calls_schemas_and_ids_of_their_own(api: Api) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["b", "c"]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    asked = {"model": "tiny", "input": "row", "max_output_tokens": 300, "temperature": 1.0, "seed": 2}
    forced = {"tools": [{"type": "function", "name": "f", "parameters": schema}], "tool_choice": "required"}
    bodies = [
        {**asked, **forced, "parallel_tool_calls": False},
        {**asked, "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}},
        {**asked, "input": [{"role": "user", "content": "row"}], "max_output_tokens": 2, "ignore_eos": True},
        {**asked, "store": True},
    ]
    rows = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/responses", "body": body}
        for number, body in enumerate(bodies)
    ]
    ended = api.wait(api.create([*rows, row(5)], endpoint="/v1/responses")["id"])
    answers = [line["response"]["body"] for line in api.lines(ended["output_file_id"])]
    assert {answer["object"] for answer in answers} == {"response"} and all(answer["created_at"] for answer in answers)
    assert len({answer["id"] for answer in answers}) == 3 and all(each["id"].startswith("resp_") for each in answers)
    call, schemed, cut = (answer["output"][0] for answer in answers)
    for text in (call["arguments"], schemed["content"][0]["text"]):
        assert json.loads(text)["a"] in ("b", "c")
    assert cut["status"] == "incomplete"
    failed = [line["response"]["body"]["error"]["param"] for line in api.lines(ended["error_file_id"])]
    assert failed == ["store", "url"]


def test_rows_of_chats_have_calls_and_schemas(api: Api) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["b", "c"]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    forced = {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    more: list[dict[str, Any]] = [{**forced, "tool_choice": "required", "parallel_tool_calls": False}, form]
    ended = api.wait(
        api.create([row(number, max_tokens=300, temperature=1.0, seed=2, **each) for number, each in enumerate(more)])[
            "id"
        ]
    )
    messages = [line["response"]["body"]["choices"][0]["message"] for line in api.lines(ended["output_file_id"])]
    called, schemed = messages
    for text in (called["tool_calls"][0]["function"]["arguments"], schemed["content"]):
        assert json.loads(text)["a"] in ("b", "c")


@pytest.mark.parametrize("logprobs", [{}, {"logprobs": True, "top_logprobs": 2}])
def test_a_row_is_answered_as_the_same_request_alone(api: Api, logprobs: dict[str, Any]) -> None:
    asked = row(1, max_tokens=8, temperature=1.0, seed=3, n=2, **logprobs)
    alone = api.client.post("/chat/completions", json=asked["body"]).json()
    ended = api.wait(api.create([asked])["id"])
    answer = api.lines(ended["output_file_id"])[0]["response"]["body"]
    ours = ("id", "created", "usage")
    assert {**answer, **dict.fromkeys(ours)} == {**alone, **dict.fromkeys(ours)}
    assert answer["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"]
    assert answer["id"].startswith("chatcmpl-") and answer["created"] > 0


@pytest.mark.slow
def test_counts_grow_while_rows_are_answered(api: Api) -> None:
    batch = api.create([row(n, max_tokens=8, ignore_eos=True) for n in range(48)])
    shown = api.wait(batch["id"], "in_progress", "finalizing", "completed", done=1)["request_counts"]
    assert shown["total"] == 48 and 0 < shown["completed"] <= 48
    assert api.wait(batch["id"])["request_counts"]["completed"] == 48


@pytest.mark.long
def test_cancelling_stops_soon_and_keeps_what_was_answered(api: Api) -> None:
    batch = api.create([row(n, max_tokens=500 if n > 20 else 4, ignore_eos=True) for n in range(100)])
    api.wait(batch["id"], "in_progress", done=16)
    answer = api.cancel(batch["id"])
    assert answer.status_code == 200 and answer.json()["status"] == "cancelling"
    assert api.cancel(batch["id"]).status_code in (200, 400)
    ended = api.wait(batch["id"])
    assert ended["status"] == "cancelled" and ended["cancelled_at"] >= ended["cancelling_at"]
    counts = ended["request_counts"]
    assert 16 <= counts["completed"] < 100 and counts["completed"] + counts["failed"] == 100
    kept = [line["custom_id"] for line in api.lines(ended["output_file_id"])]
    dropped = api.lines(ended["error_file_id"])
    assert kept[:16] == [f"row-{n}" for n in range(16)] and len(kept) == counts["completed"]
    assert {line["error"]["code"] for line in dropped} == {"batch_cancelled"}
    assert {*kept, *(line["custom_id"] for line in dropped)} == {f"row-{n}" for n in range(100)}
    assert error(api.cancel(batch["id"]))[:2] == (400, "batch_id")


@pytest.mark.parametrize(
    ("rows", "code", "line"),
    [
        ([row(1), row(2), row(1)], "duplicate_custom_id", 3),
        (["", "  "], "empty_file", None),
    ],
)
def test_a_file_that_can_be_no_batch_fails_as_a_whole(api: Api, rows: Any, code: str, line: int | None) -> None:
    ended = api.wait(api.create(rows)["id"])
    assert ended["status"] == "failed" and ended["output_file_id"] is None
    (problem,) = ended["errors"]["data"]
    assert (problem["code"], problem["line"]) == (code, line)


def test_batches_are_listed_newest_first_in_pages(api: Api) -> None:
    made = [api.create([row(n)])["id"] for n in range(3)]
    page = api.client.get("/batches", params={"limit": 2}).json()
    assert page["object"] == "list" and page["has_more"] is True
    assert [each["id"] for each in page["data"]] == made[:0:-1] and page["last_id"] == made[1]
    following = api.client.get("/batches", params={"limit": 1, "after": made[1]}).json()
    assert following["data"][0]["id"] == made[0]
    for each in made:
        api.wait(each)


def test_the_other_prefix_serves_the_same(api: Api, batch_server: Server) -> None:
    with Api(batch_server.url, "/openai/v1") as other:
        batch = other.create([row(0)])
        assert api.wait(batch["id"])["status"] == "completed"
        assert other.client.get("/files").json()["data"] and other.client.get("/batches").json()["data"]
