"""Many streams at once, with various page settings: each gets the same text as alone, and no memory remains in use."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mlserver_torch_stream.engine.cache.pages import CPU_PAGE_SIZE
from tests.server.conftest import QUIET
from tests.server.harness import Model, Server, serve
from tests.server.openai import TEXT, joined, prompt, stream, whole

_STREAMS = 24
_TOKENS = 48
_SHARED = "All of these prompts begin with the same words, which fill some pages. "
_SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "preempting": {"kv_cache_memory": "256KiB"},
    "uncached": {"prefix_cache_memory": 0},
    "single": {"max_num_seqs": 1},
    "wide": {"max_num_seqs": 200},
    "chunked": {"chunked_prefill_size": CPU_PAGE_SIZE},
}


@pytest.fixture(scope="module")
def paged(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    alone = Model("alone", str(tiny_model), extra={"max_num_seqs": 1, "prefix_cache_memory": 0})
    models = [Model(name, str(tiny_model), extra=extra) for name, extra in _SETTINGS.items()]
    with serve(tmp_path_factory.mktemp("paged") / "models", [alone, *models], settings=QUIET) as running:
        yield running


@pytest.fixture(scope="module")
def bodies() -> list[dict[str, Any]]:
    texts = [_SHARED * (number % 3) + f"{number} things" + " and so on" * (number % 5) for number in range(_STREAMS)]
    return [prompt(text, max_tokens=_TOKENS, temperature=0, ignore_eos=True) for text in texts]


@pytest.fixture(scope="module")
def said(paged: Server, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [whole(paged, TEXT, {**body, "model": "alone"}) for body in bodies]


@pytest.mark.parametrize(
    "name", [each if each == "preempting" else pytest.param(each, marks=pytest.mark.slow) for each in _SETTINGS]
)
def test_each_of_many_streams_says_what_it_says_alone(
    paged: Server, bodies: list[dict[str, Any]], said: list[dict[str, Any]], name: str
) -> None:
    with ThreadPoolExecutor(_STREAMS) as threads:
        ask = {"model": name, "stream_options": {"include_usage": True}}
        streams = list(threads.map(lambda body: stream(paged, TEXT, {**body, **ask}), bodies))
    assert [text for chunks in streams for text in joined(chunks)] == [answer["choices"][0]["text"] for answer in said]
    for chunks, answer in zip(streams, said, strict=True):
        usage = chunks[-1]["usage"]
        cached = usage.pop("prompt_tokens_details")["cached_tokens"]
        assert usage == {key: answer["usage"][key] for key in usage}
        assert 0 <= cached < usage["prompt_tokens"] and (name not in ("uncached",) or cached == 0)
    gauges = ("kv_cache_bytes", "running_sequences", "waiting_requests", "prefilling_requests")
    # One request submits all of these prompts at the same time, however slowly the clients above were started.
    together = whole(paged, TEXT, {**bodies[0], "model": name, "prompt": [body["prompt"] for body in bodies]})
    assert [each["text"] for each in together["choices"]] == [answer["choices"][0]["text"] for answer in said]
    counters = paged.wait_for(name, lambda now: all(now[gauge] == 0 for gauge in gauges))
    assert (counters["num_preemptions"] > 0) == (name == "preempting")
    assert counters["generation_tokens"] == 2 * _STREAMS * _TOKENS
