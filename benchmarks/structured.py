"""What a constraint costs: tokens a second, and CPU time a token, of streams kept to a form and of free ones.

Run: ``python -m benchmarks.structured [--model URI] [--streams 16] [--tokens 128] [--seconds 5] [--rounds 5]``.

Equal work is compared. Always ``streams`` answers are in flight: the next one begins when one of them has ended. Every
answer has ``tokens`` tokens, as no form has an instance that short. Free answers and those of each form take turns on
one engine, and are sampled alike, at the temperature 0.8. Tokens, and the CPU time of the whole process, are counted
over ``seconds``, from when all answers stream; the CPU time a token hardly depends on what else the machine does.
``text`` is an expression that any text matches, so that its masks allow nearly all tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.build import BuiltEngine, build_engine
from mlserver_torch_stream.engine.constraints.token_matcher import CompiledConstraint
from mlserver_torch_stream.settings import parse_settings
from mlserver_torch_stream.types import ChatPrompt, Constraint, ConstraintKind, FinishReason, SamplingParameters

_GOAL = 0.10  # of the tokens a second
_MANY = 100  # of a list: more than an answer has room for
_FREE = "free"


def _list_of(item: dict[str, Any]) -> str:
    return json.dumps({"type": "array", "items": item, "minItems": _MANY})


_FORMS = {
    "text": Constraint(ConstraintKind.REGEX, r"(?s:.*)", "text"),
    "strings": Constraint(ConstraintKind.JSON_SCHEMA, _list_of({"type": "string", "minLength": 20}), "strings"),
    "records": Constraint(
        ConstraintKind.JSON_SCHEMA,
        _list_of(
            {
                "type": "object",
                "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
                "required": ["name", "age", "city"],
                "additionalProperties": False,
            }
        ),
        "records",
    ),
}


@dataclass(frozen=True, slots=True)
class _Figures:
    """Of one kind of answers over one window."""

    tokens_per_s: float
    cpu_ms_per_token: float
    tokens_per_step: float
    forced: float  # share of the tokens


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    built = build_engine(parse_settings(options.model, {"max_num_seqs": options.streams}))
    try:
        kinds = {_FREE: None, **{name: built.codec.submit(form).result() for name, form in _FORMS.items()}}
        figures: dict[str, list[_Figures]] = {kind: [] for kind in kinds}
        for number in range(options.rounds + 1):  # the first warms up
            for kind, constraint in kinds.items():
                measured = asyncio.run(_Load(built, constraint, options).measured())
                if number:
                    figures[kind].append(measured)
    finally:
        if built.give_back():
            built.shutdown()
    free = figures[_FREE]
    for kind, each in figures.items():
        print(_line(kind, each, free))


def _line(kind: str, figures: Sequence[_Figures], free: Sequence[_Figures]) -> str:
    """The medians of all rounds, and those of their ratios to the free answers of the same round."""
    rates = [each.tokens_per_s for each in figures]
    line = f"{kind}: {statistics.median(rates):.0f} tokens/s ({min(rates):.0f} to {max(rates):.0f}), "
    line += f"{statistics.median(each.cpu_ms_per_token for each in figures):.3f} ms of CPU time a token, "
    line += f"{statistics.median(each.tokens_per_step for each in figures):.1f} tokens a step, "
    line += f"{statistics.median(each.forced for each in figures):.0%} forced"
    if kind == _FREE:
        return line
    pairs = list(zip(figures, free, strict=True))
    rate = statistics.median(each.tokens_per_s / other.tokens_per_s for each, other in pairs) - 1
    cpu = statistics.median(each.cpu_ms_per_token / other.cpu_ms_per_token for each, other in pairs) - 1
    return f"{line}: {rate:+.1%} tokens/s (goal: no less than -{_GOAL:.0%}), {cpu:+.1%} CPU time a token"


class _Load:
    """A fixed number of answers in flight."""

    def __init__(self, built: BuiltEngine, constraint: CompiledConstraint | None, options: argparse.Namespace) -> None:
        self._built = built
        self._constraint = constraint
        self._options = options
        self._numbers = count()
        self._streaming = 0
        self._tokens = 0
        self._all_stream = asyncio.Event()

    async def measured(self) -> _Figures:
        tasks = [asyncio.create_task(self._one_after_another(index)) for index in range(self._options.streams)]
        await asyncio.wait([asyncio.create_task(self._all_stream.wait()), *tasks], return_when=asyncio.FIRST_COMPLETED)
        engine = self._built.engine
        tokens, stats, cpu, began = self._tokens, engine.stats(), time.process_time(), time.perf_counter()
        _, running = await asyncio.wait(tasks, timeout=self._options.seconds, return_when=asyncio.FIRST_EXCEPTION)
        tokens, seconds = self._tokens - tokens, time.perf_counter() - began
        cpu, after = time.process_time() - cpu, engine.stats()
        for task in running:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(outcome, asyncio.CancelledError):
                raise RuntimeError("an answer failed") from outcome
        steps, forced = after.decode_steps - stats.decode_steps, after.forced_tokens - stats.forced_tokens
        return _Figures(tokens / seconds, 1000 * cpu / tokens, tokens / steps, forced / tokens)

    async def _one_after_another(self, index: int) -> None:
        """The first answer is shorter, so that answers begin at unlike times."""
        most = self._options.tokens
        await self._answer(most * (index + 1) // self._options.streams)
        while True:
            await self._answer(most)

    async def _answer(self, tokens: int) -> None:
        number = next(self._numbers)
        question = f"Write a JSON list of a hundred people with name, age and city. Begin with number {number}."
        prompt = self._built.codec.encode(ChatPrompt(({"role": "user", "content": question},)))
        sampling = SamplingParameters(max_tokens=tokens, temperature=0.8, seed=number, ignore_eos=True)
        stream = self._built.engine.submit([EngineRequest(prompt, sampling, constraint=self._constraint)])
        begun = False
        try:
            async for event in stream:
                self._tokens += len(event.token_ids)
                if not begun:
                    begun = True
                    self._streaming += 1
                    if self._streaming == self._options.streams:
                        self._all_stream.set()
                if event.finish_reason not in (None, FinishReason.LENGTH):
                    raise RuntimeError(f"an answer ended with {event.finish_reason}: {event.error}")
        finally:
            stream.close()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded://smollm2-135m-instruct", help="as the setting uri has it")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each window")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
