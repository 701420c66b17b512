"""Requests to servers: over both APIs, streamed and whole, and how many a server gets that answers 429."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlserver_torch_stream.cloud.backend import open_backend
from mlserver_torch_stream.cloud.backoff import Concurrency, Gate, Retry
from mlserver_torch_stream.cloud.endpoint import ServerEndpoint, only_model
from mlserver_torch_stream.cloud.pipeline import PipelineLimits, infer_rows
from mlserver_torch_stream.cloud.requests import RowRequest
from mlserver_torch_stream.cloud.rows import (
    AccessDenied,
    CloudError,
    Kind,
    ObjectMissing,
    Outcome,
    Result,
    Row,
    RunIdentity,
    RunRefused,
    StoreUnavailable,
)
from mlserver_torch_stream.cloud.run import CloudRun, stream
from mlserver_torch_stream.handlers.frames import encode_frame
from tests.cloud.models import model_server
from tests.scripted_http import Handler, serving

_QUICK = Retry(tries=6, first=0.01, longest=0.05)


def _row(index: int, prompt: str = "", **body: Any) -> Row:
    return Row(index, "k", index + 1, f"r{index}", body=body or {"prompt": prompt or f"row {index}"})


def _ask(url: str, batch: Sequence[Row], **settings: Any) -> list[Outcome]:
    async def ask() -> list[Outcome]:
        infer = await open_backend(ServerEndpoint(url, "m", **settings))
        try:
            return await infer(batch)
        finally:
            await infer.aclose()

    return asyncio.run(asyncio.wait_for(ask(), 60))


@pytest.mark.parametrize("trouble", ["cut", 502])
def test_a_row_at_which_the_connection_breaks_each_time_fails_alone_while_others_are_answered(
    trouble: int | str,
) -> None:
    async def rows() -> AsyncGenerator[Row, None]:
        yield _row(0, "poison")
        for number in range(1, 60):
            yield _row(number)

    async def run() -> list[Outcome]:
        infer = await open_backend(ServerEndpoint(server.url, "m", concurrency=3, retry=_QUICK))
        limits = PipelineLimits(batch_rows=1, batches=3)
        found = [result.outcome async for result in infer_rows(rows(), infer, limits)]
        await infer.aclose()
        return found

    with model_server(delay=0.01) as server:
        server.trouble = lambda prompt, before: trouble if prompt == "poison" else None
        bad, *good = asyncio.run(run())
    assert bad.failure is not None and bad.failure.status == 502
    assert "at each of 6 tries, while other rows were answered" in bad.failure.message
    assert all(outcome.failure is None for outcome in good)


@pytest.mark.parametrize("trouble", ["cut", 503])
def test_a_server_that_goes_away_or_stays_busy_ends_the_run_and_fails_no_row(trouble: int | str) -> None:
    with model_server() as server, pytest.raises(StoreUnavailable):
        server.trouble = lambda prompt, before: None if prompt in ("row 0", "row 1") else trouble
        _ask(server.url, [_row(number) for number in range(9)], concurrency=2, retry=_QUICK)


def _text(outcome: Outcome) -> str:
    assert outcome.response is not None, outcome.failure
    choice = outcome.response["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize("api", ["v2", "openai"])
@pytest.mark.parametrize("stream", [True, False])
def test_prompts_and_conversations_in_either_spelling(api: str, stream: bool) -> None:
    chat = _row(1, messages=[{"role": "user", "content": "hello"}], max_tokens=9)
    with model_server() as server:
        plain, said = _ask(server.url, [_row(0, "abc"), chat], api=api, stream=stream, rows=RowRequest({"seed": 7}))
    assert _text(plain) == "cba" and _text(said) == "olleh"
    assert plain.response is not None and said.response is not None
    assert plain.response["object"] == "text_completion" and said.response["object"] == "chat.completion"
    assert said.response["choices"][0]["finish_reason"] == "stop"
    assert (said.prompt_tokens, said.completion_tokens) == (3, 2)
    parameters = [body.get("parameters", body) for body in server.bodies]
    assert all(each["seed"] == 7 for each in parameters) and any(each.get("max_tokens") == 9 for each in parameters)


_CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}
_SAID = {"role": "assistant", "content": None, "refusal": "no", "reasoning_content": "I think", "tool_calls": [_CALL]}
_LOGPROBS = {"content": [{"token": "a", "logprob": -1.0, "bytes": None, "top_logprobs": []}]}
_ANSWER = {
    "id": "chatcmpl-theirs",
    "object": "chat.completion",
    "created": 77,
    "model": "m-2026",
    "system_fingerprint": "fp",
    "choices": [{"index": 0, "message": _SAID, "logprobs": _LOGPROBS, "finish_reason": "tool_calls"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
}


def _events() -> list[dict[str, Any]]:
    head = {**{key: value for key, value in _ANSWER.items() if key != "usage"}, "object": "chat.completion.chunk"}
    first = {**_CALL, "index": 0, "function": {"name": "look", "arguments": '{"x"'}}
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "reasoning_content": "I "},
        {"reasoning_content": "think", "refusal": "no"},
        {"tool_calls": [first]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
    ]
    choices: list[dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "logprobs": _LOGPROBS, "finish_reason": "tool_calls"})
    return [*({**head, "choices": [each]} for each in choices), {**head, "choices": [], "usage": _ANSWER["usage"]}]


@pytest.mark.parametrize("stream", [True, False])
def test_the_whole_answer_of_an_openai_server_is_kept(stream: bool) -> None:
    with model_server(script=_events() if stream else [_ANSWER]) as server:
        (found,) = _ask(server.url, [_row(0, messages=[{"role": "user", "content": "x"}])], api="openai", stream=stream)
    assert found.response == _ANSWER and (found.prompt_tokens, found.completion_tokens) == (3, 2)
    record = Result(_row(0), found).record(RunIdentity("run", 5))["response"]
    assert record["body"]["created"] == 5 and record["body"]["id"] != "chatcmpl-theirs"
    assert record["body"]["choices"] == _ANSWER["choices"] and record["body"]["system_fingerprint"] == "fp"


@pytest.mark.parametrize("stream", [True, False])
def test_figures_that_are_no_numbers_are_kept_in_the_answer_and_counted_by_nobody(stream: bool) -> None:
    said = {"delta" if stream else "message": {"content": "a"}, "logprobs": {"content": [{"logprob": -math.inf}]}}
    usage = {"prompt_tokens": "three", "completion_tokens": None}
    answer = {"choices": [{"index": 0, **said, "finish_reason": "stop"}], "usage": usage}
    with model_server(script=[answer]) as server:
        (found,) = _ask(server.url, [_row(0)], api="openai", stream=stream)
    assert (found.prompt_tokens, found.completion_tokens) == (0, 0)
    row = Result(_row(0), found).encode(RunIdentity("run", 5))
    body = json.loads(row, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))["response"]["body"]
    assert body["usage"] == usage and body["choices"][0]["logprobs"]["content"] == [{"logprob": None}]


@pytest.mark.parametrize("api", ["v2", "openai"])
@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_without_a_bottom_fails_its_row_alone(api: str, stream: bool) -> None:
    class Deep(Handler):
        def do_POST(self) -> None:
            nested = "deep" in self.received().decode()
            said = {"delta": {}, "message": {}, "text": "a"}
            body = {"choices": [{"index": 0, **said}], "outputs": [], "parameters": {"triton_final_response": True}}
            text = b"[" * 100_000 if nested else json.dumps(body).encode()
            end = b"data: [DONE]\n\n" if api == "openai" else b""
            self.answer(200, b"data: " + text + b"\n\n" + end if stream else text)

    with serving(Deep) as url:
        deep, plain = _ask(url, [_row(0, "deep"), _row(1, "b")], api=api, stream=stream, retry=_QUICK)
    assert plain.failure is None
    assert deep.failure is not None and "nested too deeply" in deep.failure.message


def test_logprobs_of_a_v2_server_are_in_openais_shape() -> None:
    entries = '[{"token_id": 7, "logprob": -1.5, "top": [[7, -1.5], [8, -2.0]]}]'
    tensors = [("text_output", "a"), ("logprobs", entries), ("finish_reason", "stop")]
    outputs = [{"name": name, "datatype": "BYTES", "shape": [1], "data": [value]} for name, value in tensors]
    with model_server(script=[{"outputs": outputs, "parameters": {"triton_final_response": True}}]) as server:
        chat, text = _ask(server.url, [_row(0, messages=[{"role": "user", "content": "x"}]), _row(1, "b")])
    assert chat.response is not None and text.response is not None
    (token,) = chat.response["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["logprob"], len(token["top_logprobs"])) == ("token_id:7", -1.5, 2)
    assert text.response["choices"][0]["logprobs"]["token_logprobs"] == [-1.5]


def test_the_error_object_of_a_server_is_kept_with_its_status() -> None:
    error = {"message": "too long", "type": "invalid_request_error", "param": "messages", "code": "context_length"}
    with model_server(trouble=lambda prompt, before: error) as server:
        (found,) = _ask(server.url, [_row(0)], api="openai")
    response = Result(_row(0), found).record(RunIdentity("run", 5))["response"]
    assert response["status_code"] == 400 and response["body"] == {"error": error}


def test_what_asks_for_nothing_in_openais_api_is_not_sent_to_v2() -> None:
    with model_server() as server:
        _ask(server.url, [_row(0, prompt="x", user="u", metadata={}, store=False, max_tokens=3)])
    assert server.bodies[0]["parameters"] == {"max_tokens": 3}


def test_images_and_sound_go_to_openai_as_parts_of_a_message_and_nowhere_else() -> None:
    image = Row(0, "a.jpg", None, "a.jpg", Kind.IMAGE, data=b"\xff\xd8")
    sound = Row(1, "b.wav", None, "b.wav", Kind.AUDIO, data=b"RIFF")
    with model_server() as server:
        assert _ask(server.url, [image, sound], api="openai", rows=RowRequest(media=True))[0].failure is None
        refused = _ask(server.url, [image], rows=RowRequest())[0].failure
    parts = [body["messages"][0]["content"][0] for body in server.bodies]
    assert {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,/9g="}} in parts
    assert {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}} in parts
    assert refused is not None and refused.code == "unsuitable"


def test_a_server_that_says_429_gets_as_many_requests_as_it_bears_and_answers_them_all() -> None:
    with model_server(most=3, delay=0.01) as server:
        outcomes = _ask(
            server.url, [_row(i) for i in range(60)], concurrency=40, retry=Retry(tries=30, first=0.01, longest=0.1)
        )
    assert [_text(outcome) for outcome in outcomes] == [f"row {i}"[::-1] for i in range(60)]
    assert server.refused and sorted(server.answered) == sorted(f"row {i}" for i in range(60))


@pytest.mark.parametrize("trouble", [503, 502, 500, "cut"])
def test_what_passes_is_tried_again(trouble: int | str) -> None:
    def once(prompt: str, before: int) -> int | str | None:
        return trouble if before == 0 else None

    with model_server(trouble=once) as server:
        assert _text(_ask(server.url, [_row(0, "abc")], retry=_QUICK)[0]) == "cba"
    assert server.asked == ["abc", "abc"]


def test_a_row_that_the_server_cannot_take_fails_alone_and_is_not_asked_for_again() -> None:
    with model_server(trouble=lambda prompt, before: 422 if prompt == "bad" else None) as server:
        good, bad = _ask(server.url, [_row(0, "abc"), _row(1, "bad")], retry=_QUICK)
    assert _text(good) == "cba" and bad.failure is not None and bad.failure.code == "invalid_request"
    assert "422: trouble 422" in bad.failure.message and server.asked.count("bad") == 1


def test_a_row_on_which_the_server_always_breaks_fails_alone_after_three_tries() -> None:
    with model_server(trouble=lambda prompt, before: 500 if prompt == "bad" else None) as server:
        good, bad = _ask(server.url, [_row(0, "abc"), _row(1, "bad")], retry=_QUICK)
    assert _text(good) == "cba" and bad.failure is not None and bad.failure.code == "server_error"
    assert server.asked.count("bad") == 3


@pytest.mark.parametrize(("status", "error"), [(401, AccessDenied), (404, ObjectMissing), (503, StoreUnavailable)])
def test_what_is_no_rows_fault_ends_the_run(status: int, error: type[CloudError]) -> None:
    with model_server(trouble=lambda prompt, before: status) as server, pytest.raises(error, match=str(status)):
        _ask(server.url, [_row(0)], retry=_QUICK)


def test_a_key_that_the_server_repeats_is_in_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    wrong = {"message": "sk-secret may not ask this", "type": "t", "param": None, "code": "sk-secret"}
    with model_server(trouble=lambda prompt, before: wrong) as server:
        (bad,) = _ask(server.url, [_row(0)], api="openai", key="sk-secret", retry=_QUICK)
    assert "*** may not ask this" in str(bad.failure) and "sk-secret" not in str(bad.failure)


@pytest.mark.parametrize("said", [b"<html>sign in first</html>", encode_frame({"batches": 0})])
def test_an_answer_to_a_batch_that_cannot_be_read_ends_the_run(said: bytes) -> None:
    class Odd(Handler):
        def do_GET(self) -> None:
            self.answer(200, b'{"workers": []}', {"Content-Type": "application/json"})

        def do_POST(self) -> None:
            self.rfile.read(int(self.rfile.readline(), 16))  # the first chunk of the body
            self.answer(200, said)

    with serving(Odd) as url, pytest.raises(StoreUnavailable, match="cannot be read"):
        _ask(url, [_row(0), _row(1)], retry=_QUICK)


def test_no_server_ends_the_run() -> None:
    with model_server() as server:
        pass
    with pytest.raises(StoreUnavailable, match=server.url):
        _ask(server.url, [_row(0)], retry=_QUICK)


@pytest.mark.parametrize("api", ["v2", "openai"])
def test_the_servers_only_model_needs_no_name(api: Any) -> None:
    with model_server() as server:
        assert asyncio.run(only_model(server.url, api, None)) == "m"


def test_a_redirect_does_not_say_which_models_a_server_has() -> None:
    """Another server might be asked, which may have a model of another owner."""
    with model_server() as other:

        class Redirects(Handler):
            def do_POST(self) -> None:
                self.received()
                self.answer(307, headers={"Location": other.url + self.path})

        with serving(Redirects) as url, pytest.raises(RunRefused, match="does not say which models"):
            asyncio.run(only_model(url, "v2", None))


def test_a_stream_of_results_takes_the_url_of_a_server_or_its_endpoint(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"row {number}")

    async def texts(model: ServerEndpoint | str) -> list[str]:
        return [_text(result.outcome) async for result in stream(CloudRun(str(tmp_path)), model)]

    with model_server() as server:
        for model in (server.url, ServerEndpoint(server.url, "m", "openai", stream=False)):
            assert asyncio.run(texts(model)) == [f"row {number}"[::-1] for number in range(3)]


@given(st.lists(st.booleans(), max_size=200))
def test_concurrency_stays_between_one_and_its_most(answers: list[bool]) -> None:
    """Only booleans are drawn: at the first integer, Hypothesis reads the source of each module for up to a second."""
    for most in range(1, 65):
        concurrency = Concurrency(most)
        for good in answers:
            started = concurrency.started()
            if good:
                concurrency.answered()
            else:
                concurrency.refused(started)
            assert 1 <= concurrency.limit <= most


def test_refusals_of_one_round_halve_once_and_a_good_round_adds_one() -> None:
    concurrency = Concurrency(64, start=16)
    started = concurrency.started()
    for _ in range(16):
        concurrency.refused(started)
    assert concurrency.limit == 8
    for _ in range(9):
        concurrency.answered()
    assert concurrency.limit == 9


def test_a_gate_lets_through_what_fits_and_a_task_that_leaves_holds_no_place() -> None:
    async def run() -> int:
        gate = Gate(Concurrency(2, start=2))
        most = 0

        async def work() -> None:
            nonlocal most
            async with gate.through():
                most = max(most, gate.inside)
                await asyncio.sleep(0.001)

        tasks = [asyncio.create_task(work()) for _ in range(20)]
        await asyncio.sleep(0)
        for task in tasks[3:9]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert gate.inside == 0
        return most

    assert asyncio.run(run()) == 2
