"""The check at load: what cannot be batched is found out, what can be is not refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.factory import build_engine
from mlserver_torch_stream.engine.loading.selfcheck import SelfCheckResult, check_batching, check_generate
from mlserver_torch_stream.engine.process_resources import ProcessResources
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.settings import parse_settings
from tests.engine.tiny import greedy, prompt_of, reference, run, running, tokens_of
from tests.engine.tiny import tiny_model as tiny

Kwargs = dict[str, Any]


def findings_with(change: Callable[[Kwargs], None]) -> SelfCheckResult:
    """The check of a model whose forward does something to its arguments first."""
    model = tiny("llama")

    def hook(module: torch.nn.Module, args: Any, kwargs: Kwargs) -> tuple[Any, Kwargs]:
        change(kwargs)
        return args, kwargs

    model.register_forward_pre_hook(hook, with_kwargs=True)
    with torch.inference_mode():
        return check_batching(model)


def test_a_sound_model_passes() -> None:
    findings = findings_with(lambda kwargs: None)
    assert findings.problem is None and findings.chunked
    assert findings.cost is not None and findings.cost.per_column == 3 * 2 * 2 * 8 * 4


def test_a_model_that_ignores_its_positions_is_found_out() -> None:
    findings = findings_with(lambda kwargs: kwargs.pop("position_ids", None))
    assert findings.problem is not None and "differ" in findings.problem
    assert findings.cost is None


def test_a_model_that_ignores_its_mask_is_found_out() -> None:
    findings = findings_with(lambda kwargs: kwargs.update(attention_mask=None))
    assert findings.problem is not None and "differ" in findings.problem


def test_a_model_that_forgets_its_cache_is_found_out() -> None:
    findings = findings_with(lambda kwargs: kwargs.update(past_key_values=None, use_cache=False))
    assert findings.problem is not None


@pytest.mark.parametrize("position", [5, 8, 11])
def test_one_wrong_position_of_many_is_found_out(position: int) -> None:
    """An error in a single place, as an off-by-one at a window's edge makes it."""

    def change(kwargs: Kwargs) -> None:
        positions = kwargs.get("position_ids")
        if positions is not None and positions.shape[1] == 1:
            kwargs["position_ids"] = positions + (positions == position)

    assert findings_with(change).problem is not None


def test_nan_only_in_a_batch_is_found_out() -> None:
    model = tiny("llama")

    def hook(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * torch.nan if output.shape[0] == 3 else output

    model.model.norm.register_forward_hook(hook)
    with torch.inference_mode():
        assert check_batching(model).problem is not None


def test_a_model_that_raises_in_a_batch_is_found_out() -> None:
    model = tiny("llama")

    def hook(module: torch.nn.Module, args: Any) -> None:
        if args[0].shape[0] > 1:
            raise ValueError("one sequence at a time, please")

    model.get_input_embeddings().register_forward_pre_hook(hook)
    with torch.inference_mode():
        findings = check_batching(model)
    assert findings.problem == "ValueError: one sequence at a time, please"


def uncuttable() -> PreTrainedModel:
    """A model whose state is wrong when a prompt goes on in a second piece, as in some recurrent families."""
    model = tiny("llama")

    def hook(module: torch.nn.Module, args: Any, kwargs: Kwargs) -> tuple[Any, Kwargs]:
        positions = kwargs.get("position_ids")
        if positions is not None and positions.shape[1] > 1 and int(positions[0, 0]) > 0:
            kwargs["position_ids"] = positions - positions[:, :1]
        return args, kwargs

    model.register_forward_pre_hook(hook, with_kwargs=True)
    return model


def test_a_model_that_cannot_go_on_with_a_prompt_is_batched_with_whole_prompts() -> None:
    model = uncuttable()
    with torch.inference_mode():
        findings = check_batching(model)
    assert findings.problem is None and not findings.chunked and findings.cost is not None
    expected = reference(model, prompt_of(30), 10)
    with running(model, prefill_tokens=4) as engine:
        assert run(tokens_of(engine, prompt_of(30), greedy(10))) == expected


def test_half_precision_passes_and_is_still_watched() -> None:
    """bfloat16 rounds; a wrong position is an error of another size."""
    model = tiny("llama").bfloat16()
    with torch.inference_mode():
        assert check_batching(model).problem is None

        def hook(module: torch.nn.Module, args: Any, kwargs: Kwargs) -> tuple[Any, Kwargs]:
            kwargs.pop("position_ids", None)
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
    """Not "one request at a time", which would fail each request."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "failing.py").write_text(_FAILING)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModelForCausalLM": "failing.Failing"}}))
    resolved = parse_settings(str(folder), {"trust_remote_code": True, "engine": engine, "threads": 1}, environ={})
    with pytest.raises(LoadFailed, match=r"the model cannot generate: KeyError: 'lm_head\.weight'"):
        build_engine(resolved, resources=ProcessResources())


def test_a_model_that_takes_no_cache_of_ours_may_generate_all_the_same() -> None:
    model = tiny("openai-gpt", n_embd=32, n_layer=3, n_head=4)
    with torch.inference_mode():
        findings = check_batching(model)
        check_generate(model)
    assert findings.problem is not None and "Error" in findings.problem


def test_a_device_without_memory_fails_the_load() -> None:
    """It says nothing of the model, which must not be served one request at a time for it."""

    def no_memory(kwargs: Kwargs) -> None:
        raise torch.OutOfMemoryError("3 GiB")

    with pytest.raises(LoadFailed, match="OutOfMemoryError: 3 GiB"):
        findings_with(no_memory)
