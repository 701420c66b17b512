"""The check at load detects models that cannot be batched, and does not refuse models that can."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.build import build_engine
from mlserver_torch_stream.engine.cache.paged_cache import PagedCache
from mlserver_torch_stream.engine.cache.pages import CPU_PAGE_SIZE, Batch
from mlserver_torch_stream.engine.checks.logits import ExpectedLogits
from mlserver_torch_stream.engine.checks.selfcheck import SelfCheckResult, check_batching, check_generate
from mlserver_torch_stream.engine.forward.interface import Logits
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.forward.model_step import Way
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import parse_settings
from tests.engine.tiny import check_forward, greedy, prompt_of, reference, run, running, tokens_of
from tests.engine.tiny import tiny_model as tiny

Kwargs = dict[str, Any]


def findings_with(change: Callable[[Kwargs], None]) -> SelfCheckResult:
    """Returns the result of the check for a model that changes the arguments of its forward."""
    model = tiny("llama")

    def hook(module: torch.nn.Module, args: Any, kwargs: Kwargs) -> tuple[Any, Kwargs]:
        change(kwargs)
        return args, kwargs

    model.register_forward_pre_hook(hook, with_kwargs=True)
    with torch.inference_mode():
        return check_batching(model)


def test_a_sound_model_passes() -> None:
    findings = findings_with(lambda kwargs: None)
    assert (findings.problem, findings.way, findings.chunked) == (None, Way.PACKED, True)
    assert findings.spec is not None and findings.spec.token_bytes == 3 * 2 * 2 * 8 * 4
    assert findings.spec.page_size == findings.page_size == CPU_PAGE_SIZE


def without_start(kwargs: Kwargs) -> None:
    """Counts positions from 0, as a model does that ignores the cached tokens."""
    given = kwargs.get("position_ids")
    if given is not None:
        kwargs["position_ids"] = torch.arange(given.numel()).reshape(given.shape)


def test_a_model_that_ignores_its_positions_is_found_out() -> None:
    findings = findings_with(without_start)
    assert findings.problem is not None and "differ" in findings.problem
    assert findings.spec is None


def test_a_model_may_ask_the_cache_for_the_positions_of_packed_tokens() -> None:
    """The model adds the cache's length to an ``arange``, which gives each packed token its own position."""
    findings = findings_with(lambda kwargs: kwargs.pop("position_ids", None))
    assert (findings.problem, findings.way) == (None, Way.PACKED)


def test_a_model_that_ignores_its_mask_is_found_out() -> None:
    """Only models whose own attention code applies masks get any, such as bloom."""
    model = tiny("bloom")

    def hook(module: torch.nn.Module, args: Any, kwargs: Kwargs) -> tuple[Any, Kwargs]:
        return args, {**kwargs, "attention_mask": None}

    model.register_forward_pre_hook(hook, with_kwargs=True)
    with torch.inference_mode():
        findings = check_batching(model)
    assert findings.problem is not None and "differ" in findings.problem


WAYS = {
    "llama": Way.PACKED,
    "gemma2": Way.PACKED,
    "gemma3_text": Way.PACKED,
    "gpt_oss": Way.PACKED,
    "mixtral": Way.PACKED,
    "qwen3_next": Way.ROWS,
    "mamba2": Way.ROWS,
    "bloom": Way.MASKED_ROWS,
    "falcon": Way.MASKED_ROWS,
}


@pytest.mark.long
@pytest.mark.parametrize("family", WAYS)
def test_the_first_way_that_gives_the_logits_is_taken_in_half_precision(family: str) -> None:
    """tests/engine/test_pages_families.py does the same in float32."""
    with torch.inference_mode():
        findings = check_batching(tiny(family).bfloat16())
    assert (findings.problem, findings.way, findings.chunked) == (None, WAYS[family], True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_that_a_model_hides_in_its_modules_is_found_out(dtype: torch.dtype) -> None:
    with torch.inference_mode():
        findings = check_batching(tiny("recurrent_gemma").to(dtype))
    assert findings.problem is not None and "differ" in findings.problem


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_that_depend_on_the_longest_sequence_of_a_batch_are_found_out(dtype: torch.dtype) -> None:
    """Rows are padded to one length, by which Inkling scales all queries beyond the lengths of the check."""
    changes = {"log_scaling_n_floor": 200, "max_position_embeddings": 4096}
    with torch.inference_mode():
        findings = check_batching(tiny("inkling_text", **changes).to(dtype))
        assert findings.problem is not None
        assert findings.problem.endswith("standard deviations with the length of another sequence")
        assert (
            check_batching(tiny("inkling_text", **{**changes, "log_scaling_n_floor": 4096}).to(dtype)).problem is None
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_whose_chunks_begin_anew_gets_its_prompts_whole(dtype: torch.dtype) -> None:
    with torch.inference_mode():
        findings = check_batching(tiny("jamba").to(dtype))
    assert (findings.problem, findings.way, findings.chunked) == (None, Way.ROWS, False)


class Disturbed(ModelForward):
    """A forward that changes some batches."""

    def __init__(self, model: PreTrainedModel, change: Callable[[Batch, PagedCache], Batch]) -> None:
        super().__init__(model)
        self._change = change

    def __call__(self, batch: Batch, cache: PagedCache) -> Logits:
        return super().__call__(self._change(batch, cache), cache)


def without_copies(batch: Batch, cache: PagedCache) -> Batch:
    return replace(batch, copies=())


def shared_pages_of_the_last(batch: Batch, cache: PagedCache) -> Batch:
    """In batches of three or more, all sequences write to the last page of the last sequence."""
    last = batch.sequences[-1]
    if len(batch.sequences) < 3:
        return batch
    tables = tuple((*table[:-1], last.tables[group][-1]) for group, table in enumerate(batch.sequences[0].tables))
    return replace(batch, sequences=(replace(batch.sequences[0], tables=tables), *batch.sequences[1:]))


def wrong_page_beyond_the_first(batch: Batch, cache: PagedCache) -> Batch:
    """Replaces the block tables by consecutive pages."""
    return replace(
        batch,
        sequences=tuple(
            replace(each, tables=tuple(tuple(range(table[0], table[0] + len(table))) for table in each.tables))
            if each.count > 1 and each.start > 0 and each.tables[0][0] >= 0
            else each
            for each in batch.sequences
        ),
    )


def draft_at_the_wrong_place(batch: Batch, cache: PagedCache) -> Batch:
    return replace(
        batch,
        sequences=tuple(
            replace(each, token_ids=[each.token_ids[0]] * each.count) if each.wanted > 1 else each
            for each in batch.sequences
        ),
    )


@pytest.mark.parametrize(
    "change", [without_copies, shared_pages_of_the_last, wrong_page_beyond_the_first, draft_at_the_wrong_place]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_forward_that_mistakes_pages_is_found_out(
    change: Callable[[Batch, PagedCache], Batch], dtype: torch.dtype
) -> None:
    model = tiny().to(dtype)
    with torch.inference_mode():
        expected = ExpectedLogits(model)
        assert check_forward(model, ModelForward(model), expected=expected) is None
        problem = check_forward(model, Disturbed(model, change), expected=expected)
    assert problem is not None and "differ" in problem


def test_what_the_check_runs_is_mixed_as_a_scheduler_mixes_it() -> None:
    """One forward computes decode rows beside chunks of more than 64 tokens, with pages behind the window."""
    model, batches = tiny("mistral"), []

    def seen(batch: Batch, cache: PagedCache) -> Batch:
        batches.append(batch)
        return batch

    with torch.inference_mode():
        assert check_forward(model, Disturbed(model, seen)) is None
    counts = [sorted(each.count for each in batch.sequences) for batch in batches]
    assert any(1 in each and max(each) > 64 for each in counts)
    assert any(len(each) == 4 for each in counts)
    tables = [each.tables[0] for batch in batches for each in batch.sequences]
    assert any(-1 in table for table in tables)
    assert any(table[i + 1] != table[i] + 1 for table in tables for i in range(len(table) - 1) if table[i] >= 0)
    assert any(batch.copies for batch in batches)


def test_a_model_that_forgets_its_cache_is_found_out() -> None:
    findings = findings_with(lambda kwargs: kwargs.update(past_key_values=None, use_cache=False))
    assert findings.problem is not None


@pytest.mark.parametrize("position", [5, 8, 11])
def test_one_wrong_position_of_many_is_found_out(position: int) -> None:
    """A single wrong position, as an off-by-one error at the edge of a window would cause it."""

    def change(kwargs: Kwargs) -> None:
        positions = kwargs.get("position_ids")
        if positions is not None:
            kwargs["position_ids"] = positions + (positions == position)

    assert findings_with(change).problem is not None


def test_nan_only_in_a_batch_is_found_out() -> None:
    model = tiny("llama")

    def hook(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * torch.nan if output.shape[:2] in {(1, 3), (3, 1)} else output

    model.model.norm.register_forward_hook(hook)
    with torch.inference_mode():
        assert check_batching(model).problem is not None


def test_a_model_that_raises_in_a_batch_is_found_out() -> None:
    model = tiny("llama")

    def hook(module: torch.nn.Module, args: Any, kwargs: Kwargs) -> None:
        if kwargs.get("past_key_values") is not None and kwargs["input_ids"].numel() > 1:
            raise ValueError("one token at a time, please")

    model.model.register_forward_pre_hook(hook, with_kwargs=True)
    with torch.inference_mode():
        findings = check_batching(model)
    assert findings.problem == "ValueError: one token at a time, please"


def uncuttable() -> PreTrainedModel:
    """A model with a wrong state after the second piece of a prompt, as in some recurrent families."""
    model = tiny("llama")

    def hook(module: torch.nn.Module, args: Any, kwargs: Kwargs) -> tuple[Any, Kwargs]:
        positions = kwargs.get("position_ids")
        if positions is not None:
            begins = torch.cat([positions.new_ones((len(positions), 1)), positions.diff() != 1], 1).bool()
            ends = torch.cat([begins[:, 1:], begins[:, :1]], 1)
            kwargs["position_ids"] = positions + (begins & ~ends & (positions > 0))
        return args, kwargs

    model.register_forward_pre_hook(hook, with_kwargs=True)
    return model


def test_a_model_that_cannot_go_on_with_a_prompt_is_batched_with_whole_prompts() -> None:
    model = uncuttable()
    with torch.inference_mode():
        findings = check_batching(model)
    assert findings.problem is None and not findings.chunked and findings.spec is not None
    expected = reference(model, prompt_of(30), 10)
    with running(model, prefill_tokens=4) as engine:
        assert run(tokens_of(engine, prompt_of(30), greedy(10))) == expected


def test_half_precision_passes_and_is_still_watched() -> None:
    """Rounding to bfloat16 causes small errors; a wrong position causes a much larger one."""
    model = tiny("llama").bfloat16()
    with torch.inference_mode():
        assert check_batching(model).problem is None

        def hook(module: torch.nn.Module, args: Any, kwargs: Kwargs) -> tuple[Any, Kwargs]:
            without_start(kwargs)
            return args, kwargs

        model.register_forward_pre_hook(hook, with_kwargs=True)
        assert check_batching(model).problem is not None


def test_the_check_leaves_the_model_as_it_was() -> None:
    model = tiny("gemma2")
    before = reference(model, prompt_of(9), 10)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.inference_mode():
        check_batching(model)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert reference(model, prompt_of(9), 10) == before


_FAILING = """
from transformers import LlamaForCausalLM

class Failing(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        raise KeyError("lm_head.weight")
"""


@pytest.mark.parametrize("engine", ["auto", "serial"])
def test_a_model_that_fails_whatever_it_is_given_is_never_ready(tiny_model: Path, tmp_path: Path, engine: str) -> None:
    """Serving it one request at a time would fail each request."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "failing.py").write_text(_FAILING)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModelForCausalLM": "failing.Failing"}}))
    resolved = parse_settings(str(folder), {"trust_remote_code": True, "engine": engine, "threads": 1}, environ={})
    with pytest.raises(LoadFailed, match=r"the model cannot generate: KeyError: 'lm_head\.weight'"):
        build_engine(resolved, resources=ProcessResources())


@pytest.mark.parametrize("engine", ["auto", "serial"])
def test_a_config_that_makes_the_logits_nan_fails_the_load(engine: str, tiny_model: Path, tmp_path: Path) -> None:
    """NaN differs from itself, so batching fails the check, and the model would be served one request at a time."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": float("nan")}))
    resolved = parse_settings(str(folder), {"engine": engine, "threads": 1}, environ={})
    with pytest.raises(LoadFailed, match="the model's logits are NaN"):
        build_engine(resolved, resources=ProcessResources())


def test_a_model_that_takes_no_cache_of_ours_may_generate_all_the_same() -> None:
    model = tiny("openai-gpt", n_embd=32, n_layer=3, n_head=4)
    with torch.inference_mode():
        findings = check_batching(model)
        check_generate(model)
    assert findings.problem is not None


def test_a_device_without_memory_fails_the_load() -> None:
    """The error says nothing about the model, so it must not lead to serving one request at a time."""

    def no_memory(kwargs: Kwargs) -> None:
        raise torch.OutOfMemoryError("3 GiB")

    with pytest.raises(LoadFailed, match="OutOfMemoryError: 3 GiB"):
        findings_with(no_memory)
