"""Prompts are tokenized on the event loop only if all of a request's prompts are short in total."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from mlserver_torch_stream.generation import Generator
from mlserver_torch_stream.protocol.generate import FlatGenerate
from mlserver_torch_stream.protocol.spelling import ReplyContext
from mlserver_torch_stream.server.token_model import TokenReply
from mlserver_torch_stream.types import GenerationRequest, ModelInfo, Prompt, TextPrompt


class Codec:
    """Counts characters, and records the threads in which it is called."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    executor = ThreadPoolExecutor(2)

    def blocks(self, prompt: Prompt) -> bool:
        return False

    def encode(self, prompt: Prompt) -> Sequence[int]:
        self.threads.add(threading.get_ident())
        assert isinstance(prompt, TextPrompt)
        return (len(prompt.text),)

    def check_length(self, text: str, field: str) -> None: ...


class HeldCodec(Codec):
    """Holds each prompt until ``go`` is set, and records the texts that it has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.executor = ThreadPoolExecutor(2)
        self.go = threading.Event()
        self.begun: list[str] = []

    def encode(self, prompt: Prompt) -> Sequence[int]:
        assert isinstance(prompt, TextPrompt)
        self.begun.append(prompt.text[0])
        self.go.wait(30)
        return super().encode(prompt)


class Stream:
    """A token stream without events."""

    def extend(self, ids: Sequence[int]) -> None: ...

    def seal(self, ids: Sequence[int]) -> None: ...

    def observe(self, observer: object) -> None: ...

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> object:
        raise StopAsyncIteration


class Engine:
    """Records what is submitted to it."""

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


def _reply(generator: Generator, letter: str) -> TokenReply:
    request = GenerationRequest(letter, (TextPrompt(letter * 5000), TextPrompt(letter.upper() * 70_000)))
    return TokenReply(request, FlatGenerate(), ReplyContext("m", None, 0), partial(generator.start, request))


def test_the_prompts_of_a_client_that_has_left_are_not_tokenized() -> None:
    """Two prompts are tokenized at a time.

    One client leaves while the first of its two prompts is being tokenized, another one while it waits.
    """

    async def run() -> None:
        codec, engine = HeldCodec(), Engine()
        generator = Generator(engine, codec, ModelInfo(100, 1000, 4))  # type: ignore[arg-type]
        replies = {letter: _reply(generator, letter) for letter in "abcd"}
        tasks = [asyncio.ensure_future(reply.whole()) for reply in replies.values()]
        while len(codec.begun) < 2:
            await asyncio.sleep(0.001)
        replies["a"].close()
        replies["c"].close()
        await asyncio.wait([tasks[0], tasks[2]], timeout=30)
        codec.go.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert sorted(codec.begun[:2]) == ["a", "b"] and sorted(codec.begun[2:]) == ["B", "D", "d"]
        assert tasks[0].cancelled() and tasks[2].cancelled()

    asyncio.run(run())
