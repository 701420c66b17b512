"""The errors of clients whose constraints are not compiled in time: too complex, or others are being compiled."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mlserver_torch_stream import generation
from mlserver_torch_stream.engine.constraints import compile_threads
from mlserver_torch_stream.engine.constraints.compile_threads import Compilation, CompileThreads
from mlserver_torch_stream.errors import InvalidInput, QueueFull
from mlserver_torch_stream.generation import Generator
from mlserver_torch_stream.types import Constraint, ConstraintKind, GenerationRequest, ModelInfo, Prompt, TextPrompt
from tests.test_generation_threads import Engine


class Codec:
    """Compiles two at a time, each for ``held_s`` seconds or until ``held`` is set, and records those it has begun."""

    def __init__(self, held_s: float = 30) -> None:
        self._held_s = held_s
        self.held = threading.Event()
        self.begun: list[str] = []
        self._num_submitted = 0
        self._threads: CompileThreads[Any] = CompileThreads(2)

    executor = ThreadPoolExecutor(2)

    def blocks(self, prompt: Prompt) -> bool:
        return False

    def encode(self, prompt: Prompt) -> Sequence[int]:
        return (1,)

    def submit(self, constraint: Constraint, behind: Any = None) -> Compilation[Any]:
        def work() -> None:
            self.begun.append(constraint.source)
            self.held.wait(self._held_s)

        compilation = self._threads.submit(work)
        self._num_submitted += 1
        end = time.monotonic() + 30
        # The first two begin in two threads. The second is submitted when the first has begun, so that their order is
        # known.
        while self._num_submitted <= 2 and constraint.source not in self.begun:
            assert time.monotonic() < end
            time.sleep(0.001)
        return compilation


@pytest.fixture(autouse=True)
def _no_spare_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_threads, "_SPARE_AFTER_S", 10.0)


def _start(generator: Generator, name: str) -> Any:
    constraint = Constraint(ConstraintKind.REGEX, name, "structured_outputs.regex")
    return generator.start(GenerationRequest(name, (TextPrompt("a"),), constraint=constraint), lambda stream: None)


def test_a_constraint_that_waits_too_long_for_others_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are being compiled and are too complex; the client of the third one may try again."""
    monkeypatch.setattr(generation, "_LONGEST_COMPILATION_S", 0.3)
    codec, engine = Codec(), Engine()
    generator = Generator(engine, codec, ModelInfo(100, 1000, 4))  # type: ignore[arg-type]

    async def run() -> None:
        *slow, late = await asyncio.gather(
            *(_start(generator, name) for name in ("first", "second", "third")), return_exceptions=True
        )
        for error in slow:
            assert isinstance(error, InvalidInput) and error.field == "structured_outputs.regex"
            assert "compiling it takes more than" in error.message
        assert isinstance(late, QueueFull) and late.status == 429
        assert "structured_outputs.regex: other constraints are being compiled" in str(late)
        codec.held.set()
        monkeypatch.setattr(generation, "_LONGEST_COMPILATION_S", 30.0)
        await _start(generator, "fourth")

    asyncio.run(run())
    assert codec.begun == ["first", "second", "fourth"] and len(engine.submitted) == 1


def test_the_wait_for_others_does_not_make_a_constraint_too_complex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four that take 1.1 s each, two at a time, the last ones are ready 2.2 s after their requests."""
    monkeypatch.setattr(generation, "_LONGEST_COMPILATION_S", 2.0)
    codec, engine = Codec(held_s=1.1), Engine()
    generator = Generator(engine, codec, ModelInfo(100, 1000, 4))  # type: ignore[arg-type]

    async def run() -> None:
        await asyncio.gather(*(_start(generator, name) for name in ("first", "second", "third", "fourth")))

    asyncio.run(run())
    assert len(codec.begun) == len(engine.submitted) == 4


def test_each_of_many_gets_its_own_error_and_those_that_leave_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64, two take too long to compile, 20 clients leave, and all others may try again."""
    monkeypatch.setattr(generation, "_LONGEST_COMPILATION_S", 2.0)
    codec, engine = Codec(), Engine()
    generator = Generator(engine, codec, ModelInfo(100, 1000, 4))  # type: ignore[arg-type]

    async def run() -> None:
        names = [f"{number}" for number in range(64)]
        tasks = [asyncio.create_task(_start(generator, name)) for name in names]
        while len(codec.begun) < 2:
            await asyncio.sleep(0.01)
        for task in tasks[10:30]:
            task.cancel()
        slow, waiting, left = tasks[:2], [*tasks[2:10], *tasks[30:]], tasks[10:30]
        await asyncio.wait(tasks, timeout=30)
        assert all(task.cancelled() for task in left)
        assert all(isinstance(task.exception(), InvalidInput) for task in slow)
        assert all(isinstance(task.exception(), QueueFull) for task in waiting)
        codec.held.set()
        monkeypatch.setattr(generation, "_LONGEST_COMPILATION_S", 30.0)
        await _start(generator, "later")

    asyncio.run(run())
    assert codec.begun == ["0", "1", "later"] and len(engine.submitted) == 1
