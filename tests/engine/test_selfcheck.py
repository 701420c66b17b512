"""The check at load: what cannot be batched is found out, what can be is not refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.loading.selfcheck import Findings, check_batching
from tests.engine.tiny import greedy, prompt_of, reference, run, running, tiny_model, tokens_of

Kwargs = dict[str, Any]


def findings_with(change: Callable[[Kwargs], None]) -> Findings:
    """The check of a model whose forward does something to its arguments first."""
    model = tiny_model("llama")

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
    model = tiny_model("llama")

    def hook(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * torch.nan if output.shape[0] == 3 else output

    model.model.norm.register_forward_hook(hook)
    with torch.inference_mode():
        assert check_batching(model).problem is not None


def test_a_model_that_raises_in_a_batch_is_found_out() -> None:
    model = tiny_model("llama")

    def hook(module: torch.nn.Module, args: Any) -> None:
        if args[0].shape[0] > 1:
            raise ValueError("one sequence at a time, please")

    model.get_input_embeddings().register_forward_pre_hook(hook)
    with torch.inference_mode():
        findings = check_batching(model)
    assert findings.problem == "ValueError: one sequence at a time, please"


def uncuttable() -> PreTrainedModel:
    """A model whose state is wrong when a prompt goes on in a second piece, as in some recurrent families."""
    model = tiny_model("llama")

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
    model = tiny_model("llama").bfloat16()
    with torch.inference_mode():
        assert check_batching(model).problem is None

        def hook(module: torch.nn.Module, args: Any, kwargs: Kwargs) -> tuple[Any, Kwargs]:
            kwargs.pop("position_ids", None)
            return args, kwargs

        model.register_forward_pre_hook(hook, with_kwargs=True)
        assert check_batching(model).problem is not None


def test_the_check_leaves_the_model_as_it_was() -> None:
    model = tiny_model("gemma2")
    before = reference(model, prompt_of(9), 10)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.inference_mode():
        check_batching(model)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert reference(model, prompt_of(9), 10) == before
