"""Decode steps that are recorded and replayed: the logits of the plain forward, whatever sequences come and go.

CUDA records where there is a GPU. Here a tape does, which replays the same operations on the same memory.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from mlserver_torch_stream.engine.batch import Batch, BatchSequence
from mlserver_torch_stream.engine.cuda_graphs.graph_capture import capture_on
from mlserver_torch_stream.engine.cuda_graphs.graph_forward import GraphForward
from mlserver_torch_stream.engine.cuda_graphs.verify_graphs import table_widths, take_graphs
from mlserver_torch_stream.engine.forward.model_forward import ModelForward
from mlserver_torch_stream.engine.forward.model_step import Way
from tests.engine.graph_bench import PAGE_SIZE, WIDTHS, Answers, cache_of, captured, decode_batch, filled
from tests.engine.tape import TapeRecorder
from tests.engine.tiny_models import VOCAB, prompt_of, reference, tiny_model

REQUESTS = [(prompt_of(3 + 5 * i, i), 8 + 3 * i) for i in range(4)]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def recorded(model: PreTrainedModel, **options: Any) -> tuple[GraphForward, TapeRecorder]:
    recorder = TapeRecorder()
    forward = captured(model, recorder, **options)
    assert forward is not None
    return forward, recorder


@pytest.fixture(scope="module")
def llama() -> tuple[GraphForward, TapeRecorder]:
    with torch.inference_mode():
        return recorded(tiny_model("llama"))


@contextmanager
def refused(
    model: PreTrainedModel, caplog: pytest.LogCaptureFixture, says: str, **options: Any
) -> Iterator[TapeRecorder]:
    recorder = TapeRecorder()
    with caplog.at_level(logging.INFO):
        yield recorder
        assert captured(model, recorder, **options) is None
    assert says in caplog.text


# Windows that are shorter than the answers, in all layers and in some, and by chunks; experts; biases; learned
# positions; a ceiling on the scores and sinks, which are eager; a model that looks for padding among its ids.
@pytest.mark.parametrize(
    "family",
    [
        *("gemma3_text", "mixtral", "gpt_oss", "llama4_text", "gpt2"),
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("llama", "mistral", "opt", "gemma2")),
    ],
)
def test_the_tokens_of_the_model(family: str) -> None:
    model = tiny_model(family, **({"attention_chunk_size": 6} if family == "llama4_text" else {}))
    expected = [reference(model, *request) for request in REQUESTS]
    forward, recorder = recorded(model)
    before = recorder.replays
    assert Answers(forward.cache, REQUESTS).run(forward) == expected
    assert recorder.replays > before


@pytest.mark.parametrize(
    "family", ["gemma3_text", *(pytest.param(each, marks=pytest.mark.slow) for each in ("llama", "gpt_oss"))]
)
def test_other_tokens_positions_lengths_and_tables_give_the_logits_of_the_plain_forward(family: str) -> None:
    forward, recorder = recorded(tiny_model(family))
    filled(forward.cache)
    for seed, starts in enumerate(([0], [5], [3, 4], [9, 2, 30], [0, 15, 16, 31], [70, 1, 1, 1], [4] * 4)):
        batch = decode_batch(forward.cache, starts, seed)
        before = recorder.replays
        got = forward(batch, forward.cache).tensor
        assert recorder.replays == before + 1
        torch.testing.assert_close(got, forward.forward(batch, forward.cache).tensor, rtol=1e-4, atol=1e-4)


def test_rows_that_stand_for_no_sequence_write_to_no_page_of_a_sequence(
    llama: tuple[GraphForward, TapeRecorder],
) -> None:
    forward, recorder = llama
    pools = filled(forward.cache)
    batch = decode_batch(forward.cache, [5, 9, 2])
    before = recorder.replays
    forward(batch, forward.cache)
    assert recorder.replays == before + 1
    written = {(each.tables[0][each.start // PAGE_SIZE], each.start % PAGE_SIZE) for each in batch.sequences}
    layers = forward.cache.layers.values()
    now = [pool for layer in layers for pool in (layer.keys, layer.values)]
    for pool, old in zip(now, pools, strict=True):
        assert pool is not None
        changed = (pool != old).any(-1).any(1)[:-1].nonzero().tolist()
        assert {tuple(place) for place in changed} == written


def test_unused_rows_have_no_positions_of_earlier_steps(llama: tuple[GraphForward, TapeRecorder]) -> None:
    forward, _ = llama
    numbers = next(step.segments[0].numbers for step in forward._steps if step.shape.rows == 4)
    for starts, expected in (([5, 9, 3, 12], [5, 9, 3, 12]), ([5, 9, 3], [5, 9, 3, 0])):
        forward(decode_batch(forward.cache, starts), forward.cache)
        assert numbers[:, 1].tolist() == expected


def part(tokens: int, start: int, wanted: int = 1, pages: int = 40) -> BatchSequence:
    return BatchSequence((1,) * tokens, start, (tuple(range(pages)),), wanted)


@pytest.mark.parametrize(
    "batch",
    [
        Batch((part(3, 0),)),  # a prompt
        Batch((part(1, 5), part(2, 0, pages=1))),  # a chunk of one beside a decode row
        Batch((part(3, 4, wanted=3),)),  # drafts
        Batch(tuple(BatchSequence((1,), 2, ((page,),)) for page in range(5))),  # more sequences than were recorded
        Batch((part(1, WIDTHS[-1] * PAGE_SIZE),)),  # longer than any that was recorded
    ],
)
def test_what_a_recording_cannot_hold_runs_the_plain_forward(
    llama: tuple[GraphForward, TapeRecorder], batch: Batch
) -> None:
    forward, recorder = llama
    filled(forward.cache)
    before = recorder.replays
    got = forward(batch, forward.cache).tensor
    assert recorder.replays == before
    assert torch.equal(got, forward.forward(batch, forward.cache).tensor)


def test_pages_of_another_cache_are_not_in_a_recording() -> None:
    model = tiny_model("llama")
    forward, recorder = recorded(model)
    other, before = cache_of(model), recorder.replays
    forward(decode_batch(other, [0]), other)
    assert recorder.replays == before


def test_a_replay_is_told_before_it_begins_and_a_plain_forward_is_not() -> None:
    """Ranks count replays, whose collectives nobody else counts: so they know whether all of them failed before one."""
    model = tiny_model("llama")
    forward, recorder = recorded(model)
    told: list[int] = []
    forward.before_replay = lambda: told.append(recorder.replays)
    forward(decode_batch(forward.cache, [0]), forward.cache)
    other = cache_of(model)
    forward(decode_batch(other, [0]), other)
    assert told == [recorder.replays - 1]


def test_a_token_whose_logits_nobody_wants_has_none(llama: tuple[GraphForward, TapeRecorder]) -> None:
    forward, recorder = llama
    filled(forward.cache)
    first, second, third = decode_batch(forward.cache, [5, 9, 2]).sequences
    silent = BatchSequence(second.token_ids, second.start, second.tables, wanted=0)
    before = recorder.replays
    got = forward(Batch((first, silent, third)), forward.cache).tensor
    assert recorder.replays == before + 1
    expected = forward.forward(Batch((first, second, third)), forward.cache).tensor[[0, 2]]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_copies_of_pages_are_made_before_a_replay(llama: tuple[GraphForward, TapeRecorder]) -> None:
    forward, _ = llama
    filled(forward.cache)
    (sequence,) = decode_batch(forward.cache, [2]).sequences
    target = next(page for page in range(PAGE_SIZE) if page != sequence.tables[0][0])
    expected = forward(Batch((sequence,)), forward.cache).tensor
    moved = BatchSequence(sequence.token_ids, 2, ((target,),))
    batch = Batch((moved,), copies=((0, sequence.tables[0][0], target),))
    assert torch.equal(forward(batch, forward.cache).tensor, expected)


def test_logits_outlive_the_next_step(llama: tuple[GraphForward, TapeRecorder]) -> None:
    forward, _ = llama
    filled(forward.cache)
    logits = forward(decode_batch(forward.cache, [5, 9], seed=1), forward.cache).tensor
    kept = logits.clone()
    forward(decode_batch(forward.cache, [7, 3], seed=2), forward.cache)
    assert torch.equal(logits, kept)


def test_a_sequence_that_is_not_a_number_does_not_take_the_others_with_it() -> None:
    forward, _ = recorded(tiny_model("gpt_oss"))
    filled(forward.cache)
    batch = decode_batch(forward.cache, [5, 9, 2])
    expected = forward(batch, forward.cache).tensor
    for layer in forward.cache.layers.values():
        assert layer.values is not None
        layer.values[list(batch.sequences[1].tables[layer.group])] = torch.nan
    got = forward(batch, forward.cache).tensor
    assert got[1].isnan().all()
    torch.testing.assert_close(got[[0, 2]], expected[[0, 2]])


def test_there_is_one_recording_for_each_number_of_sequences_and_width() -> None:
    forward, recorder = recorded(tiny_model("llama"), sequences=6)
    assert [(shape.rows, shape.width) for shape in forward.shapes] == [
        (rows, width) for rows in (1, 2, 4, 6) for width in WIDTHS
    ]
    assert recorder.parts == len(forward.shapes)  # the whole step in one


def test_tables_are_recorded_in_several_widths_only_where_all_their_pages_are_copied() -> None:
    assert table_widths(100, copies_keys=False) == [100]
    assert table_widths(100, copies_keys=True) == [4, 16, 64, 100]
    assert table_widths(3, copies_keys=True) == [3]


@pytest.mark.parametrize(
    ("family", "way", "says"),
    [
        ("falcon", Way.MASKED_ROWS, "takes its batches as rows with masks"),
        ("lfm2", Way.ROWS, "takes its batches as rows"),
        ("lfm2", Way.PACKED, "keep states"),
        ("deepseek_v3", Way.PACKED, "its cache holds latents"),
    ],
)
def test_what_cannot_be_recorded_is_named(family: str, way: Way, says: str, caplog: pytest.LogCaptureFixture) -> None:
    with refused(tiny_model(family), caplog, says, way=way) as recorder:
        pass
    assert recorder.parts == 0


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


def test_masks_that_a_model_makes_itself_are_not_left_out(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")

    def mask(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "attention_mask": torch.zeros(1, 1, 1, 1)}

    with refused(model, caplog, "makes masks of its own"):
        model.model.layers[2].self_attn.register_forward_pre_hook(mask, with_kwargs=True)


def test_recordings_whose_logits_are_not_the_forwards_are_given_up(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")

    def by_step(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """What Python decides anew in each call is decided once in a recording."""
        module.calls = getattr(module, "calls", 0) + 1
        return output if module.calls > 12 else output * 3

    with refused(model, caplog, "differ by"):
        model.model.layers[1].register_forward_hook(by_step)


def test_recordings_of_more_sequences_are_compared_too(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    with refused(model, caplog, "logits of 8 sequences", sequences=8):
        calls: list[int] = []

        def once(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            full = output.shape[1] == 8
            calls.extend([1] * full)
            return output * (3 if full and len(calls) <= 2 * len(WIDTHS) else 1)

        model.model.layers[1].register_forward_hook(once)


def test_a_decision_that_a_far_position_changes_is_not_recorded(caplog: pytest.LogCaptureFixture) -> None:
    """A recording holds on to what Python has decided for the longest sequences."""
    model = tiny_model("llama")

    def scale_far_ones(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if kwargs["past_key_values"].get_seq_length() >= 70:
            kwargs["hidden_states"] = kwargs["hidden_states"] * 2
        return args, kwargs

    model.model.layers[0].self_attn.register_forward_pre_hook(scale_far_ones, with_kwargs=True)
    with refused(model, caplog, "differ by", widths=[20]):
        pass


def test_models_on_the_cpu_are_not_recorded() -> None:
    model = tiny_model("llama")
    assert take_graphs(ModelForward(model), cache_of(model), 8, 64, capture_on) is None


def test_a_step_has_logits_of_the_whole_vocabulary(llama: tuple[GraphForward, TapeRecorder]) -> None:
    forward, _ = llama
    filled(forward.cache)
    assert forward(decode_batch(forward.cache, [5, 9, 2]), forward.cache).tensor.shape == (3, VOCAB)
