"""What a constraint costs: tokens a second of streams at once, kept to a form and free, in turns, on one engine.

Run: ``python -m benchmarks.structured [--model URI] [--streams 16] [--tokens 128] [--rounds 5]``. The
expression allows any text, so that it and ``free`` compute as many tokens; a ``schema`` has forced tokens besides.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence

from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.constraints.compiled_constraint import CompiledConstraint
from mlserver_torch_stream.engine.factory import BuiltEngine, build_engine
from mlserver_torch_stream.settings import parse_settings
from mlserver_torch_stream.types import ChatPrompt, Constraint, ConstraintKind, SamplingParameters

_GOAL = 0.10  # of the tokens a second
_ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
_KINDS = {
    "free": None,
    "regex": Constraint(ConstraintKind.REGEX, r"(?s:.*)", "regex"),
    "schema": Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({"type": "array", "items": _ITEM}), "schema"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    built = build_engine(parse_settings(options.model, {"max_num_seqs": options.streams}))
    try:
        compiled = {kind: None if each is None else built.codec.compile(each) for kind, each in _KINDS.items()}
        rates: dict[str, list[float]] = {kind: [] for kind in _KINDS}
        for number in range(options.rounds + 1):  # the first warms up
            for kind, constraint in compiled.items():
                rate = asyncio.run(_rate(built, constraint, options.streams, options.tokens, number))
                if number:
                    rates[kind].append(rate)
    finally:
        if built.give_back():
            built.shutdown()
    free = statistics.median(rates["free"])
    for kind, each in rates.items():
        rate = statistics.median(each)
        verdict = "" if kind == "free" else f", {rate / free - 1:+.1%} (goal: no less than -{_GOAL:.0%})"
        print(f"{kind}: {rate:.0f} tokens/s of {options.streams} streams, {min(each):.0f} to {max(each):.0f}{verdict}")


async def _rate(
    built: BuiltEngine, constraint: CompiledConstraint | None, streams: int, tokens: int, number: int
) -> float:
    """Tokens a second of streams that start together; those of a form that end early count as they are."""
    requests = []
    for index in range(streams):
        first = number * streams + index
        question = f"Write a JSON list of twenty people with name, age and city. Begin with number {first}."
        prompt = built.codec.encode(ChatPrompt(({"role": "user", "content": question},)))
        sampling = SamplingParameters(max_tokens=tokens, temperature=0.8, seed=index, ignore_eos=True)
        requests.append(EngineRequest(prompt, sampling, index, constraint=constraint))
    began, count = time.perf_counter(), 0
    async for event in built.engine.submit(requests):
        if event.error is not None:
            raise event.error
        count += len(event.token_ids)
    return count / (time.perf_counter() - began)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded://smollm2-135m-instruct", help="as the setting uri has it")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="of each stream")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
