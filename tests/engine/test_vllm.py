"""The engine over vLLM, with another worker in vLLM's place: what streams guarantee holds whatever that worker does."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from mlserver_torch_stream.engine.api import EngineRequest, Mailbox
from mlserver_torch_stream.engine.build import BuiltEngine, build_engine
from mlserver_torch_stream.engine.constraints.grammar import after_reasoning, grammar_of
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.engine.step import batcher
from mlserver_torch_stream.engine.vllm import vllm_batcher, vllm_engine, vllm_process, worker
from mlserver_torch_stream.engine.vllm.messages import MAX_MESSAGE, Adapter, Ready, StartOrder
from mlserver_torch_stream.engine.vllm.sampling import as_lark
from mlserver_torch_stream.engine.vllm.vllm_process import VllmProcess, bound_cores
from mlserver_torch_stream.errors import (
    InvalidInput,
    LoadFailed,
    NotServing,
    QueueFull,
    SettingsError,
    UnknownModel,
)
from mlserver_torch_stream.generation import Generator
from mlserver_torch_stream.handlers.frames import encode_frame
from mlserver_torch_stream.settings import parse_settings
from mlserver_torch_stream.types import (
    Constraint,
    ConstraintKind,
    FinishReason,
    GenerationRequest,
    SamplingParameters,
    TextPrompt,
    TokenEvent,
)
from mlserver_torch_stream.work_threads import Cancellation, in_thread
from tests.engine.tiny import collect, run, until
from tests.engine.wire_worker import CONTEXT, VOCAB, answer, interpreter, score

PROMPT = (40, 41, 42)

Start = Callable[..., BuiltEngine]


@pytest.fixture
def start(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Builds an engine over that worker. Its keyword arguments are keys of ``vllm``; ``extra`` has other settings.

    ``folder`` names a model other than the tiny one.
    """
    monkeypatch.setattr(vllm_engine, "_DELAYS_S", (0.01,))
    python = interpreter(tmp_path)
    started: list[BuiltEngine] = []

    def build(
        extra: dict[str, Any] | None = None, on_death: Any = None, folder: Path = tiny_model, **vllm: Any
    ) -> BuiltEngine:
        settings = {"vllm": {"marks": str(tmp_path), **vllm}, "vllm_python": str(python), **(extra or {})}
        built = build_engine(parse_settings(str(folder), settings), "", on_death, ProcessResources())
        started.append(built)
        return built

    yield build
    for each in started:
        if each.give_back():
            each.shutdown()


def greedy(count: int, **changes: Any) -> SamplingParameters:
    return SamplingParameters(max_tokens=count, ignore_eos=True, **changes)


def generated(
    built: BuiltEngine, params: SamplingParameters, prompt: tuple[int, ...] = PROMPT
) -> dict[int, TokenEvent]:
    events: dict[int, TokenEvent] = run(collect(built.engine, [EngineRequest(prompt, params)]))  # type: ignore[arg-type]
    return events


async def asked(built: BuiltEngine, constraint: Constraint | None = None, **params: Any) -> list[TokenEvent]:
    """Returns the events of a text prompt, after it has been tokenized and its constraint compiled."""
    streams: list[Any] = []
    generator = Generator(built.engine, built.codec, built.engine.info)
    request = GenerationRequest("r", (TextPrompt("abc"),), SamplingParameters(**params), constraint=constraint)
    await generator.start(request, streams.append)
    return [event async for event in streams[0]]


async def last_events(stream: Mailbox) -> list[TokenEvent]:
    return [event async for event in stream if event.finish_reason is not None]


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    return False


def test_tokens_text_usage_and_cached_tokens_come_from_the_worker(start: Start) -> None:
    built = start()
    event = generated(built, greedy(5))[0]
    expected = answer(list(PROMPT), 5)
    assert list(event.token_ids) == expected
    assert event.text == built.codec.decode(expected, True)
    assert event.finish_reason is FinishReason.LENGTH
    assert event.usage is not None
    assert (event.usage.num_input_tokens, event.usage.num_output_tokens, event.usage.num_cached_tokens) == (3, 5, 0)
    prompt = tuple(range(40, 80))
    generated(built, greedy(1), prompt)
    again = generated(built, greedy(1), prompt)[0]
    assert again.usage is not None
    assert again.usage.num_cached_tokens == 32
    stats = built.engine.stats()
    assert (stats.generation_tokens, stats.prefix_cache_hit_tokens, stats.prefill_tokens) == (7, 32, 3 + 40 + 8)
    assert built.engine.info.max_model_len == CONTEXT


def test_each_answer_of_n_is_a_sequence_of_the_worker(start: Start, tmp_path: Path) -> None:
    record = tmp_path / "record"
    events = generated(
        start(record=str(record)), greedy(4, n=3, temperature=1.0, seed=7, logprobs=True, top_logprobs=2)
    )
    assert sorted(events) == [0, 1, 2]
    assert {tuple(event.token_ids) for event in events.values()} == {tuple(answer(list(PROMPT), 4))}
    first = events[0].logprobs[0]
    assert (first.logprob, [value for _, value in first.top]) == (-0.5, [-0.5, -1.5])
    assert events[0].cumulative_logprob == -2.0
    (message,) = record.read_text().splitlines()
    assert (json.loads(message)["n"], json.loads(message)["params"]["seed"]) == (3, 7)


def test_all_sampling_parameters_reach_the_worker_under_its_names(start: Start, tmp_path: Path) -> None:
    record = tmp_path / "record"
    built = start(record=str(record))
    params = greedy(
        9,
        min_tokens=4,
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={7: 3.0},
        bad_words=("cat",),
        stop_token_ids=(60,),
        seed=2**63 - 1,
    )
    generated(built, params)
    request = json.loads(record.read_text().splitlines()[0])
    assert request["params"] == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "max_tokens": 9,
        "min_tokens": 4,
        "ignore_eos": True,
        "stop_token_ids": [60],
        "seed": 2**63 - 1,
        "logit_bias": {"7": 3.0},
    }
    assert [tuple(word) for word in request["bad_words"]] == list(built.codec.bad_words_ids(("cat",)))
    assert request["priority"] == 100
    assert request["grammar"] is None


def test_ids_outside_the_vocabulary_do_not_reach_the_worker(start: Start, tiny_model: Path, tmp_path: Path) -> None:
    """vLLM refuses such an id as a stop token, and in a bad word it ends vLLM's engine core."""
    folder, record = tmp_path / "model", tmp_path / "record"
    shutil.copytree(tiny_model, folder)
    rules = {"eos_token_id": [1, VOCAB], "suppress_tokens": [3, VOCAB], "bad_words_ids": [[5, 6], [5, VOCAB], [-1]]}
    (folder / "generation_config.json").write_text(json.dumps(rules))
    generated(start(folder=folder, record=str(record)), SamplingParameters(max_tokens=2))
    request = json.loads(record.read_text().splitlines()[0])
    assert request["params"]["stop_token_ids"] == [1]
    assert request["bad_words"] == [[3], [5, 6]]


# The text of an answer, and where it ends, are made here; the ends by ids become ``stop_token_ids``.
_HERE = {"stop", "include_stop_str_in_output", "skip_special_tokens", "eos_token_ids", "ignore_eos", "n"}
_OTHERWISE = {"prompt_logprobs", "bad_words", "logprobs", "top_logprobs", "typical_p"}  # are tested above and below


def test_no_sampling_parameter_is_forgotten(start: Start, tmp_path: Path) -> None:
    """Each new sampling parameter must either be passed to vLLM or be refused."""
    record = tmp_path / "record"
    changes = {"max_tokens": 3, "min_tokens": 1, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.5}
    changes |= {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {5: 1.0}}
    changes |= {"stop_token_ids": (5,), "seed": 3}
    generated(start(record=str(record)), SamplingParameters(**changes, cache_salt="ours"))
    request = json.loads(record.read_text().splitlines()[0])
    assert changes.keys() <= request["params"].keys() and request["salt"] == "ours"
    assert {each.name for each in fields(SamplingParameters)} == changes.keys() | {"cache_salt"} | _HERE | _OTHERWISE


def test_a_stop_string_ends_the_answer_here_and_the_sequence_in_the_worker(start: Start, tmp_path: Path) -> None:
    record = tmp_path / "record"
    built = start(record=str(record), step_s=0.02)
    text = built.codec.decode(answer(list(PROMPT), 3), True)
    event = generated(built, greedy(400, stop=(text[2:],)))[0]
    assert (event.text, event.finish_reason, event.stop_reason) == (text[:2], FinishReason.STOP, text[2:])
    run(until(lambda: '"abort"' in record.read_text(), "the abort"))
    assert built.engine.load == 0


def test_tokens_that_the_worker_sends_behind_a_stop_string_are_dropped(start: Start) -> None:
    """The worker generates until it is told to stop; here the server is busy meanwhile."""
    built = start(step_s=0.02)
    text = built.codec.decode(answer(list(PROMPT), 8), True)

    async def scenario() -> list[TokenEvent]:
        stream = built.engine.submit([EngineRequest(PROMPT, greedy(400, stop=(text[3:],), logprobs=True))])
        events = [await anext(stream)]
        built.engine._inbox.post(lambda: time.sleep(0.5))
        return events + [event async for event in stream]

    events = run(scenario())
    assert ("".join(event.text for event in events), events[-1].finish_reason) == (text[:3], FinishReason.STOP)
    assert events[-1].usage is not None and events[-1].usage.num_output_tokens == 8
    assert [token for event in events for token in event.token_ids] == answer(list(PROMPT), 8)
    assert sum(len(event.logprobs) for event in events) == 8


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (ConstraintKind.REGEX, "[a-z]/[0-9]"),
        (ConstraintKind.CHOICE, '["}","b::=c"]'),
        (ConstraintKind.JSON_SCHEMA, '{"type":"integer"}'),
        (ConstraintKind.GRAMMAR, 'start: "{" y\ny: /z+/'),
    ],
)
def test_a_constraint_is_one_grammar_in_larks_language(
    kind: ConstraintKind, source: str, start: Start, tmp_path: Path
) -> None:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    record = tmp_path / "record"
    run(asked(start(record=str(record)), Constraint(kind, source, "f"), max_tokens=2))
    request = json.loads(record.read_text().splitlines()[0])
    grammar = any_to_lark(request["grammar"])  # as vLLM reads it
    assert grammar == request["grammar"]
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar)) == ""
    assert request["params"]["stop_token_ids"] == [1]  # the end token of the tokenizer, after the constraint


@pytest.mark.parametrize("end_id", [7, None], ids=["special", "text"])
@pytest.mark.parametrize("begin", [None, ["<think>"]], ids=["begun", "may_begin"])
def test_a_constraint_after_a_reasoning_is_one_grammar_too(end_id: int | None, begin: list[str | int] | None) -> None:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    for kind, source in ((ConstraintKind.JSON_SCHEMA, '{"type":"integer"}'), (ConstraintKind.REGEX, "a{2}/")):
        grammars = after_reasoning(grammar_of(Constraint(kind, source, "f")), "</think>", end_id, begin)
        lark = as_lark(json.dumps({"grammars": grammars}))
        assert any_to_lark(lark) == lark
        assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(lark)) == ""
        assert "@answer" not in lark


def test_what_vllm_lacks_is_refused_by_name(start: Start) -> None:
    built = start()
    for params, field in ((greedy(1, typical_p=0.5), "typical_p"), (greedy(1, temperature=2.5), "temperature")):
        with pytest.raises(InvalidInput, match=rf"{field}: .*vLLM"):
            generated(built, params)
    with pytest.raises(InvalidInput, match=r"n: 9 sequences are more than the 8 allowed"):
        generated(built, greedy(1, n=9))


@pytest.mark.parametrize("top", [0, 2])
@pytest.mark.parametrize("count", [0, 3])
def test_the_scores_of_a_prompt_come_from_the_worker(top: int, count: int, start: Start, tmp_path: Path) -> None:
    record = tmp_path / "record"
    built = start(record=str(record))
    for prompt in (PROMPT, PROMPT[:1]):
        events = generated(built, greedy(count, prompt_logprobs=top, n=2), prompt)
        assert sorted(events) == [0, 1]
        for event in events.values():
            first, *others = event.prompt_logprobs
            assert (first.token_id, first.logprob, first.top) == (prompt[0], None, ())
            assert [(each.token_id, each.logprob) for each in others] == [(each, score(each)) for each in prompt[1:]]
            assert all(
                each.top == ((each.token_id, each.logprob), (each.token_id - 1, each.logprob - 1))[:top]
                for each in others
            )
            assert list(event.token_ids) == answer(list(prompt), count)
            assert event.finish_reason is FinishReason.LENGTH
            assert event.usage is not None and event.usage.num_output_tokens == count
    params = json.loads(record.read_text().splitlines()[0])["params"]
    assert (params["max_tokens"], params["prompt_logprobs"]) == (max(count, 1), max(top, 1))


def test_a_request_for_no_token_gets_none_even_if_the_worker_ends_it_otherwise(start: Start) -> None:
    first = answer(list(PROMPT), 1)
    event = generated(start(), SamplingParameters(max_tokens=0, stop_token_ids=tuple(first), ignore_eos=True))[0]
    assert (event.token_ids, event.text, event.finish_reason, event.stop_reason) == ((), "", FinishReason.LENGTH, None)


def test_scores_that_do_not_fit_the_prompt_end_only_their_request(start: Start) -> None:
    built = start(scores=[[-1.0, []]])
    event = generated(built, greedy(3, prompt_logprobs=0))[0]
    assert event.finish_reason is FinishReason.ERROR
    assert "vLLM has sent 1 scores for a prompt of 3 tokens" in str(event.error)
    assert list(generated(built, greedy(2))[0].token_ids) == answer(list(PROMPT), 2)


def test_a_closed_stream_ends_its_sequence_in_the_worker(start: Start) -> None:
    built = start(step_s=0.02)

    async def leave() -> None:
        stream = built.engine.submit([EngineRequest(PROMPT, greedy(400))])
        await anext(stream)
        stream.close()
        await until(lambda: built.engine.load == 0, "the end of the sequence")
        assert built.engine.stats().cancelled_sequences == 1
        assert (await collect(built.engine, [EngineRequest(PROMPT, greedy(3))]))[0].finish_reason is FinishReason.LENGTH  # type: ignore[arg-type]

    run(leave())


def test_the_queue_stands_before_the_worker_and_is_bounded(start: Start, tmp_path: Path) -> None:
    record = tmp_path / "record"
    built = start({"max_queued_requests": 4}, record=str(record), max_num_seqs=4, step_s=0.05)

    async def fill() -> None:
        streams = [built.engine.submit([EngineRequest(PROMPT, greedy(400))]) for _ in range(4)]
        for stream in streams:
            await anext(stream)
        streams.append(built.engine.submit([EngineRequest(PROMPT, greedy(400))]))
        await until(lambda: record.read_text().count('"add"') == 5, "the fifth in the worker")
        streams += [built.engine.submit([EngineRequest(PROMPT, greedy(400))]) for _ in range(3)]
        await until(lambda: built.engine.stats().waiting_requests >= 3, "the queue")
        with pytest.raises(QueueFull):
            for _ in range(2):
                streams.append(built.engine.submit([EngineRequest(PROMPT, greedy(1))]))
        assert record.read_text().count('"add"') == 5
        assert built.engine.stats().running_sequences == 4
        for stream in streams:
            stream.close()
        await until(lambda: built.engine.load == 0, "the end of all")

    run(fill())


@pytest.mark.long
def test_a_refused_client_is_told_how_long_the_waiting_requests_take(start: Start) -> None:
    built = start({"max_queued_requests": 3}, max_num_seqs=1, step_s=0.1)

    async def refused() -> None:
        for _ in range(2):  # of which the first has been counted when the second ends
            await collect(built.engine, [EngineRequest(PROMPT, greedy(8))])  # type: ignore[arg-type]
        streams = []
        with pytest.raises(QueueFull) as full:
            for _ in range(9):  # some of which the worker may have taken already
                streams.append(built.engine.submit([EngineRequest(PROMPT, greedy(12))]))
        assert (full.value.retry_after or 0) >= 2
        for stream in streams:
            stream.close()

    run(refused())


def test_a_timeout_ends_a_running_sequence_with_its_text(start: Start) -> None:
    built = start(step_s=0.02)
    request = EngineRequest(PROMPT, greedy(400), timeout_s=1.5)
    event = run(collect(built.engine, [request]))[0]  # type: ignore[arg-type]
    assert event.finish_reason is FinishReason.TIMEOUT
    assert event.text
    run(until(lambda: built.engine.load == 0, "the end of the sequence"))


def test_a_drained_engine_finishes_its_streams_and_refuses_others(start: Start) -> None:
    built = start(step_s=0.01)

    async def drained() -> TokenEvent:
        stream = built.engine.submit([EngineRequest(PROMPT, greedy(20))])
        built.engine.drain("leaving")
        with pytest.raises(NotServing, match="leaving"):
            built.engine.submit([EngineRequest(PROMPT, greedy(1))])
        return [event async for event in stream][-1]

    assert run(drained()).finish_reason is FinishReason.LENGTH


def test_death_is_told_to_every_stream_once_and_another_worker_starts(start: Start, tmp_path: Path) -> None:
    """When the new worker starts, no process of the old one is left, and neither its folder nor its shared memory."""
    pids = tmp_path / "pids"
    built = start(descendants=str(pids), step_s=0.02)
    worker, descendant = map(int, pids.read_text().split())
    assert Path(f"/dev/shm/wire-{worker}").exists()

    async def outlive() -> None:
        streams = [built.engine.submit([EngineRequest(PROMPT, greedy(400, n=2))]) for _ in range(3)]
        for stream in streams:
            await anext(stream)
        os.kill(worker, signal.SIGKILL)
        ends = [await last_events(stream) for stream in streams]
        assert [[event.finish_reason for event in each] for each in ends] == 3 * [2 * [FinishReason.ERROR]]
        assert "vLLM's worker was killed by SIGKILL" in str(ends[0][0].error)
        await until(lambda: built.engine.trouble is None, "the next worker")
        assert not alive(worker)
        assert not alive(descendant)
        assert not Path(f"/dev/shm/wire-{worker}").exists()
        assert not Path(f"/dev/shm/__KMP_REGISTERED_LIB_{descendant}_0").exists()
        again = await collect(built.engine, [EngineRequest(PROMPT, greedy(3))])  # type: ignore[arg-type]
        assert list(again[0].token_ids) == answer(list(PROMPT), 3)

    run(outlive())


async def replaced(built: BuiltEngine, pids: Path) -> None:
    """Kills the worker, whose pid is the first one in the file, and waits until the next one is ready."""
    worker = pids.read_text().split()[0]
    os.kill(int(worker), signal.SIGKILL)
    await until(lambda: pids.read_text().split()[:1] not in ([], [worker]), "the next worker")
    await until(lambda: built.engine.trouble is None, "its being ready")


@pytest.mark.parametrize(("within", "delays"), [(600.0, ["0.01", "0.02"]), (0.05, ["0.01", "0.01"])])
def test_a_restart_waits_longer_only_after_several_deaths_in_ten_minutes(
    within: float,
    delays: list[str],
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(batcher, "_DEATHS_WITHIN", within)
    pids = tmp_path / "pids"
    built = start(descendants=str(pids))
    monkeypatch.setattr(vllm_engine, "_DELAYS_S", (0.01, 0.02, 9.0))

    async def die_twice() -> None:
        for _ in delays:
            await replaced(built, pids)
            await asyncio.sleep(0.1)  # a healthy time

    run(die_twice())
    lines = [each.getMessage() for each in caplog.records if "is started again in" in each.getMessage()]
    assert [line.split()[-2] for line in lines] == delays


def test_a_shutdown_before_vllm_is_started_again_ends_the_wait(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    built = start(descendants=str(pids))
    monkeypatch.setattr(vllm_engine, "_DELAYS_S", (3600.0,))
    os.kill(int(pids.read_text().split()[0]), signal.SIGKILL)
    run(until(lambda: built.engine.trouble is not None, "the death"))
    waiting = {each for each in threading.enumerate() if each.name == "vllm-start"}
    assert built.give_back()
    built.shutdown()
    run(until(lambda: not any(each.is_alive() for each in waiting), "the end of the wait"))


def test_an_engine_that_is_starting_again_says_so(start: Start, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    built = start(die_after=1, start_gate=str(gate))
    gate.unlink()

    async def refused() -> None:
        event = (await collect(built.engine, [EngineRequest(PROMPT, greedy(9))]))[0]  # type: ignore[arg-type]
        assert event.finish_reason is FinishReason.ERROR
        assert built.engine.trouble == "vLLM is being started again"
        with pytest.raises(NotServing, match="vLLM is being started again"):
            built.engine.submit([EngineRequest(PROMPT, greedy(1))])
        gate.touch()
        await until(lambda: built.engine.trouble is None, "the next worker")

    run(refused())


def process_of(built: BuiltEngine) -> VllmProcess:
    engine: Any = built.engine
    process: VllmProcess = engine._batcher._process
    return process


def test_an_engine_accepts_nothing_from_the_end_of_a_worker_until_the_next_one_is_ready(
    start: Start, tmp_path: Path
) -> None:
    """The subreaper is stopped, so that the end of the killed worker takes a while."""
    pids = tmp_path / "pids"
    built = start(descendants=str(pids), row=[1, [5], "for fun", None, None, None, None])
    worker, process = pids.read_text().split()[0], process_of(built)
    subreaper = process.process

    async def end() -> None:
        subreaper.send_signal(signal.SIGSTOP)
        stream = built.engine.submit([EngineRequest(PROMPT, greedy(5))])
        await until(lambda: built.engine.trouble is not None, "the end of the worker")
        assert process.lost is None, "it accepted requests until its streams had ended"
        with pytest.raises(NotServing):
            built.engine.submit([EngineRequest(PROMPT, greedy(1))])
        subreaper.send_signal(signal.SIGCONT)
        before = time.monotonic()
        while built.engine.trouble is not None:
            assert time.monotonic() < before + 60
            await asyncio.sleep(0)  # looks as often as it can
        assert pids.read_text().split()[0] not in ("", worker)
        (event,) = await last_events(stream)
        assert event.finish_reason is FinishReason.ERROR

    try:
        run(end())
    finally:
        subreaper.send_signal(signal.SIGCONT)


def test_clients_need_not_wait_for_the_end_of_killed_processes_but_the_next_worker_does(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm_process, "_TELL_S", 0.2)
    pids = tmp_path / "pids"
    built = start(descendants=str(pids), row=[1, [5], "for fun", None, None, None, None])
    first = pids.read_text()
    worker, descendant = map(int, first.split())
    subreaper = process_of(built).process

    async def end() -> None:
        subreaper.send_signal(signal.SIGSTOP)
        event = (await collect(built.engine, [EngineRequest(PROMPT, greedy(5))]))[0]  # type: ignore[arg-type]
        assert event.finish_reason is FinishReason.ERROR
        await until(lambda: "is started again in" in caplog.text, "the restart")
        await asyncio.sleep(0.3)
        assert pids.read_text() == first and alive(descendant) and built.engine.trouble is not None
        subreaper.send_signal(signal.SIGCONT)
        await until(lambda: built.engine.trouble is None, "the next worker")
        assert not alive(worker) and not alive(descendant)

    try:
        run(end())
    finally:
        subreaper.send_signal(signal.SIGCONT)
    assert "have not ended" in caplog.text


@pytest.mark.long
def test_a_subreaper_that_hangs_is_killed_in_the_end(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_process, "_TELL_S", 0.1)
    monkeypatch.setattr(vllm_process, "_STOP_S", 0.5)
    built = start(row=[1, [5], "for fun", None, None, None, None])
    subreaper = process_of(built).process.pid
    os.kill(subreaper, signal.SIGSTOP)
    assert generated(built, greedy(5))[0].finish_reason is FinishReason.ERROR
    run(until(lambda: built.engine.trouble is None, "the next worker"))
    assert not alive(subreaper)


def test_a_worker_that_dies_again_and_again_stays_dead(start: Start) -> None:
    deaths: list[BaseException] = []
    built = start(on_death=deaths.append, die_after=0)

    async def die() -> None:
        for _ in range(4):
            await until(lambda: built.engine.trouble is None, "the next worker")
            event = (await collect(built.engine, [EngineRequest(PROMPT, greedy(9))]))[0]  # type: ignore[arg-type]
            assert event.finish_reason is FinishReason.ERROR
        await until(lambda: bool(deaths), "the death")
        assert not built.engine.alive

    run(die())


def test_a_start_that_has_failed_before_the_engine_listens_ends_the_engine() -> None:
    def start() -> Any:
        raise LoadFailed("no memory")

    nothing: Any = None
    batcher = vllm_batcher.VllmBatcher(start, nothing, Ready(VOCAB, CONTEXT, 8), nothing)
    batcher.begin_in_thread(0)
    assert batcher._starting is not None
    batcher._starting.join(30)
    woken: list[None] = []
    batcher.attach(lambda: woken.append(None))
    assert woken
    with pytest.raises(LoadFailed, match="no memory"):
        batcher.step(nothing, nothing, nothing)


@pytest.mark.long
def test_a_worker_that_is_never_ready_again_ends_the_engine(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_batcher, "_RESTART_S", 0.1)
    deaths: list[BaseException] = []
    built = start(on_death=deaths.append, die_after=0, start_s=0.5)

    async def die() -> None:
        await collect(built.engine, [EngineRequest(PROMPT, greedy(9))])  # type: ignore[arg-type]
        await until(lambda: bool(deaths), "the death")
        assert str(deaths[0]) == "vLLM was started again, but was not ready within 0.1 s"

    run(die())


@pytest.mark.long
def test_a_worker_that_hangs_is_killed_and_started_again_however_long_a_start_takes(start: Start) -> None:
    built = start({"step_timeout": 1.5}, hang_after=2, start_s=2.0)

    async def hang() -> None:
        event = (await collect(built.engine, [EngineRequest(PROMPT, greedy(9))]))[0]  # type: ignore[arg-type]
        assert event.finish_reason is FinishReason.ERROR
        assert "has not returned" in str(event.error)
        assert len(event.token_ids) == 2
        await until(lambda: built.engine.trouble is None, "the next worker")
        assert built.engine.alive
        again = await collect(built.engine, [EngineRequest(PROMPT, greedy(9))])  # type: ignore[arg-type]
        assert again[0].finish_reason is FinishReason.LENGTH

    run(hang())


@pytest.mark.long
@pytest.mark.parametrize(
    "wrong",
    [
        {"garbage": "ffffffff00000000"},  # a header of 4 GiB
        {"garbage": "0000000204000001"},  # a body of more than 64 MiB
        {"garbage": "00000004000000007b7d7d7d"},  # not JSON
        {"garbage": "00000008000000007b2274223a20317d"},  # a message of kind 1
        {"garbage": "0000001a000000007b2274223a22616e737765726564222c2263616c6c223a7b7d7d"},  # an answer to a call {}
        {"garbage": encode_frame({"t": "hello", "protocol": 2}).hex()},
        {"garbage": encode_frame({"t": "ready", "vocab_size": 400}).hex()},
        {"garbage": encode_frame({"t": "refused", "why": "too late"}).hex()},
        {"row": [1, ["x"], None, None, None, None, None]},
        {"row": [1, [5], "for fun", None, None, None, None]},
        {"row": [1, [5], None, None, [], None, None]},
        {"row": [1, [5], None]},
        {"stats": {"kv_usage": float("nan")}},
    ],
    ids=str,
)
def test_a_worker_that_says_nonsense_is_ended_with_one_line(
    wrong: dict[str, Any], start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    built = start(**wrong)
    event = generated(built, greedy(5))[0]
    assert event.finish_reason is FinishReason.ERROR
    assert "something that is not a message" in str(event.error)
    (line,) = [each for each in caplog.records if "not a message" in each.getMessage()]
    assert line.exc_info is None and len(line.getMessage()) < 3000


def test_texts_of_a_worker_are_short_and_one_line(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    forged = "\ud800\x1b[2J\nERROR forged " + "x" * 10_000
    outputs = {"t": "outputs", "of": [[1, [], "error", None, None, forged, None]], "stats": None}
    event = generated(start(garbage=encode_frame(outputs).hex()), greedy(5))[0]
    assert str(event.error).startswith(r"\ud800\x1b[2J\nERROR forged xxx") and len(str(event.error)) < 3000
    event = generated(start(garbage=encode_frame({"t": "died", "why": forged}).hex()), greedy(5))[0]
    assert r"vLLM's worker has died: \ud800\x1b[2J\nERROR forged xxx" in str(event.error)
    assert all("\n" not in each.getMessage() and len(each.getMessage()) < 3000 for each in caplog.records)


def test_a_message_of_the_worker_that_is_cut_off_ends_it(start: Start) -> None:
    built = start(garbage="00000010000000007b", leaves=True)
    event = generated(built, greedy(5))[0]
    assert event.finish_reason is FinishReason.ERROR
    assert str(event.error) == "the engine died: vLLM's worker ended with status 3"


def test_a_request_of_many_answers_and_a_long_constraint_is_one_message_of_bounded_size(start: Start) -> None:
    """A message of more than 64 MiB would end the worker, and with it the answers of all other clients."""
    built = start(max_num_seqs=600)
    schema = json.dumps({"enum": [f"{number:0120}" for number in range(1000)]})  # in 600 messages more than 64 MiB
    events = run(asked(built, Constraint(ConstraintKind.JSON_SCHEMA, schema, "f"), max_tokens=1, n=600))
    assert {event.index for event in events} == set(range(600))
    assert all(event.error is None for event in events)


def test_a_request_that_is_too_long_for_a_message_ends_alone(start: Start) -> None:
    built = start(step_s=0.01)

    async def ask() -> None:
        other = asyncio.ensure_future(collect(built.engine, [EngineRequest(PROMPT, greedy(50))]))  # type: ignore[arg-type]
        long = EngineRequest(PROMPT, greedy(3, cache_salt=MAX_MESSAGE * "x"))
        event = (await collect(built.engine, [long]))[0]  # type: ignore[arg-type]
        assert isinstance(event.error, InvalidInput) and "bytes in a message to vLLM, at most" in str(event.error)
        assert (await other)[0].finish_reason is FinishReason.LENGTH

    run(ask())


def test_a_row_of_a_sequence_that_is_not_there_is_left_alone(start: Start) -> None:
    built = start(row=[999, [5], None, None, None, None, None], step_s=0.01)
    event = run(collect(built.engine, [EngineRequest(PROMPT, greedy(400), timeout_s=0.3)]))[0]  # type: ignore[arg-type]
    assert event.token_ids == ()


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        ({"t": "hello", "protocol": 1}, "a worker of protocol 1, not 2"),
        ({"t": "hello"}, "a worker of protocol None, not 2"),
        ({"t": "ready"}, "a worker of protocol None, not 2"),
        ({"t": "hello", "protocol": "1\n" * 10_000}, "a worker of protocol '1"),
    ],
    ids=["another", "none", "no hello", "a text"],
)
def test_a_worker_of_another_protocol_is_refused(
    hello: dict[str, Any], why: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WIRE_HELLO", json.dumps(hello))
    with pytest.raises(LoadFailed, match=f"something that is not a message: {why}") as failed:
        start()
    assert "\n" not in str(failed.value) and len(str(failed.value)) < 3000


@pytest.mark.parametrize("ready", [{"max_num_seqs": 0}, {"vocab_size": 1e300}, {"max_model_len": None}], ids=str)
def test_a_worker_that_is_ready_with_impossible_numbers_fails_the_load(ready: dict[str, Any], start: Start) -> None:
    with pytest.raises(LoadFailed, match="sent something that is not a message: a malformed 'ready' message: "):
        start(ready=ready)


def test_what_the_worker_refuses_fails_the_load(start: Start) -> None:
    with pytest.raises(LoadFailed, match=r"parameters\.extra\.vllm: unknown key 'x'; did you mean 'y'\?"):
        start(refuse="unknown key 'x'; did you mean 'y'?")


def test_the_worker_sees_no_setting_of_the_server_and_tells_nobody_of_itself(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLSERVER_TORCH_STREAM_API_KEYS_FILE", "/secret")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    environment = tmp_path / "environment"
    start({"threads": 1}, environment=str(environment))
    seen = json.loads(environment.read_text())
    assert not [name for name in seen if name.startswith("MLSERVER") or name == "MASTER_ADDR"]
    assert seen["VLLM_NO_USAGE_STATS"] == seen["DO_NOT_TRACK"] == "1"
    assert seen["VLLM_HOST_IP"] == "127.0.0.1"
    assert seen["VLLM_CPU_OMP_THREADS_BIND"] == str(min(os.sched_getaffinity(0)))
    assert not Path(seen["TMPDIR"]).exists() or Path(seen["TMPDIR"]) in Path(seen["VLLM_RPC_BASE_PATH"], "x").parents


def test_the_sockets_of_vllm_have_short_paths_in_a_long_temporary_directory(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = tmp_path / "environment"
    for name, inside in (("t", True), ("t" * 80, False)):
        place = Path(tempfile.mkdtemp(prefix=name, dir="/tmp"))
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        start(environment=str(environment))
        sockets = Path(json.loads(environment.read_text())["VLLM_RPC_BASE_PATH"])
        assert (place in sockets.parents) is inside
        assert len(f"{sockets}/{uuid4()}") <= 107


_SERVER = """
import sys
from mlserver_torch_stream.engine.vllm.messages import StartOrder
from mlserver_torch_stream.engine.vllm.sampling import as_lark
from mlserver_torch_stream.engine.vllm.vllm_process import WorkerCommand, VllmProcess
python, pids = sys.argv[1:]
worker = VllmProcess(WorkerCommand(python, StartOrder({"descendants": pids}), "worker"))
worker.ready.result()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.long
def test_nothing_of_the_worker_outlives_a_server_that_is_killed(tmp_path_factory: pytest.TempPathFactory) -> None:
    place = tmp_path_factory.mktemp("v")  # a short name: in a long one the worker's folder would be elsewhere
    pids = place / "pids"
    command = [sys.executable, "-c", _SERVER, str(interpreter(place)), str(pids)]
    environment = {**os.environ, "TMPDIR": str(place)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        worker, descendant = map(int, pids.read_text().split())
        assert alive(worker)
        assert alive(descendant)
        assert list(place.glob("vllm-*"))
        server.kill()
    end = time.monotonic() + 30
    while alive(worker) or alive(descendant) or list(place.glob("vllm-*")):
        assert time.monotonic() < end, "a process or its folder outlived the server"
        time.sleep(0.02)
    assert not Path(f"/dev/shm/wire-{worker}").exists()
    assert not Path(f"/dev/shm/__KMP_REGISTERED_LIB_{descendant}_0").exists()


def test_a_shutdown_leaves_no_process(start: Start, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    built = start(descendants=str(pids))
    worker, descendant = map(int, pids.read_text().split())
    assert built.give_back()
    built.shutdown()
    assert not alive(worker)
    assert not alive(descendant)


def test_prompts_in_pieces_wait_here_until_they_are_whole(start: Start) -> None:
    built = start()

    async def pieces() -> list[int]:
        stream = built.engine.submit([EngineRequest((), greedy(3), open=True)])
        stream.extend(PROMPT[:2])
        await asyncio.sleep(0.05)
        assert built.engine.stats().open_prompts == 1
        stream.seal(PROMPT)
        return [token for event in [event async for event in stream] for token in event.token_ids]

    assert run(pieces()) == answer(list(PROMPT), 3)


def test_a_model_in_a_gguf_file_and_a_missing_interpreter_fail_the_load_by_name(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(vllm_engine.ENV_PYTHON, raising=False)
    with pytest.raises(LoadFailed, match=r"parameters\.extra\.vllm: .*pip install vllm"):
        build_engine(parse_settings(str(tiny_model), {"vllm": {}}), resources=ProcessResources())
    (tmp_path / "a.gguf").touch()
    with pytest.raises(LoadFailed, match=r"parameters\.uri: vLLM does not serve GGUF files.*save_pretrained"):
        build_engine(parse_settings(str(tmp_path / "a.gguf"), {"vllm": {}}), resources=ProcessResources())


async def asked_adapter(built: BuiltEngine, name: str | None) -> list[TokenEvent]:
    stream = built.engine.submit([EngineRequest(PROMPT, greedy(3), adapter=name)])
    return [event async for event in stream]


def test_adapters_are_loaded_with_the_model_while_it_serves_and_with_the_next_worker(
    start: Start, tmp_path: Path
) -> None:
    record, pids = tmp_path / "record", tmp_path / "pids"
    modules = {"lora_modules": {"first": str(tmp_path)}}
    built = start(modules, enable_lora=True, record=str(record), descendants=str(pids))
    adapters = built.adapters
    assert adapters is not None
    assert built.engine.info.adapters == {"first"}

    async def change() -> None:
        await adapters.load("second", str(tmp_path))
        assert built.engine.info.adapters == adapters.names == {"first", "second"}
        for name in (None, "first", "second"):
            await asked_adapter(built, name)
        with pytest.raises(InvalidInput, match="lora_path: no adapter in /nowhere"):
            await adapters.load("third", "/nowhere")
        with pytest.raises(InvalidInput, match="'first' is loaded already"):
            await adapters.load("first", str(tmp_path))
        await replaced(built, pids)
        await asked_adapter(built, "second")
        await adapters.unload("first")
        with pytest.raises(UnknownModel):
            await adapters.unload("first")

    run(change())
    messages = [json.loads(line) for line in record.read_text().splitlines()]
    assert [each["adapter"] for each in messages if each["t"] == "add"] == [None, 1, 2, 2]
    assert [each["id"] for each in messages if each["t"] == "unload_adapter"] == [1]
    assert built.engine.info.adapters == {"second"}


def test_an_adapter_whose_folder_is_gone_is_unloaded_when_vllm_starts_again(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone, pids = tmp_path / "gone", tmp_path / "pids"
    gone.mkdir()
    modules = {"lora_modules": {"gone": str(gone), "kept": str(tmp_path)}}
    built = start(modules, enable_lora=True, descendants=str(pids))
    adapters: Any = built.adapters

    async def lose() -> None:
        gone.rmdir()
        await replaced(built, pids)
        assert built.engine.info.adapters == adapters.names == {"kept"} and adapters.numbers == {"kept": 2}
        with pytest.raises(InvalidInput, match="lora_name: the adapter 'gone' has been unloaded"):
            await asked_adapter(built, "gone")
        with pytest.raises(UnknownModel):
            await adapters.unload("gone")
        gone.mkdir()
        await adapters.load("gone", str(gone))
        for name in ("gone", "kept"):
            assert (await asked_adapter(built, name))[-1].finish_reason is FinishReason.LENGTH

    run(lose())
    (line,) = [each.getMessage() for each in caplog.records if "'gone' is unloaded" in each.getMessage()]
    assert line.endswith(f"no adapter in {gone}")


def test_an_adapter_that_cannot_be_loaded_with_the_model_fails_the_load(start: Start, tmp_path: Path) -> None:
    modules = {"lora_modules": {"a": str(tmp_path), "b": "/nowhere"}}
    with pytest.raises(LoadFailed, match=r"parameters\.extra\.lora_modules: 'b': no adapter in /nowhere"):
        start(modules, enable_lora=True)


def test_an_adapter_beside_the_weights_is_refused_unless_the_settings_name_it(
    start: Start, tiny_model: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(LoadFailed, match=r"adapter_config\.json belongs to an adapter, which vLLM does not apply"):
        start(folder=folder)
    built = start({"lora_modules": {"own": str(folder)}}, folder=folder, enable_lora=True)
    assert built.engine.info.adapters == {"own"}


def test_unloading_an_adapter_waits_for_its_streams(start: Start, tmp_path: Path) -> None:
    built = start({"lora_modules": {"a": str(tmp_path)}}, enable_lora=True, step_s=0.02)
    adapters = built.adapters
    assert adapters is not None

    async def unload() -> None:
        stream = built.engine.submit([EngineRequest(PROMPT, greedy(400), adapter="a")])
        await anext(stream)
        unloading = asyncio.ensure_future(adapters.unload("a"))
        await asyncio.sleep(0.1)
        assert adapters.names == set()
        assert not unloading.done()
        stream.close()
        await asyncio.wait_for(unloading, 30)

    run(unload())


def test_a_cancelled_load_of_an_adapter_is_undone_in_the_worker(start: Start, tmp_path: Path) -> None:
    record, gate = tmp_path / "record", tmp_path / "gate"
    built = start(enable_lora=True, record=str(record), load_gate=str(gate))
    adapters: Any = built.adapters

    async def cancel() -> None:
        for path in (str(tmp_path), "/nowhere"):
            loading = asyncio.ensure_future(adapters.load("a", path))
            await until(lambda path=path: record.exists() and path in record.read_text(), "the load in the worker")
            loading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await loading
            assert built.engine.info.adapters == adapters.names == set()
            with pytest.raises(InvalidInput, match="'a' is loaded already, or is being"):
                await adapters.load("a", str(tmp_path))
            gate.touch()
            await until(lambda: not adapters.numbers, "the end of the load")
            gate.unlink()
        gate.touch()
        await adapters.load("a", str(tmp_path))
        assert built.engine.info.adapters == {"a"}
        assert (await asked_adapter(built, "a"))[-1].finish_reason is FinishReason.LENGTH

    run(cancel())
    messages = [json.loads(line) for line in record.read_text().splitlines()]
    assert [(each["t"], each["id"]) for each in messages if "adapter" in each["t"]] == [
        *(("load_adapter", 1), ("unload_adapter", 1), ("load_adapter", 2), ("load_adapter", 3))
    ]


def test_a_cancelled_unload_of_an_adapter_goes_on_and_its_requests_are_answered(start: Start, tmp_path: Path) -> None:
    modules = {"lora_modules": {"a": str(tmp_path)}}
    built = start(modules, enable_lora=True, step_s=0.02, max_num_seqs=1)
    adapters: Any = built.adapters

    async def cancel() -> None:
        running = built.engine.submit([EngineRequest(PROMPT, greedy(400), adapter="a")])
        await anext(running)
        queued = [asyncio.ensure_future(asked_adapter(built, "a")) for _ in range(3)]
        await asyncio.sleep(0.05)
        unloading = asyncio.ensure_future(adapters.unload("a"))
        await asyncio.sleep(0.05)
        unloading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await unloading
        assert adapters.names == set() and adapters.numbers == {"a": 1}
        running.close()
        for events in await asyncio.gather(*queued):
            assert events[-1].finish_reason is FinishReason.LENGTH
        await until(lambda: not adapters.numbers, "the end of the unload")

    run(cancel())


def test_an_adapter_call_ends_with_the_worker(start: Start, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    built = start(enable_lora=True, descendants=str(pids), silent=True)
    adapters = built.adapters
    assert adapters is not None

    async def lose() -> None:
        loading = asyncio.ensure_future(adapters.load("a", str(tmp_path)))
        await asyncio.sleep(0.05)
        assert not loading.done()
        os.kill(int(pids.read_text().split()[0]), signal.SIGKILL)
        with pytest.raises(NotServing, match="vLLM's worker was killed by SIGKILL"):
            await asyncio.wait_for(loading, 30)
        assert adapters.names == set()
        await until(lambda: built.engine.trouble is None, "the next worker")

    run(lose())


def test_adapter_calls_after_the_end_of_a_worker_are_answered(start: Start, tmp_path: Path) -> None:
    built = start({"lora_modules": {"a": str(tmp_path)}}, enable_lora=True)
    ended: Any = built.engine._batcher  # type: ignore[attr-defined]
    ended._process.wait()
    with pytest.raises(NotServing, match="vLLM is being started again"):
        ended.load_adapter(Adapter("b", 2, str(tmp_path)))
    ended.close()
    assert ended.unload_adapter("a", 1).result(5) is None


def test_requests_before_an_unload_are_answered_and_later_ones_refused(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request and the unload of its adapter come while the engine's thread is in a step."""
    built = start({"lora_modules": {"a": str(tmp_path)}}, enable_lora=True)
    adapters: Any = built.adapters
    running: Any = built.engine._batcher  # type: ignore[attr-defined]
    admit, in_step, go_on = running._admit, threading.Event(), threading.Event()

    def wait_in_step(*args: Any) -> None:
        admit(*args)
        in_step.set()
        assert go_on.wait(30)

    async def ask_and_unload() -> None:
        monkeypatch.setattr(running, "_admit", wait_in_step)
        running._wake()
        await until(in_step.is_set, "a step")
        stream = built.engine.submit([EngineRequest(PROMPT, greedy(1), adapter="a")])
        unloading = asyncio.ensure_future(adapters.unload("a"))
        await until(lambda: not running._unloads.empty(), "the unload")
        with pytest.raises(InvalidInput, match="lora_name: the adapter 'a' has been unloaded"):
            built.engine.submit([EngineRequest(PROMPT, greedy(1), adapter="a")])
        go_on.set()
        (event,) = await last_events(stream)
        assert event.error is None
        await asyncio.wait_for(unloading, 30)

    run(ask_and_unload())


def test_a_prompt_in_pieces_whose_adapter_is_unloaded_is_refused(start: Start, tmp_path: Path) -> None:
    record = tmp_path / "record"
    modules = {"lora_modules": {"a": str(tmp_path)}}
    built = start(modules, enable_lora=True, record=str(record))
    adapters: Any = built.adapters

    async def seal() -> None:
        streams = [built.engine.submit([EngineRequest((), greedy(3), open=True, adapter="a")]) for _ in range(2)]
        numbers = dict(adapters.numbers)
        await adapters.unload("a")
        for stream in streams:
            stream.seal(PROMPT)
            (event,) = await last_events(stream)
            assert str(event.error) == "lora_name: the adapter 'a' has been unloaded"
            adapters.numbers = numbers  # as while the worker has not answered the unload yet

    run(seal())
    assert '"add"' not in record.read_text()


def test_a_shutdown_while_vllm_starts_again_leaves_no_worker(start: Start, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    built = start(descendants=str(pids), start_s=1)
    first = pids.read_text()
    os.kill(int(first.split()[0]), signal.SIGKILL)
    run(until(lambda: pids.read_text() not in ("", first), "the next worker"))
    assert built.give_back()
    built.shutdown()
    assert not any(map(alive, map(int, pids.read_text().split())))


def test_adapters_need_vllm_with_adapters(tiny_model: Path) -> None:
    for vllm in (None, {}, {"enable_lora": False}):
        with pytest.raises(SettingsError, match=r"parameters\.extra\.lora_modules: adapters need"):
            parse_settings(str(tiny_model), {"vllm": vllm, "lora_modules": {"a": "b"}})


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"device_map": "auto"}, "device_map has no meaning to vLLM"),
        ({"fast_path": "off"}, "fast_path has no meaning to vLLM"),
        ({"step_target": 100}, "step_target has no meaning to vLLM"),
        ({"weights": "int8"}, "weights has no meaning to vLLM"),
        ({"vllm": {"model": "x"}}, "parameters.uri names the model"),
        ({"vllm": {"load_format": "pt"}}, "load_format 'pt' reads pickles"),
        ({"vllm": {"load_format": "AUTO"}}, "load_format 'AUTO' reads pickles"),
        ({"vllm": {"max_num_seqs": 4}, "max_num_seqs": 32}, "max_num_seqs is 4, but .*max_num_seqs is 32"),
        ({"vllm": {"trust_remote_code": True}, "trust_remote_code": False}, "trust_remote_code is True, but .* False"),
        ({"vllm": {"revision": "a"}, "revision": "b"}, "revision is 'a', but .*revision is 'b'"),
        ({"vllm": {"max_num_seqs": 4}, "max_num_seqs": 5}, "max_num_seqs is 4, but parameters.extra.max_num_seqs is 5"),
    ],
    ids=str,
)
def test_settings_that_do_not_go_with_vllm_are_refused_by_name(
    extra: dict[str, Any], message: str, tiny_model: Path
) -> None:
    with pytest.raises(SettingsError, match=rf"parameters\.extra\.vllm: {message}"):
        parse_settings(str(tiny_model), {"vllm": {}, **extra})


def test_settings_of_ours_become_engine_arguments(tiny_model: Path) -> None:
    ours = {"max_model_len": 64, "kv_cache_memory": "1MiB", "dtype": "float16", "tensor_parallel_size": 2}
    resolved = parse_settings(str(tiny_model), {"vllm": {"quantization": "awq"}, **ours})
    args = vllm_engine.engine_args(resolved.settings, "folder")
    assert args == {
        "scheduling_policy": "priority",
        "disable_log_stats": True,
        "load_format": "safetensors",
        "max_model_len": 64,
        "kv_cache_memory_bytes": 2**20,
        "dtype": "float16",
        "tensor_parallel_size": 2,
        "quantization": "awq",
        "model": "folder",
        "structured_outputs_config": {"backend": "guidance"},
    }


def test_arguments_that_the_server_needs_too_become_settings(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    vllm = {"revision": "v1", "trust_remote_code": True, "tokenizer": "words", "dtype": "half"}
    settings = parse_settings(str(tiny_model), {"vllm": vllm, "revision": "v1"}, source_folder=str(tmp_path)).settings
    words = str(tmp_path / "words")
    assert (settings.revision, settings.trust_remote_code, settings.tokenizer) == ("v1", True, words)
    args = vllm_engine.engine_args(settings, "folder")
    assert (args["revision"], args["trust_remote_code"], args["tokenizer"]) == ("v1", True, words)
    assert args["dtype"] == "half"
    assert vllm.keys() == {"revision", "trust_remote_code", "tokenizer", "dtype"}  # the caller's own object


def test_adapters_may_be_hub_ids_with_their_scheme(tiny_model: Path) -> None:
    modules = {"a": "hf://org/name", "b": "org/name"}
    settings = parse_settings(str(tiny_model), {"vllm": {"enable_lora": True}, "lora_modules": modules}).settings
    assert settings.lora_modules == {"a": "org/name", "b": "org/name"}


@pytest.mark.parametrize(("given", "kept"), [({}, 128), ({"max_loras": 200}, 200), ({"max_cpu_loras": 3}, 3)])
def test_all_adapters_stay_in_memory(given: dict[str, int], kept: int, tiny_model: Path) -> None:
    resolved = parse_settings(str(tiny_model), {"vllm": {"enable_lora": True, **given}})
    assert vllm_engine.engine_args(resolved.settings, "folder")["max_cpu_loras"] == kept


def test_cores_are_divided_among_the_ranks() -> None:
    assert bound_cores([0, 1, 2, 3], 2) == "0,1|2,3"
    assert bound_cores([4, 6], 1) == "4,6"
    assert bound_cores([1], 2) == "nobind"


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ({"tensor_parallel_size": 2}, 2),
        ({"pipeline_parallel_size": 2}, 2),
        ({"data_parallel_size": 2}, 2),
        ({"tensor_parallel_size": None, "data_parallel_size": "2"}, 1),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, 1),
        ({"data_parallel_size": 2, "data_parallel_backend": "ray"}, 1),
    ],
    ids=str,
)
def test_each_rank_of_this_machine_has_its_share_of_the_cores(
    sizes: dict[str, Any], ranks: int, start: Start, tmp_path: Path
) -> None:
    environment = tmp_path / "environment"
    start({"threads": 2}, environment=str(environment), **sizes)
    cores = sorted(os.sched_getaffinity(0))[:2]
    assert json.loads(environment.read_text())["VLLM_CPU_OMP_THREADS_BIND"] == bound_cores(cores, ranks)


def test_a_load_that_is_cancelled_ends_its_worker(start: Start, tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    async def cancel() -> None:
        cancellation = Cancellation()
        loading = in_thread(lambda: start(descendants=str(pids), start_s=60), cancellation)
        await until(pids.exists, "the worker")
        cancellation.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading

    run(cancel())
    assert not any(map(alive, map(int, pids.read_text().split())))


@pytest.mark.parametrize(
    ("version", "python", "message"),
    [
        ("", (3, 11), "vllm is not installed for"),
        ("0.29.1", (3, 11), r"vLLM 0\.29\.1 is not a version .* supports: 0\.30, 0\.31, 0\.32"),
        ("0.33.0", (3, 11), r"vLLM 0\.33\.0 is not"),
        ("0.32.0", (3, 9), r"Python 3\.9 is not supported; .* must be Python 3\.10 to 3\.13"),
        ("0.32.0", (3, 14), r"Python 3\.14 is not"),
    ],
)
def test_another_vllm_or_python_is_refused_before_it_is_imported(
    version: str, python: tuple[int, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_version", lambda: version)
    monkeypatch.setattr(worker, "_python", lambda: python)
    with pytest.raises(worker.StartRefused, match=message):
        worker._start(StartOrder({}), worker.Steps())


@pytest.mark.parametrize(
    ("args", "adapters", "expected"),
    [
        ({}, 0, {"max_loras": 5}),
        ({}, 7, {"max_loras": 8}),
        ({"max_loras": 2}, 2, {"max_loras": 3}),
        ({"max_loras": 2, "max_cpu_loras": 2}, 0, {"max_loras": 3, "max_cpu_loras": 3}),
        ({"max_loras": 2, "max_cpu_loras": 9}, 0, {"max_loras": 3, "max_cpu_loras": 9}),
    ],
)
def test_on_cpus_one_place_for_adapters_stays_empty(
    args: dict[str, int], adapters: int, expected: dict[str, int]
) -> None:
    assert worker.with_an_empty_slot(args, adapters) == expected
