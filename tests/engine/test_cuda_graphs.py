"""Decode steps that are recorded and replayed: the tokens of the model, whatever rows come and go.

CUDA records where there is a GPU. Here a tape does, which replays the same operations on the same memory.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.core import EngineCore
from mlserver_torch_stream.engine.cuda_graphs.captured_step import CapturedAttention
from mlserver_torch_stream.engine.cuda_graphs.graph_capture import DryRun
from mlserver_torch_stream.engine.cuda_graphs.graph_forward import GraphForward
from mlserver_torch_stream.engine.cuda_graphs.trace import capture_step
from mlserver_torch_stream.engine.cuda_graphs.verify_graphs import take_graphs, verified
from mlserver_torch_stream.engine.forward.interface import JointForward
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.kv_cache.row_cache import CacheLayout, RowCache
from mlserver_torch_stream.engine.loading.selfcheck import check_batching
from mlserver_torch_stream.errors import GenerationFailed
from tests.engine.tape import TapeRecorder
from tests.engine.test_config_fields import MINISTRAL
from tests.engine.test_far import LENGTH, LLAMA_3
from tests.engine.tiny import VOCAB, greedy, prompt_of, reference, run, running, tiny_model, tokens_of, watched

REQUESTS = [(prompt_of(3 + 5 * i, i), 8 + 3 * i) for i in range(7)]


def recorded(model: PreTrainedModel, max_rows: int = 8) -> tuple[GraphForward, TapeRecorder]:
    recorder = TapeRecorder()
    with torch.inference_mode():
        forward = verified(model, recorder, max_rows)
    assert forward is not None
    return forward, recorder


@contextmanager
def refused(
    model: PreTrainedModel, caplog: pytest.LogCaptureFixture, says: str, max_rows: int = 4
) -> Iterator[TapeRecorder]:
    recorder = TapeRecorder()
    with caplog.at_level(logging.INFO), torch.inference_mode():
        yield recorder
        assert verified(model, recorder, max_rows) is None
    assert says in caplog.text


async def together(engine: EngineCore) -> list[list[int]]:
    return list(await asyncio.gather(*(tokens_of(engine, prompt, greedy(count)) for prompt, count in REQUESTS)))


def batch_of(forward: ModelForward | GraphForward, layout: CacheLayout, lengths: list[int]) -> RowCache:
    batch = layout.cache(rows=len(lengths), capacity=64)
    for length in lengths:
        cache = layout.cache(capacity=length)
        cache.begin_row()
        forward([list(range(length))], cache)
        batch.join(cache)
    return batch


@pytest.mark.parametrize(
    "family",
    # Windows that are shorter than the answers, in all layers and in some; experts; biases; learned positions; a
    # ceiling on the scores and sinks, which are eager.
    ["llama", "mistral", "gemma3_text", "mixtral", "opt", "gemma2", "gpt_oss"],
)
def test_the_tokens_of_the_model(family: str) -> None:
    model = tiny_model(family)
    implementation = model.config._attn_implementation
    expected = [reference(model, *request) for request in REQUESTS]
    forward, recorder = recorded(model)
    assert model.config._attn_implementation == implementation
    before = recorder.replays
    with running(model, forward=forward) as engine, watched(model) as watch:
        assert run(together(engine)) == expected
        assert not watch.steps  # one-token pieces of prompts are replayed too
    assert recorder.replays > before


def test_rows_in_padded_batches_have_the_logits_of_the_model() -> None:
    model = tiny_model("llama")
    forward, layout = recorded(model)[0], CacheLayout(model.config)
    plain = ModelForward(model)
    with torch.inference_mode():
        for lengths in ([5], [5, 9], [9, 2, 30], [4] * 5):
            one, other = (batch_of(each, layout, lengths) for each in (plain, forward))
            for step in range(20):
                tokens = [[(7 * step + row) % VOCAB] for row in range(len(lengths))]
                torch.testing.assert_close(forward(tokens, other), plain(tokens, one), rtol=1e-4, atol=1e-4)
            assert other.lengths == one.lengths


def test_logits_outlive_the_next_step() -> None:
    model = tiny_model("llama")
    forward, layout = recorded(model)[0], CacheLayout(model.config)
    with torch.inference_mode():
        batch = batch_of(forward, layout, [5, 9])
        logits = forward([[1], [2]], batch)
        kept = logits.clone()
        forward([[3], [4]], batch)
    assert torch.equal(logits, kept)


def test_batches_of_unlike_lengths_share_a_replay() -> None:
    model = tiny_model("gemma3_text")
    forward, recorder = recorded(model)
    assert isinstance(forward, JointForward)
    layout, parts = CacheLayout(model.config), model.config.num_hidden_layers + 1
    with torch.inference_mode():
        alone, shared = ([batch_of(forward, layout, each) for each in ([5, 9], [30], [2, 3])] for _ in range(2))
        for step in range(10):
            tokens = [[[(step + row) % VOCAB] for row in range(len(cache.lengths))] for cache in alone]
            expected = [forward(ids, cache) for ids, cache in zip(tokens, alone, strict=True)]
            before = recorder.replays
            found = forward.together(list(zip(tokens, shared, strict=True)))
            assert recorder.replays - before == parts
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        with pytest.raises(ValueError, match="10 rows are more than the 8"):
            forward.together([(ids, cache) for ids, cache in zip(tokens * 2, shared * 2, strict=True)])
    assert [cache.lengths for cache in shared] == [cache.lengths for cache in alone]


def test_where_one_batch_fails_none_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    forward, layout = recorded(model)[0], CacheLayout(model.config)
    with torch.inference_mode():
        caches = [batch_of(forward, layout, lengths) for lengths in ([5, 9], [30])]
        parts: list[Any] = [([[1]] * len(cache.lengths), cache) for cache in caches]
        with monkeypatch.context() as patch:
            patch.setattr(caches[1].slabs[-1], "extend", _fail)
            with pytest.raises(RuntimeError, match="no memory"):
                forward.together(parts)
        assert [cache.lengths for cache in caches] == [[5, 9], [30]]
        found = forward.together(parts)
        twins = [batch_of(forward, layout, lengths) for lengths in ([5, 9], [30])]
        for logits, (tokens, _), twin in zip(found, parts, twins, strict=True):
            torch.testing.assert_close(logits, forward(tokens, twin), rtol=1e-4, atol=1e-4)


def test_a_batch_takes_the_least_recording_that_holds_it() -> None:
    model = tiny_model("llama")
    forward, recorder = recorded(model, max_rows=5)
    assert forward.max_batch_size == 8
    parts = model.config.num_hidden_layers + 1
    assert recorder.parts == 4 * parts  # of 1, 2, 4 and 8 rows
    layout = CacheLayout(model.config)
    with torch.inference_mode():
        for rows, replays in ((8, parts), (9, 0)):  # more rows than were recorded: the model's own forward
            batch = batch_of(forward, layout, [4] * rows)
            before = recorder.replays
            assert forward([[1]] * rows, batch).shape == (rows, VOCAB)
            assert recorder.replays - before == replays


def test_a_step_that_raises_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    forward, layout = recorded(model)[0], CacheLayout(model.config)
    with torch.inference_mode():
        batch = batch_of(forward, layout, [5, 9])
        twin = batch_of(forward, layout, [5, 9])
        slab = batch.slabs[-1]
        with monkeypatch.context() as patch:
            patch.setattr(slab, "extend", _fail)
            with pytest.raises(RuntimeError, match="no memory"):
                forward([[1], [2]], batch)
        assert batch.lengths == [5, 9]
        assert torch.equal(forward([[1], [2]], batch), forward([[1], [2]], twin))


def _fail(*_: Any) -> None:
    raise RuntimeError("no memory")


def test_a_row_that_fails_alone_does_not_take_the_others_with_it() -> None:
    model = tiny_model("llama")
    forward = recorded(model)[0]
    with torch.inference_mode():
        findings = check_batching(model)
    failing, *others = REQUESTS
    sequence, *expected = [reference(model, *request) for request in REQUESTS]
    used = {token for prompt, _ in REQUESTS for token in prompt} | {token for each in expected for token in each}
    victim = next(token for token in sequence[:-1] if token not in used)
    with torch.no_grad():
        model.get_input_embeddings().weight[victim] = float("nan")

    async def fails(engine: EngineCore) -> list[int]:
        found: list[int] = []
        with pytest.raises(GenerationFailed, match="not finite"):
            async for event in engine.submit([EngineRequest(failing[0], greedy(failing[1]))]):
                found += event.token_ids
                if event.error is not None:
                    raise event.error
        return found

    async def scenario(engine: EngineCore) -> list[list[int]]:
        return list(
            await asyncio.gather(fails(engine), *(tokens_of(engine, prompt, greedy(count)) for prompt, count in others))
        )

    with running(model, forward=forward, findings=findings) as engine:
        assert run(scenario(engine)) == [sequence[: sequence.index(victim) + 1], *expected]


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("falcon", "0 attentions over 3 cache layers"),  # its code does not ask transformers for an attention
        ("lfm2", "keep states"),
    ],
)
def test_what_cannot_be_recorded_runs_as_ever(family: str, says: str, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(family)
    with refused(model, caplog, says):
        pass
    expected = [reference(model, *request) for request in REQUESTS[:2]]
    with running(model) as engine:
        found = [run(tokens_of(engine, prompt, greedy(count))) for prompt, count in REQUESTS[:2]]
    assert found == expected


@pytest.mark.parametrize(
    "code", [lambda x: x * (1 if x.sum().item() else 2), lambda x: x + torch.where(x > 0)[0].sum()]
)
def test_code_that_waits_for_its_device_is_refused_before_the_device_is_asked(
    code: Callable[[torch.Tensor], torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    """A recording that breaks off leaves CUDA's allocator believing for good that it goes on."""
    model = tiny_model("llama")
    with refused(model, caplog, "cannot be recorded") as recorder:
        model.model.layers[1].register_forward_hook(lambda *args: code(args[-1]))
    assert recorder.parts == 0
    assert model.config._attn_implementation == "sdpa"


def test_windows_that_begin_anew_with_every_chunk_are_not_recorded(caplog: pytest.LogCaptureFixture) -> None:
    """The few tokens of the check at load lie in one chunk, and would show no difference."""
    with refused(tiny_model("llama4_text"), caplog, "see the tokens of a chunk"):
        pass


def test_masks_that_a_model_makes_itself_are_not_left_out(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")

    def mask(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "attention_mask": torch.zeros(1, 1, 1, 1)}

    with refused(model, caplog, "makes masks of its own"):
        model.model.layers[2].self_attn.register_forward_pre_hook(mask, with_kwargs=True)


def test_rows_that_are_over_have_no_positions_of_earlier_steps() -> None:
    model = tiny_model("llama")
    forward, layout = recorded(model)[0], CacheLayout(model.config)
    found: list[torch.Tensor] = []
    with torch.inference_mode():
        for lengths in ([5, 9, 3, 30], [5, 9, 3]):
            forward([[1]] * len(lengths), batch_of(forward, layout, lengths))
            found.append(next(step.inputs[1, :, 0].clone() for step in forward._steps if step.rows == 4))
    assert [each.tolist() for each in found] == [[5, 9, 3, 30], [5, 9, 3, 0]]


def test_other_attentions_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    with refused(model, caplog, "its attention is 'flex_attention'"):
        model.config._attn_implementation = "flex_attention"


def test_recordings_whose_logits_are_not_the_models_are_given_up(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")

    def by_step(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """What Python decides anew in each call is decided once in a recording."""
        module.calls = getattr(module, "calls", 0) + 1
        return output if module.calls > 12 else output * 3

    with refused(model, caplog, "its logits differ"):
        model.model.layers[1].register_forward_hook(by_step)


def test_rows_that_were_never_filled_begin_with_zeros() -> None:
    """A scale over all rows, as quantised activations may have, would find whatever a GPU's memory held."""
    model = tiny_model("llama")
    with torch.inference_mode():
        step = capture_step(model, DryRun(), 2, CacheLayout(model.config).windows)
    attentions = [work for work in step.segments[0].work if isinstance(work, CapturedAttention)]
    assert len(attentions) == model.config.num_hidden_layers
    assert not any(each.output.any() for each in attentions)


def test_recordings_of_more_rows_are_compared_too(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    with refused(model, caplog, "logits of 8 rows differ", max_rows=8):
        model.model.layers[1].register_forward_hook(lambda *args: args[-1] * (3 if len(args[-1]) == 8 else 1))


def test_models_on_the_cpu_are_not_recorded() -> None:
    assert take_graphs(tiny_model("llama"), 8, None) is None


def test_ministral_3_scales_its_queries_in_a_recording_too() -> None:
    model = tiny_model("ministral3", **MINISTRAL)
    prompts = [prompt_of(length, length) for length in (20, 55, 100)]
    expected = [reference(model, prompt, 20) for prompt in prompts]
    forward, _ = recorded(model)
    with running(model, forward=forward) as engine:

        async def all_at_once() -> list[list[int]]:
            return list(await asyncio.gather(*(tokens_of(engine, prompt, greedy(20)) for prompt in prompts)))

        assert run(all_at_once()) == expected


def test_a_decision_that_a_far_position_changes_is_not_recorded(caplog: pytest.LogCaptureFixture) -> None:
    """A recording holds on to what Python has decided; at near positions that was right."""
    model = tiny_model(**LLAMA_3)

    def scale_far_ones(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        cache = kwargs["past_key_values"]
        if cache is not None and cache.get_seq_length() >= LENGTH:
            kwargs["hidden_states"] = kwargs["hidden_states"] * 2
        return args, kwargs

    model.model.layers[0].self_attn.register_forward_pre_hook(scale_far_ones, with_kwargs=True)
    with refused(model, caplog, "at position 9"):
        pass
