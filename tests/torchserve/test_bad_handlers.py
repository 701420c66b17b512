"""All errors of handlers: the client or the operator gets a clear reason, and the next request is served."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from mlserver import ModelSettings
from mlserver.settings import ModelParameters

from mlserver_torch_stream import TorchServeRuntime
from mlserver_torch_stream.errors import LoadFailed
from mlserver_torch_stream.handlers.pool.handler_request import HandlerFailed
from mlserver_torch_stream.handlers.pool.worker_pool import WorkerPool
from mlserver_torch_stream.server.status import ModelNotLoaded
from tests.torchserve.workshop import ask, outcome, request, run, running, until, write_handler

_CLASS = "class {}:\n    def initialize(self, context): ...\n    def handle(self, data, context): return [1]\n"


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise RuntimeError('at import')", "importing handler.py raised RuntimeError: at import"),
        ("import sys; sys.exit(3)", "importing handler.py raised SystemExit: 3"),
        ("def handle(: pass", "importing handler.py raised SyntaxError"),
        (_CLASS.format("One") + _CLASS.format("Two"), "exactly one class .*it has One, Two"),
        ("x = 1", "exactly one class .*it defines neither a class nor a function"),
        ("class Mine:\n    def handle(self, data, context): ...", "its class Mine has no initialize"),
        ("class Mine: ...\nclass More: ...", "its class Mine has no initialize and no handle; More has no initialize"),
        ("def predict(data, context): ...", "has no class, and the functions predict: name one as handler.py:predict"),
        ("raise KeyboardInterrupt('at import')", "importing handler.py raised KeyboardInterrupt: at import"),
        (
            "class Mute(Exception):\n    def __str__(self): raise ValueError\nraise Mute",
            r"importing handler.py raised Mute: \(its __str__ raised ValueError\)",
        ),
        ("raise RuntimeError('lone \\ud800')", r"importing handler.py raised RuntimeError: lone \\ud800"),
        (_CLASS.format("One").replace("...", "raise ValueError('no weights')"), "initialize raised ValueError: no wei"),
        ("import os; os._exit(7)", "exited with status 7 before it was ready"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV before it was ready"),
        ("import time; time.sleep(600)", "not ready within 1 s"),
        (
            "from ts.handler_utils.micro_batching import MicroBatching",
            r"importing handler.py raised ModuleNotFoundError: .*micro_batching.*install mlserver-torch-stream",
        ),
    ],
)
def test_a_handler_that_cannot_be_loaded_fails_the_load_with_the_reason(tmp_path: Path, source: str, said: str) -> None:
    config = {"startupTimeout": 1} if "sleep" in source else {}

    others = set(psutil.Process().children())  # a server of other tests has children that come and go

    async def scenario() -> None:
        with pytest.raises(LoadFailed, match=said):
            async with running(write_handler(tmp_path, source, config)):
                pass
        assert set(psutil.Process().children()) <= others  # no process of the worker is left

    run(scenario())


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        ("handler.py:missing", "has no function 'missing'"),
        ("text_classifier", r"is in the torchserve package: install mlserver-torch-stream\[torchserve-handlers\]"),
        ("nowhere.py", "no handler 'nowhere.py' in the archive, nor in TorchServe, which has base_handler, dali_im"),
    ],
)
def test_a_handler_that_is_not_there_is_refused_by_name(tmp_path: Path, handler: str, said: str) -> None:
    (tmp_path / "handler.py").write_text("x = 1")
    _refused(tmp_path, handler, "shim", said)


def _refused(tmp_path: Path, handler: str, which: str, said: str) -> None:
    (tmp_path / "MAR-INF").mkdir()
    (tmp_path / "MAR-INF/MANIFEST.json").write_text(json.dumps({"model": {"modelName": "m", "handler": handler}}))

    async def scenario() -> None:
        with pytest.raises(LoadFailed, match=said):
            async with running(str(tmp_path), which):
                pass

    run(scenario())


@pytest.mark.long
def test_a_handler_of_torchserves_whose_libraries_are_missing_or_broken_is_refused_with_the_reason(
    tmp_path: Path,
) -> None:
    """The last case is torchvision's wheel for GPUs beside a torch for CPUs."""
    for handler, module, install in (
        ("trt_llm_handler", "tensorrt_llm", "tensorrt_llm"),
        ("vllm_handler", "vllm", "vllm==0.6"),
    ):
        (tmp_path / handler).mkdir()
        _refused(tmp_path / handler, handler, "package", f"module that is missing, {module}: .* and {install}")
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    _refused(tmp_path, "image_classifier", "package", "imported: RuntimeError: operator torchvision::nms does")


_WRONG = """
import os, sys, time
from ts.handler_utils.utils import send_intermediate_predict_response
from ts.service import PredictionException

class Mute(Exception):
    def __str__(self):
        raise ValueError("no text")

def handle(data, context):
    if data is None:
        return None
    def send(value):
        send_intermediate_predict_response([value], context.request_ids, "ok", 200, context)
    what = data[0]["body"].decode()
    if what == "fine":
        return ["fine"]
    if what == "raise before":
        raise ValueError("before the first piece")
    if what == "raise after":
        send("first")
        raise ValueError("after the first piece")
    if what == "prediction":
        raise PredictionException("not this one", 418)
    if what == "not found":
        raise PredictionException("not here", 404)
    if what == "memory":
        raise MemoryError
    if what == "cuda":
        raise RuntimeError("CUDA out of memory. Tried to allocate")
    if what == "exit":
        sys.exit(1)
    if what == "interrupt":
        raise KeyboardInterrupt("not an Exception")
    if what == "mute":
        raise Mute
    if what == "surrogate":
        raise ValueError("lone \\ud800 surrogate")
    if what == "no ids":
        context.request_ids.clear()
        return ["nobody's"]
    if what == "odd status":
        context.set_response_status("soon", "", 0)
        return ["fine"]
    if what == "too many":
        return ["a", "b"]
    if what == "no list":
        return "text"
    if what == "unserialisable":
        return [object()]
    if what == "unserialisable piece":
        send(object())
        return ["end"]
    if what == "status":
        context.set_response_status(429, "slow down", 0)
        return ["too fast"]
    if what == "die":
        send("first")
        os._exit(9)
    if what == "hang":
        send("first")
        time.sleep(600)
    if what == "write":
        lines = ("x" * 200 + "\\n") * 5000
        for _ in range(64):
            sys.stdout.write(lines)
        return ["written"]
    if what == "fork":
        if os.fork() == 0:
            send("from the child")
            return ["from the child"]
        return ["from the parent"]
    if what == "fork and stay":
        if os.fork() == 0:
            time.sleep(600)
        return ["from the parent"]
"""


async def _fine(pool: WorkerPool) -> None:
    assert await ask(pool, "fine") == ["fine"]


@pytest.mark.parametrize("which", ["shim", pytest.param("package", marks=pytest.mark.slow)])
def test_each_wrong_request_is_told_why_and_the_next_one_is_served(tmp_path: Path, which: str) -> None:
    expected = {
        "raise before": (503, "the handler raised ValueError: before the first piece"),
        "prediction": (418, "not this one"),
        "not found": (422, "not here"),
        "memory": (507, "the handler raised MemoryError"),
        "cuda": (507, "CUDA out of memory"),
        "exit": (503, "the handler raised SystemExit: 1"),
        "interrupt": (503, "the handler raised KeyboardInterrupt: not an Exception"),
        "mute": (503, "the handler raised Mute: (its __str__ raised ValueError)"),
        "surrogate": (503, "the handler raised ValueError: lone \\ud800 surrogate"),
        "odd status": (503, "the handler's result cannot be sent: ValueError: invalid literal"),
        "too many": (503, "the handler returned 2 results for 1 requests"),
        "no list": (503, "the handler returned a str instead of a list"),
        "unserialisable": (503, "Unsupported model output data type."),
        "unserialisable piece": (503, "Unsupported model output data type."),
        "status": (429, "too fast"),
    }

    async def scenario() -> None:
        async with running(write_handler(tmp_path, _WRONG), which) as pool:
            for text, (status, said) in expected.items():
                failed = await outcome(pool.submit(request(text)))
                assert isinstance(failed, HandlerFailed), text
                assert (failed.status, said in failed.message) == (status, True), failed.message
                await _fine(pool)
            assert await ask(pool, "no ids") == ["nobody's"]
            await _fine(pool)
            job = pool.submit(request("raise after"))
            assert (await anext(job)).value == b"first"
            with pytest.raises(HandlerFailed, match="after the first piece"):
                await anext(job)
            await _fine(pool)
            assert pool.supervisor.restarts == 0  # none of it ended the worker

    run(scenario())


@pytest.mark.parametrize("how", ["continuousBatching", "asyncCommunication"])
def test_no_exception_and_no_change_of_the_context_ends_the_worker_in_other_modes(tmp_path: Path, how: str) -> None:
    source = """
        class Handler:
            def initialize(self, context): ...
            PREFIX def handle(self, data, context):
                what = data[0]["body"].decode()
                if what == "interrupt":
                    raise KeyboardInterrupt("not an Exception")
                if what == "no ids":
                    context.request_ids.clear()
                if what == "odd status":
                    context.set_response_status("soon", "", 0)
                return ["fine"]
    """.replace("PREFIX def", "async def" if how == "asyncCommunication" else "def")

    async def scenario() -> None:
        async with running(write_handler(tmp_path, source, {how: True})) as pool:
            for text, said in (("interrupt", "KeyboardInterrupt: not an Exception"), ("odd status", "cannot be sent")):
                failed = await outcome(pool.submit(request(text)))
                assert isinstance(failed, HandlerFailed) and said in failed.message
                await _fine(pool)
            assert await ask(pool, "no ids") == ["fine"]
            await _fine(pool)
            assert pool.supervisor.restarts == 0

    run(scenario())


def test_a_worker_that_dies_fails_its_own_requests_and_is_started_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(write_handler(tmp_path, _WRONG, {"minWorkers": 2})) as pool:
            first = {place.worker.pids[0] for place in pool.supervisor.slots if place.worker}
            dies = pool.submit(request("die"))
            assert (await anext(dies)).value == b"first"
            with pytest.raises(HandlerFailed, match=r"^model worker [01] exited with status 9"):
                await anext(dies)
            await _fine(pool)
            await until(lambda: len(pool.supervisor.ready) == 2)
            assert {place.worker.pids[0] for place in pool.supervisor.slots if place.worker} != first
            await asyncio.gather(*(_fine(pool) for _ in range(4)))

    run(scenario())


def test_the_time_before_a_worker_is_started_again_grows_only_where_it_answers_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(write_handler(tmp_path, _WRONG)) as pool:
            (place,) = pool.supervisor.slots
            delays = []
            for text in ("die", "die", "fine", "die"):
                await outcome(pool.submit(request(text)))
                await until(lambda: place.ready)
                delays.append(place.delay_s)
            assert delays == [0.2, 0.4, 0.4, 0.2]

    run(scenario())


@pytest.mark.long
def test_a_handler_that_never_returns_is_ended_after_its_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(write_handler(tmp_path, _WRONG, {"responseTimeout": 2})) as pool:
            hangs = pool.submit(request("hang"))
            assert (await anext(hangs)).value == b"first"
            waits = pool.submit(request("fine", "waits"))
            ended = await outcome(hangs)
            assert getattr(ended, "status", None) == 504 and "responseTimeout" in str(ended)
            assert await outcome(waits) == ["fine"]

    run(scenario())


def test_output_without_end_stops_no_handler_and_the_lines_that_are_dropped_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It writes 64 MB within its `responseTimeout`: the log has a few hundred lines, and counts the others."""
    caplog.set_level(logging.INFO)

    def counted() -> int:
        said = [re.search(r": (\d+) more lines dropped", record.getMessage()) for record in caplog.records]
        return sum(int(match[1]) for match in said if match)

    def kept() -> int:
        return sum("x" * 200 in record.getMessage() for record in caplog.records)

    async def scenario() -> None:
        async with running(write_handler(tmp_path, _WRONG, {"responseTimeout": 60})) as pool:
            assert await ask(pool, "write") == ["written"]
            await until(lambda: counted() + kept() >= 320_000)  # also while nothing more is written
            await _fine(pool)
            assert pool.supervisor.restarts == 0

    run(scenario())
    assert 0 < kept() < 5_000
    assert counted() + kept() == 320_000


_STEERS = """
import sys
sys.stdout.buffer.write(b"\\x1b[31mred\\tand \\xff 10%\\r20%\\xc2\\x9b2J\\xe2\\x80\\xae\\r\\n")
sys.stdout.flush()
"""


def test_what_a_handler_prints_steers_no_terminal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        async with running(write_handler(tmp_path, _STEERS + "def handle(data, context): return data")):
            await until(lambda: "red" in caplog.text)

    run(scenario())
    (line,) = [record.getMessage() for record in caplog.records if "red" in record.getMessage()]
    assert line == r"model worker 0: \x1b[31mred" + "\t" + r"and \xff 10%\r20%\x9b2J\u202e"


def test_why_a_handler_cannot_be_loaded_is_one_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uri = write_handler(tmp_path, r"raise ValueError('\x1b[2Jgone\nforged \ud800')")
    settings = ModelSettings(name="m", implementation=TorchServeRuntime, parameters=ModelParameters(uri=uri))
    with pytest.raises(ModelNotLoaded):
        run(TorchServeRuntime(settings).load())
    said = [each.getMessage() for each in caplog.records if "Cannot load" in each.getMessage()]
    assert said == [r"Cannot load model 'm': importing handler.py raised ValueError: \x1b[2Jgone\nforged \ud800"]


def test_a_handler_that_forks_answers_once_and_its_children_end_with_it(tmp_path: Path) -> None:
    async def scenario() -> list[psutil.Process]:
        async with running(write_handler(tmp_path, _WRONG)) as pool:
            assert await ask(pool, "fork") == ["from the parent"]
            assert await ask(pool, "fork and stay") == ["from the parent"]
            await _fine(pool)
            worker = pool.supervisor.slots[0].worker
            assert worker is not None
            children: list[psutil.Process] = psutil.Process(worker.pids[0]).children(recursive=True)
            assert children
            return children

    _, alive = psutil.wait_procs(run(scenario()), timeout=20)
    assert not alive


def test_a_worker_that_cannot_be_started_again_makes_the_model_not_ready(tmp_path: Path) -> None:
    """The start is retried until the worker is ready."""
    source = """
        import os, pathlib
        if pathlib.Path("broken").exists():
            raise RuntimeError("broken now")

        def handle(data, context):
            if data is not None and data[0]["body"] == b"die":
                os._exit(1)
            return ["fine"]
    """

    async def scenario() -> None:
        async with running(write_handler(tmp_path, source)) as pool:
            (tmp_path / "broken").touch()
            dies = await outcome(pool.submit(request("die")))
            assert isinstance(dies, HandlerFailed)
            waits = pool.submit(request("fine"))
            assert getattr(await outcome(waits), "status", None) == 503
            assert pool.trouble is not None and "broken now" in pool.trouble
            (tmp_path / "broken").unlink()
            await until(lambda: pool.trouble is None)
            await _fine(pool)

    run(scenario())


_SERVER = """
import asyncio, sys
from tests.torchserve.workshop import request, running

async def main(uri, asked):
    async with running(uri) as pool:
        pool.submit(request(asked))
        await asyncio.sleep(3600)

asyncio.run(main(*sys.argv[1:]))
"""
_DEAF = """
import os, time
from ts.handler_utils.utils import send_intermediate_predict_response

def note():
    open("pid.new", "w").write(str(os.getpid()))
    os.rename("pid.new", "pid")

def handle(data, context):
    if data is None:
        if "IN_INIT" in globals():
            note()
            time.sleep(3600)
        return None
    note()
    while True:
        try:
            send_intermediate_predict_response(["x" * 65536], context.request_ids, "ok", 200, context)
        except Exception:
            time.sleep(0.01)
"""


@pytest.mark.long
@pytest.mark.parametrize("source", [_DEAF, "IN_INIT = True\n" + _DEAF])
def test_no_worker_outlives_a_server_that_is_killed(tmp_path: Path, source: str) -> None:
    """This includes a worker whose messages the server has not read, and one that does not read messages yet."""
    uri = write_handler(tmp_path, source)
    with subprocess.Popen([sys.executable, "-c", _SERVER, uri, ""], stdout=subprocess.DEVNULL) as server:
        try:
            run(until((tmp_path / "pid").exists))
            worker = psutil.Process(int((tmp_path / "pid").read_text()))
            time.sleep(0.3)  # it is in the midst of it
        finally:
            server.kill()
    try:
        worker.wait(20)
    finally:
        if worker.is_running():
            worker.kill()


_SLOW_TO_DIE = """
import os, pathlib, subprocess, time

starts = pathlib.Path("starts")
number = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (number + 1))

def handle(data, context):
    if data is None:
        if number == 1:
            for descriptor in os.listdir("/proc/self/fd"):
                if int(descriptor) > 2:
                    try:
                        os.set_inheritable(int(descriptor), True)
                    except OSError:
                        pass
            subprocess.Popen(["sleep", "0.6"], start_new_session=True, close_fds=False)
            raise RuntimeError("not yet")
        if number == 2:
            time.sleep(1.5)
        return None
    if data[0]["body"] == b"die":
        os._exit(1)
    return [str(number)]
"""


@pytest.mark.long
def test_a_worker_whose_end_is_noticed_late_does_not_stop_the_one_after_it(tmp_path: Path) -> None:
    """The second worker refuses, and one of its processes keeps its connection while the third worker loads."""

    async def scenario() -> None:
        async with running(write_handler(tmp_path, _SLOW_TO_DIE)) as pool:
            assert isinstance(await outcome(pool.submit(request("die"))), HandlerFailed)
            await until(lambda: pool.trouble is not None)
            await until(lambda: len(pool.supervisor.ready) == 1)
            assert await ask(pool) == ["2"]

    run(scenario())
