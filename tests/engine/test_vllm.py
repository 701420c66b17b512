"""vLLM's side of the wire is a second worker here: what is promised of a stream holds whatever the worker does."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlserver_torch_stream.engine.api import EngineRequest
from mlserver_torch_stream.engine.build import BuiltEngine, build_engine
from mlserver_torch_stream.engine.shared_pool import ProcessResources
from mlserver_torch_stream.engine.vllm import vllm_engine
from mlserver_torch_stream.errors import InvalidInput, LoadFailed, NotServing, QueueFull
from mlserver_torch_stream.generation import Generator
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
from tests.engine.tiny import collect, run, until
from tests.engine.wire_worker import CONTEXT, answer, interpreter

PROMPT = (40, 41, 42)

Start = Callable[..., BuiltEngine]


@pytest.fixture
def start(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Builds an engine over the second worker; its arguments are keys of ``vllm``, and ``extra`` has other settings."""
    monkeypatch.setattr(vllm_engine, "_DELAYS_S", (0.01,))
    python = interpreter(tmp_path)
    started: list[BuiltEngine] = []

    def build(extra: dict[str, Any] | None = None, on_death: Any = None, **vllm: Any) -> BuiltEngine:
        settings = {"vllm": {"marks": str(tmp_path), **vllm}, "vllm_python": str(python), **(extra or {})}
        built = build_engine(parse_settings(str(tiny_model), settings), "", on_death, ProcessResources())
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
    """The events of a prompt of text, through the tokenizer and the compiler of constraints."""
    streams: list[Any] = []
    generator = Generator(built.engine, built.codec, built.engine.info)
    request = GenerationRequest("r", (TextPrompt("abc"),), SamplingParameters(**params), constraint=constraint)
    await generator.start(request, streams.append)
    return [event async for event in streams[0]]


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


def test_each_answer_of_n_is_a_sequence_of_the_worker_with_a_seed_of_its_own(start: Start, tmp_path: Path) -> None:
    record = tmp_path / "record"
    events = generated(
        start(record=str(record)), greedy(4, n=3, temperature=1.0, seed=7, logprobs=True, top_logprobs=2)
    )
    assert sorted(events) == [0, 1, 2]
    assert {tuple(event.token_ids) for event in events.values()} == {tuple(answer(list(PROMPT), 4))}
    first = events[0].logprobs[0]
    assert (first.logprob, [value for _, value in first.top]) == (-0.5, [-0.5, -1.5])
    assert events[0].cumulative_logprob == -2.0
    requests = json.loads(record.read_text().splitlines()[0])["requests"]
    assert [each["params"]["seed"] for each in requests] == [7, 8, 9]


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
    (request,) = json.loads(record.read_text().splitlines()[0])["requests"]
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


def test_a_stop_string_ends_the_answer_here_and_the_sequence_in_the_worker(start: Start, tmp_path: Path) -> None:
    record = tmp_path / "record"
    built = start(record=str(record), step_s=0.02)
    text = built.codec.decode(answer(list(PROMPT), 3), True)
    event = generated(built, greedy(400, stop=(text[2:],)))[0]
    assert (event.text, event.finish_reason, event.stop_reason) == (text[:2], FinishReason.STOP, text[2:])
    run(until(lambda: '"abort"' in record.read_text(), "the abort"))
    assert built.engine.load == 0


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
    (request,) = json.loads(record.read_text().splitlines()[0])["requests"]
    grammar = any_to_lark(request["grammar"])  # as vLLM reads it
    assert grammar == request["grammar"]
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar)) == ""
    assert request["params"]["stop_token_ids"] == [1]  # the end token of the tokenizer, after the constraint


def test_what_vllm_lacks_is_refused_by_name(start: Start) -> None:
    built = start()
    for params, field in ((greedy(1, typical_p=0.5), "typical_p"), (greedy(1, temperature=2.5), "temperature")):
        with pytest.raises(InvalidInput, match=rf"{field}: .*vLLM"):
            generated(built, params)
    with pytest.raises(InvalidInput, match=r"n: 9 sequences are more than the 8 allowed"):
        generated(built, greedy(1, n=9))


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
        await until(lambda: record.read_text().count('"prompt"') == 5, "the fifth in the worker")
        streams += [built.engine.submit([EngineRequest(PROMPT, greedy(400))]) for _ in range(3)]
        await until(lambda: built.engine.stats().waiting_requests >= 3, "the queue")
        with pytest.raises(QueueFull):
            for _ in range(2):
                streams.append(built.engine.submit([EngineRequest(PROMPT, greedy(1))]))
        assert record.read_text().count('"prompt"') == 5
        assert built.engine.stats().running_sequences == 4
        for stream in streams:
            stream.close()
        await until(lambda: built.engine.load == 0, "the end of all")

    run(fill())


def test_a_timeout_ends_a_running_sequence_with_its_text(start: Start) -> None:
    built = start(step_s=0.02)
    request = EngineRequest(PROMPT, greedy(400), timeout_s=0.3)
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
    """No process of the old worker is left when the new one starts, nor its folder or its shared memory."""
    pids = tmp_path / "pids"
    built = start(descendants=str(pids), step_s=0.02)
    worker, descendant = map(int, pids.read_text().split())
    assert Path(f"/dev/shm/wire-{worker}").exists()

    async def outlive() -> None:
        streams = [built.engine.submit([EngineRequest(PROMPT, greedy(400, n=2))]) for _ in range(3)]
        for stream in streams:
            await anext(stream)
        os.kill(worker, signal.SIGKILL)
        ends = []
        for stream in streams:
            ends.append([event async for event in stream if event.finish_reason is not None])
        assert [[event.finish_reason for event in each] for each in ends] == 3 * [2 * [FinishReason.ERROR]]
        assert "vLLM's worker was killed by SIGKILL" in str(ends[0][0].error)
        await until(lambda: built.engine.trouble is None, "the next worker")
        assert not alive(worker)
        assert not alive(descendant)
        assert not Path(f"/dev/shm/wire-{worker}").exists()
        again = await collect(built.engine, [EngineRequest(PROMPT, greedy(3))])  # type: ignore[arg-type]
        assert list(again[0].token_ids) == answer(list(PROMPT), 3)

    run(outlive())


def test_an_engine_that_is_starting_again_says_so(start: Start) -> None:
    built = start(die_after=1, start_s=0.5)

    async def refused() -> None:
        event = (await collect(built.engine, [EngineRequest(PROMPT, greedy(9))]))[0]  # type: ignore[arg-type]
        assert event.finish_reason is FinishReason.ERROR
        assert built.engine.trouble == "vLLM is being started again"
        with pytest.raises(NotServing, match="vLLM is being started again"):
            built.engine.submit([EngineRequest(PROMPT, greedy(1))])
        await until(lambda: built.engine.trouble is None, "the next worker")

    run(refused())


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


def test_a_worker_that_hangs_is_killed_and_started_again(start: Start) -> None:
    built = start({"step_timeout": 0.6}, hang_after=2)

    async def hang() -> None:
        event = (await collect(built.engine, [EngineRequest(PROMPT, greedy(9))]))[0]  # type: ignore[arg-type]
        assert event.finish_reason is FinishReason.ERROR
        assert "has not come back" in str(event.error)
        assert len(event.token_ids) == 2
        await until(lambda: built.engine.trouble is None, "the next worker")
        assert built.engine.alive
        again = await collect(built.engine, [EngineRequest(PROMPT, greedy(9))])  # type: ignore[arg-type]
        assert again[0].finish_reason is FinishReason.LENGTH

    run(hang())


@pytest.mark.parametrize(
    "wrong",
    [
        {"garbage": "ffffffff00000000"},  # a header of 4 GiB
        {"garbage": "00000004000000007b7d7d7d"},  # not JSON
        {"garbage": "00000008000000007b2274223a20317d"},  # a message of kind 1
        {"row": [1, ["x"], None, None, None, None, None]},
        {"row": [1, [5], "for fun", None, None, None, None]},
        {"row": [1, [5], None, None, [], None, None]},
        {"row": [1, [5], None]},
    ],
    ids=str,
)
def test_a_worker_that_says_nonsense_is_ended(wrong: dict[str, Any], start: Start) -> None:
    built = start(**wrong)
    event = generated(built, greedy(5))[0]
    assert event.finish_reason is FinishReason.ERROR
    assert "something that is no message" in str(event.error)


def test_a_row_of_a_sequence_that_is_not_there_is_left_alone(start: Start) -> None:
    built = start(row=[999, [5], None, None, None, None, None], step_s=0.01)
    event = run(collect(built.engine, [EngineRequest(PROMPT, greedy(400), timeout_s=0.3)]))[0]  # type: ignore[arg-type]
    assert event.token_ids == ()


def test_a_worker_of_another_protocol_is_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WIRE_PROTOCOL", "2")
    with pytest.raises(LoadFailed, match="a worker of protocol 2, not 1"):
        start()


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


_SERVER = """
import sys
from mlserver_torch_stream.engine.build import build_engine
from mlserver_torch_stream.settings import parse_settings
folder, python, pids = sys.argv[1:]
build_engine(parse_settings(folder, {"vllm": {"descendants": pids}, "vllm_python": python}))
print("ready", flush=True)
sys.stdin.read()
"""


def test_nothing_of_the_worker_outlives_a_server_that_is_killed(tiny_model: Path, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    command = [sys.executable, "-c", _SERVER, str(tiny_model), str(interpreter(tmp_path)), str(pids)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        worker, descendant = map(int, pids.read_text().split())
        assert alive(worker)
        assert alive(descendant)
        server.kill()
    end = time.monotonic() + 30
    while alive(worker) or alive(descendant) or Path(f"/dev/shm/wire-{worker}").exists():
        assert time.monotonic() < end, "a process or its shared memory outlived the server"
        time.sleep(0.02)


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
