"""What is counted of caches: the slabs are the engine's, and the pages keep to their rules."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median

import pytest
import torch

from benchmarks import cache_layout, cache_report
from benchmarks.cache_layout import PREFILL, Case, fit_slabs, hold, in_pages, measure, parse
from benchmarks.cache_pages import PagedEngine
from benchmarks.cache_rules import APART, AS_IT_IS, BEFORE, RULES, Rules, apart, by_parts
from benchmarks.cache_slabs import Moment, SlabEngine, job_of
from benchmarks.cache_traffic import TRAFFIC
from mlserver_torch_stream.engine import scheduler
from mlserver_torch_stream.engine.batched import BatchedBackend
from mlserver_torch_stream.engine.cache.rows import RowCache
from mlserver_torch_stream.engine.forward import JointForward, ModelForward
from mlserver_torch_stream.engine.graphs.forward import GraphForward
from mlserver_torch_stream.engine.loading.selfcheck import check_batching
from mlserver_torch_stream.engine.sampling.row_samplers import SamplerFactory
from mlserver_torch_stream.engine.text.tokenizer import TextCodec
from tests import markdown
from tests.engine.tape import TapeRecorder
from tests.engine.tiny import VOCAB, byte_tokenizer, tiny_model

NAMES = {each.name: each for each in TRAFFIC}
_CONTEXT = 2048


def _shapes(caches: list[RowCache]) -> list[tuple[object, ...]]:
    """Of each batch: the first slab's tensor, which logical column it begins at, and the rows."""
    slabs = [each.slabs[0] for each in caches]
    return [
        (slab.keys.shape[0], slab.keys.shape[2], slab.base, slab.columns.begin, slab.columns.end, tuple(cache.lengths))
        for slab, cache in zip(slabs, caches, strict=True)
    ]


@pytest.mark.parametrize("rules", [AS_IT_IS, APART], ids=lambda rules: rules.name)
def test_the_slabs_that_are_counted_are_those_of_the_engine_at_every_step(rules: Rules) -> None:
    random = Random(1)
    with torch.inference_mode():
        model = tiny_model("llama", max_position_embeddings=_CONTEXT)
        cost = check_batching(model).cost
        assert cost is not None
        columns = 6000
        forward = GraphForward(model, TapeRecorder(), 12) if rules.one_forward else ModelForward(model)
        assert isinstance(forward, JointForward) == rules.one_forward
        backend = BatchedBackend(
            model,
            SamplerFactory(TextCodec(byte_tokenizer()), VOCAB, ()),
            cost=cost,
            cache_bytes=columns * cost.per_column,
            max_rows=12,
            prefill_tokens=300,
            forward=forward,
        )
        engine = SlabEngine(12, 300, columns, rules.limits)
        asked = [(random.choice((3, 60, 150, 600, 1200)), random.randint(1, 40)) for _ in range(40)]
        for order, (prompt, answer) in enumerate(asked):
            backend.add(job_of(prompt, answer, order, _CONTEXT))
            engine.add(job_of(prompt, answer, order, _CONTEXT), answer)
        limits = engine.scheduler.limits
        assert replace(backend._scheduler.limits, cost=limits.cost, cache_bytes=columns) == limits
        seen: set[tuple[object, ...]] = set()
        ended = most = 0
        while backend.step(lambda answers: None, lambda: None):
            ended += engine.step()
            theirs = [cache for group in backend._scheduler.groups if (cache := backend._batches.get(group))]
            ours = [cache for group in engine.scheduler.groups if (cache := engine.batches.get(group))]
            assert _shapes(theirs) == _shapes(ours)
            seen.update(shape[:2] for shape in _shapes(ours))
            most = max(most, len(ours))
    assert ended == len(asked) and len(seen) > 5, "the caches never changed their size"
    assert most >= 2, "there was one batch at a time"


def test_pages_are_never_more_than_there_are_and_all_come_back() -> None:
    random = Random(2)
    engine = PagedEngine(max_rows=8, prefill_tokens=64, columns=640, page=16)
    for order in range(30):
        engine.add(job_of(random.randint(1, 200), 100, order, 512), random.randint(1, 100))
    ended = 0
    for _ in range(5000):
        ended += engine.step()
        now = engine.moment()
        assert in_pages(now, 16) == now.held <= 640
        assert len(now.lengths) <= 8
    assert ended == 30 and engine.moment() == Moment((), held=0, reserved=0, read=0, batches=1)
    assert engine.preempted > 0 and engine.recomputed >= engine.preempted


def test_the_newest_row_gives_way_and_nothing_is_computed_twice_with_memory_for_all() -> None:
    scarce, ample = (PagedEngine(max_rows=2, prefill_tokens=PREFILL, columns=columns, page=16) for columns in (96, 960))
    for engine in (scarce, ample):
        engine.add(job_of(40, 40, 0, 512), 40)
        engine.add(job_of(32, 40, 1, 512), 40)
    for _ in range(200):
        ample.step()
        scarce.step()
    assert (ample.preempted, ample.recomputed) == (0, 0)
    # The first row needs a fourth page for its 49th token; six are there, so the second gives its three away, with all
    # that it holds: it is eight tokens shorter.
    assert (scarce.preempted, scarce.recomputed) == (1, 40)


def test_the_lengths_are_those_of_the_traces() -> None:
    random = Random(3)
    for name, prompt, answer in (("azure-conv", 1020, 129), ("azure-code", 1469, 13)):
        drawn = [(NAMES[name].prompt(random), NAMES[name].answer(random)) for _ in range(4000)]
        assert median(each for each, _ in drawn) == pytest.approx(prompt, rel=0.1)
        assert median(each for _, each in drawn) == pytest.approx(answer, rel=0.1)


def test_other_rules_hold_more_and_last_no_longer_than_their_measurement() -> None:
    ours = (scheduler._SLACK, scheduler._SHRINK, scheduler.row_step)
    case = Case(NAMES["azure-code"], 256, 32)
    before, each, now = (hold(case, 20, rules) for rules in (BEFORE, APART, AS_IT_IS))
    assert before.held > 1.2 * each.held
    assert each.batches <= 4 < now.batches <= 8
    assert (scheduler._SLACK, scheduler._SHRINK, scheduler.row_step) == ours


def test_rows_by_quarters_of_a_power_of_two_are_the_engines() -> None:
    rows = (0, 1, 5, 9, 16, 17, 100, 128)
    assert [by_parts(1)(each) for each in rows] == [0, 1, 8, 16, 16, 32, 128, 128]
    assert [by_parts(4)(each) for each in rows] == [scheduler.row_step(each) for each in rows]
    assert [by_parts(8)(each) for each in rows] == [0, 1, 5, 9, 16, 18, 104, 128]


def test_the_same_seed_counts_the_same() -> None:
    case = Case(NAMES["azure-conv"], 1024, 12)
    assert hold(case, 20) == hold(case, 20)
    assert fit_slabs(case, 40_000, 5) == fit_slabs(case, 40_000, 5)


def test_a_small_run_prints_what_it_keeps(tmp_path: Path) -> None:
    result = measure(["bimodal"], [4, 6], gib=4, answers=9, users=5)
    cache_report.write(result, tmp_path)
    assert json.loads((tmp_path / "cache_layout.json").read_text()) == result
    printed = (tmp_path / "cache_layout.md").read_text()
    assert printed == cache_report.as_markdown(result)
    assert printed.count("\n| bimodal |") == 2 + 1 + 1 + 3 + 2 + len(RULES)
    assert printed.count("\n| `bimodal` |") == 1


def test_a_budget_that_has_no_room_for_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="a row of 100 tokens never fits"):
        SlabEngine(max_rows=4, prefill_tokens=64, columns=120, limits=apart).add(job_of(60, 40, 0, 512), 5)


def test_only_a_whole_run_is_kept_as_the_projects_result() -> None:
    assert parse([]).output == cache_layout.RESULTS
    for arguments in (["--streams", "64"], ["--gib", "4"], ["--answers", "9"], ["--traffic", "uniform"]):
        assert parse(arguments).output is None


def test_the_kept_tables_are_of_the_kept_figures() -> None:
    kept = json.loads((cache_layout.RESULTS / "cache_layout.json").read_text())
    assert (cache_layout.RESULTS / "cache_layout.md").read_text() == cache_report.as_markdown(kept)
    sizes = cache_report.sizing_table(kept)[1:]
    assert markdown.table("docs/scaling.md", "What the cache wastes")[: len(sizes)] == sizes
