"""Features of the openai SDK with a server.

Knows nothing of the server beyond what ``features`` says.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import json
import time
import typing
from pathlib import Path
from typing import Any

import openai
from features import GIVEN, QUESTION, TOOLS, check_freed, check_refused, crowd, feature, main
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.resources.completions import Completions
from openai.resources.responses import Responses
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params

_ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "seed": 5, "temperature": 0.8}
_IGNORE_EOS = {"ignore_eos": True}
# Ends with "stop" at the sixth token: the helper raises at the end of an answer that has no other end than its length.
_ENDS: dict[str, Any] = {**_ASKED, "logit_bias": {"1": 100}, "extra_body": {"min_tokens": 5}}


def _client(url: str, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", **{"max_retries": 0, **options})


def _chat(url: str, **more: Any) -> Any:
    return _client(url).chat.completions.create(messages=QUESTION, extra_body=_IGNORE_EOS, **{**_ASKED, **more})


@feature("chat")
def chat(url: str) -> None:
    answer = _chat(url)
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length" and answer.model == "tiny"
    assert answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0
    assert len(_chat(url, n=3).choices) == 3


@feature("chat, streamed")
def chat_streamed(url: str) -> None:
    *chunks, last = _chat(url, stream=True, stream_options={"include_usage": True})
    assert last.choices == [] and last.usage.completion_tokens == 12
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == _chat(url).choices[0].message.content


@feature("chat, streamed")
def stream_helper(url: str) -> None:
    completions = _client(url).chat.completions
    helper = completions.stream(messages=QUESTION, logprobs=True, top_logprobs=2, n=2, **_ENDS)
    with helper as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta", "logprobs.content.done"} <= kinds, kinds
    whole = completions.create(messages=QUESTION, n=2, **_ENDS)
    assert [choice.message.content for choice in answer.choices] == [choice.message.content for choice in whole.choices]
    assert len(answer.choices[0].logprobs.content) == 6


def _complete(url: str, **more: Any) -> Any:
    return _client(url).completions.create(extra_body=_IGNORE_EOS, **{"prompt": "Hello", **_ASKED, **more})


@feature("prompts")
def prompts(url: str) -> None:
    whole = _complete(url, prompt=["Hello", "Bye"], logprobs=2)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert len(whole.choices[0].logprobs.tokens) == len(whole.choices[0].logprobs.text_offset) == 12


@feature("prompts, streamed")
def prompts_streamed(url: str) -> None:
    chunks = _complete(url, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == _complete(url).choices[0].text


@feature("log-probabilities")
def logprobs(url: str) -> None:
    entries = _chat(url, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert all(len(entry.top_logprobs) == 3 and bytes(entry.bytes) for entry in entries)


@feature("asyncio")
def asynchronous(url: str) -> None:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=f"{url}/openai/v1", api_key="none") as client:
            stream = await client.chat.completions.create(
                messages=QUESTION, stream=True, extra_body=_IGNORE_EOS, **_ASKED
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(ask()) == _chat(url).choices[0].message.content


@feature("models")
def models(url: str) -> None:
    client = _client(url)
    assert {"narrow", "tiny"} <= {model.id for model in client.models.list()}
    assert client.models.retrieve("tiny").owned_by


@feature("errors")
def errors(url: str) -> None:
    for more, kind, param, code in (
        ({"model": "nobody"}, openai.NotFoundError, "model", "model_not_found"),
        ({"n": 10**9}, openai.BadRequestError, "n", None),
        ({"messages": [{"role": "user", "content": "a " * 5000}]}, openai.BadRequestError, "messages",
         "context_length_exceeded"),
    ):  # fmt: skip
        for stream in (False, True):
            try:
                _client(url).chat.completions.create(**{"messages": QUESTION, **_ASKED, **more}, stream=stream)
            except kind as error:
                assert (error.param, error.code) == (param, code), error
                assert error.request_id and (param in str(error) or code), error
            else:
                raise AssertionError(f"{more} was accepted")


@feature("errors in a stream")
def errors_in_a_stream(url: str) -> None:
    client, seen = _client(url), 0
    extra = {"timeout": 1_500_000, **_IGNORE_EOS}
    try:
        for chunk in client.chat.completions.create(
            model="tiny", messages=QUESTION, max_tokens=900, stream=True, extra_body=extra
        ):
            seen += bool(chunk.choices[0].delta.content)
    except openai.APIError as error:
        assert seen and error.type == "server_error" and "exceeded its timeout" in error.message, error
    else:
        raise AssertionError("the stream ended well")


@feature("retries")
def retries_after_429(url: str) -> None:
    """Of four long answers, one runs and one waits; refused requests are retried when the server says."""
    options: dict[str, Any] = {"model": "narrow", "messages": QUESTION, "max_tokens": 60, "extra_body": _IGNORE_EOS}
    client = _client(url, max_retries=50)
    answers = crowd(lambda _: client.chat.completions.with_raw_response.create(**options))
    assert all(answer.parse().usage.completion_tokens == 60 for answer in answers)
    assert any(answer.retries_taken for answer in answers)


@feature("retries")
def retries_after_503(_: str) -> None:
    """A model that is loading refuses with 503.

    The SDK retries after the time that the server says, and gets its answer.
    """
    options: dict[str, Any] = {"model": "gated", "messages": QUESTION, "max_tokens": 5, "extra_body": _IGNORE_EOS}
    url, gate = GIVEN["loading"], Path(GIVEN["gate"])
    for stream in (False, True):
        try:
            _client(url).chat.completions.create(**options, stream=stream)
        except openai.InternalServerError as error:
            assert isinstance(error, openai.APIStatusError) and error.status_code == 503 and error.request_id
            assert error.type == "server_error" and "loading" in error.message, error.body
            assert int(error.response.headers["retry-after"]) >= 1
        else:
            raise AssertionError("the model is not loading")
    refused = 0

    def see(response: Any) -> None:
        nonlocal refused
        refused += response.status_code == 503
        if refused == 2:
            gate.touch()

    with openai.DefaultHttpxClient(event_hooks={"response": [see]}) as http:
        completions = _client(url, max_retries=60, http_client=http).chat.completions
        answer = completions.with_raw_response.create(**options)
    assert answer.parse().usage.completion_tokens == 5
    assert answer.retries_taken == refused >= 2


@feature("leaving")
def leaving(url: str) -> None:
    def leave() -> None:
        with _chat(url, stream=True, max_tokens=900) as stream:
            next(iter(stream))

    check_freed(leave)


@feature("batches")
def batches(url: str) -> None:
    """Tests a batch of three rows; tests/batches has larger ones."""
    client = _client(url)
    body = {"model": "tiny", "messages": QUESTION, **_ASKED, **_IGNORE_EOS}
    rows = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions", "body": {**body, "seed": 5 + n}}
        for n in range(3)
    ]
    content = "\n".join(map(json.dumps, rows)).encode()
    file = client.files.create(file=("rows.jsonl", io.BytesIO(content)), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"from": "a test"}
    )
    end = time.monotonic() + 60
    while batch.status in ("validating", "in_progress", "finalizing"):
        assert time.monotonic() < end, batch
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed" and batch.request_counts.completed == 3, batch
    lines = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert [line["custom_id"] for line in lines] == ["0", "1", "2"]
    first = openai.types.chat.ChatCompletion.model_validate(lines[0]["response"]["body"])
    assert first.choices[0].message.content == _chat(url).choices[0].message.content


@feature("tools, schemas, images")
def what_is_not_implemented(url: str) -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]}]
    for more, param in (
        ({"tools": TOOLS}, "tools"),
        ({"messages": image}, "messages[0].content[0].type"),
    ):
        asked = {"messages": QUESTION, **_ASKED, **more}
        error = check_refused(lambda asked=asked: _client(url).chat.completions.create(**asked), openai.BadRequestError)
        assert error.param == param, error


@feature("parameters")
def parameters(url: str) -> None:
    """The server's document has every parameter of the SDK, and all its other parameters are known extensions."""
    document = _client(url).get("/openapi.json", cast_to=dict[str, Any])
    of_chats = {
        *("add_generation_prompt", "chat_template_kwargs", "continue_final_message", "enable_thinking", "thinking"),
    }
    of_completions = {"response_format"}
    of_responses = {*of_chats, "frequency_penalty", "logit_bias", "presence_penalty", "seed", "stop"}
    types = {
        "ChatCompletionRequest": (chat_params.CompletionCreateParams, ChatCompletions, of_chats),
        "CompletionRequest": (text_params.CompletionCreateParams, Completions, of_completions),
        "ModelResponseRequest": (response_create_params.ResponseCreateParams, Responses, of_responses),
    }
    extensions = {
        "add_special_tokens", "bad_words", "cache_salt", "guided_choice", "guided_grammar", "guided_json",
        "guided_regex", "ignore_eos", "include_stop_str_in_output", "min_p", "min_tokens", "model_version", "priority",
        "repetition_penalty", "skip_special_tokens", "stop_token_ids", "structured_outputs", "timeout", "top_k",
        "typical_p",
    }  # fmt: skip
    for schema, (kinds, resource, more) in types.items():
        described = document["components"]["schemas"][schema]["properties"]
        idle = ("Ignored: ", "Not implemented: ")  # as parameters of other servers are
        said = set(described)
        known = {name for kind in typing.get_args(kinds) for name in typing.get_type_hints(kind)}
        own = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
        assert known == set(inspect.signature(resource.create).parameters) - own
        assert known <= said, known - said
        taken = {name for name in said - known if not described[name].get("description", "").startswith(idle)}
        ids = set() if resource is Responses else {"return_token_ids"}
        assert taken == extensions | more | ids, taken ^ (extensions | more | ids)


main("openai", "rest")
