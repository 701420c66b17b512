"""Where prompts are tokenized: on the event loop only if all of a request are short together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mlserver_torch_stream.generation import Generator
from mlserver_torch_stream.types import GenerationRequest, ModelInfo, Prompt, TextPrompt


class Codec:
    """Counts characters, and keeps the threads in which it was asked."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    executor = ThreadPoolExecutor(2)

    def blocks(self, prompt: Prompt) -> bool:
        return False

    def encode(self, prompt: Prompt) -> Sequence[int]:
        self.threads.add(threading.get_ident())
        assert isinstance(prompt, TextPrompt)
        return (len(prompt.text),)

    def stable_prefix(self, text: str) -> Sequence[int]:
        return ()


class Stream:
    """A token stream of no events."""

    def extend(self, ids: Sequence[int]) -> None: ...

    def seal(self, ids: Sequence[int]) -> None: ...

    def observe(self, observer: object) -> None: ...


class Engine:
    """Keeps what is submitted to it."""

    def __init__(self) -> None:
        self.submitted: list[Any] = []

    def submit(self, requests: Sequence[Any]) -> Stream:
        self.submitted += requests
        return Stream()


@pytest.mark.parametrize(("count", "on_loop"), [(1, True), (4, True), (4096, False)])
def test_many_short_prompts_leave_the_event_loop_as_one_long_one_does(count: int, on_loop: bool) -> None:
    async def run() -> None:
        codec, engine = Codec(), Engine()
        prompts = tuple(TextPrompt("a" * (1 + number % 7)) for number in range(count))
        generator = Generator(engine, codec, ModelInfo(100, 1000, 4))  # type: ignore[arg-type]
        await generator.start(GenerationRequest("r", prompts), lambda stream: None)
        assert (codec.threads == {threading.get_ident()}) is on_loop
        assert [each.prompt_ids for each in engine.submitted] == [(len(prompt.text),) for prompt in prompts]

    asyncio.run(run())
