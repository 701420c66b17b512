"""OpenAI's API on a real server: chat completions, completions and models, streamed and whole."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from mlserver_torch_stream.engine.cache.pages import CPU_PAGE_SIZE
from tests import plain_http
from tests.server import raw
from tests.server.harness import Server
from tests.server.openai import CHAT, DONE, TEXT, joined, post, prompt, refused, stream, talk, texts, whole

_SAMPLED = {"max_tokens": 12, "temperature": 0.9, "seed": 5, "ignore_eos": True}
_BOTH = pytest.mark.parametrize(("path", "body"), [(CHAT, talk()), (TEXT, prompt())], ids=["chat", "completions"])


@_BOTH
@pytest.mark.parametrize("prefix", ["", "/openai"])
def test_a_stream_is_the_whole_answer_in_pieces(server: Server, path: str, body: dict[str, Any], prefix: str) -> None:
    body = {**body, **_SAMPLED, "n": 2}
    answer = whole(server, prefix + path, body)
    chunks = stream(server, prefix + path, body)
    assert joined(chunks) == texts(answer) and len(texts(answer)) == 2
    kinds = {CHAT: ("chat.completion", "chat.completion.chunk"), TEXT: ("text_completion",) * 2}
    assert {answer["object"], *(chunk["object"] for chunk in chunks)} == set(kinds[path])
    assert {chunk["model"] for chunk in chunks} == {"tiny"} and len({chunk["id"] for chunk in chunks}) == 1
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert reasons == ["length"] * 2 == [choice["finish_reason"] for choice in answer["choices"]]
    assert all("usage" not in chunk for chunk in chunks)


def test_each_choice_of_a_chat_begins_with_its_role(server: Server) -> None:
    chunks = stream(server, CHAT, talk(**_SAMPLED, n=2))
    for index in (0, 1):
        first, *others = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert first["delta"] == {"role": "assistant", "content": ""} and first["finish_reason"] is None
        assert all("role" not in each["delta"] for each in others)


@_BOTH
def test_the_usage_is_a_chunk_of_its_own_where_it_is_asked_for(server: Server, path: str, body: dict[str, Any]) -> None:
    *chunks, last = stream(server, path, {**body, **_SAMPLED, "stream_options": {"include_usage": True}})
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    usage = whole(server, path, {**body, **_SAMPLED})["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == last["usage"]["completion_tokens"] == 12


@_BOTH
def test_the_usage_so_far_is_on_every_chunk_where_it_is_asked_for(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = stream(server, path, {**body, **_SAMPLED, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"] == 12
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}


def test_the_usage_counts_what_the_prefix_cache_had_of_the_prompts(server: Server) -> None:
    said = "A prompt that no other test of this server has begun with"
    first, again = (whole(server, CHAT, talk(said, max_tokens=1))["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] < again["prompt_tokens_details"]["cached_tokens"]
    full_pages = (again["prompt_tokens"] - 1) // CPU_PAGE_SIZE  # the last token is always computed: it has the logits
    assert again["prompt_tokens_details"]["cached_tokens"] == full_pages * CPU_PAGE_SIZE
    two = whole(server, CHAT, talk(said, max_tokens=1, n=2))["usage"]
    assert two["prompt_tokens_details"] == again["prompt_tokens_details"]


def test_only_requests_of_the_same_salt_share_the_prefix_cache(server: Server) -> None:
    said = "Another prompt, long enough for pages, that no other test of this server has begun with"

    def cached(**salt: str) -> int:
        usage = whole(server, CHAT, talk(said, max_tokens=1, **salt))["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    first, shared = cached(), cached()
    assert first < shared
    assert [cached(cache_salt="a"), cached(cache_salt="b")] == [0, 0]
    assert [cached(cache_salt="a"), cached(cache_salt="b"), cached()] == [shared] * 3


def test_prompts_may_be_texts_or_ids_one_or_several(server: Server) -> None:
    ids = [40, 41, 42]
    one, other = (whole(server, TEXT, prompt(each, max_tokens=4, ignore_eos=True)) for each in ("Hello", ids))
    both = whole(server, TEXT, prompt(["Hello", "Hello"], max_tokens=4, ignore_eos=True))
    assert texts(both) == texts(one) * 2
    assert both["usage"]["prompt_tokens"] == 2 * one["usage"]["prompt_tokens"]
    assert texts(whole(server, TEXT, prompt([ids, ids], max_tokens=4, ignore_eos=True))) == texts(other) * 2
    assert other["usage"]["prompt_tokens"] == 3
    choices = whole(server, TEXT, prompt(["Hello", "Bye"], max_tokens=2, n=2, temperature=1))["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]


def test_an_echo_begins_with_the_prompt(server: Server) -> None:
    [alone] = texts(whole(server, TEXT, prompt("Köln", max_tokens=3)))
    assert texts(whole(server, TEXT, prompt("Köln", max_tokens=3, echo=True))) == ["Köln" + alone]


def test_a_chats_logprobs_have_the_bytes_of_every_token(server: Server) -> None:
    body = talk(max_tokens=16, ignore_eos=True, logprobs=True, top_logprobs=3)
    choice = whole(server, CHAT, body)["choices"][0]
    entries = choice["logprobs"]["content"]
    assert len(entries) == 16
    spelled = bytes(byte for entry in entries for byte in entry["bytes"])
    assert spelled.decode(errors="replace") == choice["message"]["content"]
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3 and entry["token"] in {top["token"] for top in entry["top_logprobs"]}
        assert bytes(entry["bytes"]).decode(errors="backslashreplace") == entry["token"]
        assert entry["logprob"] <= entry["top_logprobs"][0]["logprob"] <= 0
    pieces = [c["logprobs"] for chunk in stream(server, CHAT, body) for c in chunk["choices"] if c["logprobs"]]
    assert [entry for piece in pieces for entry in piece["content"]] == entries
    bare = whole(server, CHAT, talk(max_tokens=2, logprobs=True))["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in bare] == [[], []]
    assert whole(server, CHAT, talk(max_tokens=2))["choices"][0]["logprobs"] is None


def test_a_completions_logprobs_are_lists_with_offsets(server: Server) -> None:
    body = prompt(max_tokens=8, ignore_eos=True, logprobs=2)
    found = whole(server, TEXT, body)["choices"][0]["logprobs"]
    assert found["text_offset"] == [sum(map(len, found["tokens"][:at])) for at in range(8)]
    for token, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert 2 <= len(top) <= 3 and top[token] == logprob
    pieces = [c["logprobs"] for chunk in stream(server, TEXT, body) for c in chunk["choices"] if c["logprobs"]]
    assert {key: [each for piece in pieces for each in piece[key]] for key in found} == found
    assert whole(server, TEXT, {**body, "logprobs": 0})["choices"][0]["logprobs"]["top_logprobs"] is None


def test_what_a_request_asks_for_happens(server: Server) -> None:
    [text] = texts(whole(server, TEXT, prompt(max_tokens=12, ignore_eos=True)))
    stopped = whole(server, TEXT, prompt(max_tokens=12, ignore_eos=True, stop=text[4]))
    assert texts(stopped) == [text[: text.index(text[4])]] and stopped["choices"][0]["finish_reason"] == "stop"
    assert whole(server, CHAT, talk(max_completion_tokens=3, ignore_eos=True))["usage"]["completion_tokens"] == 3
    biased = whole(server, TEXT, prompt(max_tokens=3, ignore_eos=True, logit_bias={"67": 100}, logprobs=0))
    assert len(set(biased["choices"][0]["logprobs"]["tokens"])) == 1
    ended = whole(server, TEXT, prompt(max_tokens=3, logit_bias={"67": 100}, stop_token_ids=[67]))
    assert ended["usage"]["completion_tokens"] == 1 and ended["choices"][0]["finish_reason"] == "stop"
    at_least = whole(server, TEXT, prompt(max_tokens=9, min_tokens=4, logit_bias={"1": 100}))
    assert at_least["usage"]["completion_tokens"] > 4


def test_models_are_those_that_generate_tokens(server: Server) -> None:
    for prefix in ("/v1", "/openai/v1"):
        listed = plain_http.get(f"{server.url}{prefix}/models").json()
        assert listed["object"] == "list"
        assert [model["id"] for model in listed["data"]] == ["narrow", "other", "tight", "tiny"]
        one = plain_http.get(f"{server.url}{prefix}/models/tiny").json()
        assert one in listed["data"] and one["object"] == "model" and one["max_model_len"] == 1024
        assert one["has_chat_template"] is True
    unknown = plain_http.get(f"{server.url}/v1/models/nobody", headers={"x-request-id": "mine"})
    assert unknown.status_code == 404 and unknown.headers["x-request-id"] == "mine"
    assert refused(unknown)["code"] == "model_not_found"


def test_a_version_is_named_beside_the_model(server: Server) -> None:
    assert texts(whole(server, TEXT, prompt(max_tokens=2, model_version="v1")))
    wrong = post(server, TEXT, prompt(model_version="v9"))
    assert wrong.status_code == 404 and refused(wrong)["param"] == "model"


@_BOTH
def test_every_reply_has_the_clients_request_id_or_one_of_its_own(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    for asked in ({**body, "max_tokens": 1}, {**body, "max_tokens": 1, "stream": True}, {**body, "n": 0}, {}, []):
        mine = post(server, path, asked, **{"x-request-id": "mine-1"})
        assert mine.headers["x-request-id"] == "mine-1"
        own = post(server, path, asked)
        assert len(own.headers["x-request-id"]) == 36
        assert own.headers["x-request-id"] != post(server, path, asked).headers["x-request-id"]
    answer = post(server, path, {**body, "max_tokens": 1}, **{"x-request-id": "mine-1"})
    assert answer.json()["id"] in ("chatcmpl-mine-1", "cmpl-mine-1")
    odd = post(server, path, {**body, "max_tokens": 1}, **{"x-request-id": "x" * 300})
    assert odd.status_code == 200 and len(odd.headers["x-request-id"]) == 36


def test_answers_and_errors_are_as_the_document_describes_them(server: Server) -> None:
    document = plain_http.get(f"{server.url}/v1/openapi.json").json()

    def fits(name: str, value: Any) -> None:
        jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}", **document}).validate(value)

    asked = ((CHAT, talk(max_tokens=2, n=2), "ChatCompletion"), (TEXT, prompt(logprobs=2), "Completion"))
    for path, body, name in asked:
        fits(f"{name}Request", body)
        fits(name, whole(server, path, body))
        for chunk in stream(server, path, {**body, "stream_options": {"include_usage": True}}):
            fits(f"{name}Chunk", chunk)
        fits("Error", post(server, path, {**body, "n": 0}).json())
    fits("ModelList", plain_http.get(f"{server.url}/v1/models").json())


def test_the_endpoints_take_no_other_method(server: Server) -> None:
    assert plain_http.get(f"{server.url}{CHAT}").status_code == 405
    assert plain_http.post(f"{server.url}/v1/models").status_code == 405


def test_a_chunk_of_a_slow_reader_is_no_longer_than_48_kib(server: Server) -> None:
    body = talk(max_tokens=500, ignore_eos=True, logprobs=True, top_logprobs=20, stream=True)
    *chunks, end = raw.read_late(server, CHAT, body, 500)
    assert sum(map(len, chunks)) > 200_000 > 48 * 1024 >= max(len(f"data: {chunk}".encode()) for chunk in chunks)
    assert end == DONE
