"""vLLM's worker with a server that breaks the protocol: the worker ends with one line, and never hangs.

It runs without vLLM, over an engine that computes nothing.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from types import SimpleNamespace as Fields
from typing import Any

import pytest

from mlserver_torch_stream.engine.vllm import worker
from mlserver_torch_stream.engine.vllm.messages import MAX_MESSAGE, PROTOCOL, Adapter, Addition, StartOrder
from mlserver_torch_stream.handlers.frames import FrameReader, encode_frame

_PROGRAM = """
import asyncio, sys
from types import SimpleNamespace as Fields
from mlserver_torch_stream.engine.vllm import worker

class Idle:
    errored = False
    def __init__(self):
        self.output_handler = asyncio.ensure_future(asyncio.Event().wait())
        model = Fields(get_vocab_size=lambda: 400, max_model_len=64, dtype="torch.float32")
        cache = Fields(kv_cache_size_tokens=64, kv_cache_memory_bytes=1)
        self.vllm_config = Fields(
            lora_config=None, model_config=model, cache_config=cache, scheduler_config=Fields(max_num_seqs=8),
            device_config=Fields(device_type="cpu"), parallel_config=Fields(data_parallel_size=1),
        )

worker._start = lambda order, steps: Idle()
worker.main(int(sys.argv[1]), sys.argv[2])
"""
_UNLIKELY_S = 30.0
_START = StartOrder({}).encode()
_FIRST = {"t": "start", "protocol": PROTOCOL, "args": {}, "adapters": []}
_ADD = {"t": "add", "number": 1, "params": {}, "n": 1, "priority": 0, "grammar": None, "bad_words": []}
_ADD |= {"adapter": None, "salt": None}


def _sent(data: bytes, folder: Path, *, cut: bool = False, program: str = _PROGRAM) -> tuple[int, list[str], list[str]]:
    """Sends bytes to a worker, and then nothing more; with ``cut``, closes the connection after them.

    Returns the worker's exit status, the kinds of its messages, and its lines of output.
    """
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", program, str(theirs.fileno()), str(folder)]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True) as worker, ours:
        theirs.close()
        ours.settimeout(_UNLIKELY_S)
        ours.sendall(data)
        if cut:
            ours.shutdown(socket.SHUT_WR)
        reader = FrameReader(ours)
        kinds = []
        try:
            while (frame := reader.read()) is not None:
                kinds.append(frame[0]["t"])
            _, output = worker.communicate(timeout=_UNLIKELY_S)
        finally:
            reader.close()
            worker.kill()
    return worker.returncode, kinds, output.splitlines()


def _raw(header: bytes, body: bytes = b"") -> bytes:
    return struct.pack("!II", len(header), len(body)) + header + body


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (encode_frame({"t": "start", "protocol": PROTOCOL + 1}), "the server uses protocol 2, not 1"),
        (encode_frame({"t": "start", "protocol": PROTOCOL}), "a malformed 'start' message: KeyError: 'adapters'"),
        (encode_frame({"t": "start", "protocol": PROTOCOL, "adapters": [1]}), "a malformed 'start' message: TypeError"),
        (encode_frame({**_FIRST, "cpu_kv_cache_bytes": math.inf}), "a malformed 'start' message: OverflowError"),
        (encode_frame({**_FIRST, "protocol": "1\n" * 10_000}), r"the server uses protocol '1\n1\n"),
        (encode_frame({"t": "add"}), "the server uses protocol None, not 1"),
        (struct.pack("!II", MAX_MESSAGE + 1, 0), f"a message of {MAX_MESSAGE + 1} bytes is too large"),
    ],
    ids=[
        *("another version", "without adapters", "a number for an adapter", "endless memory"),
        *("a text for a version", "no start", "too large"),
    ],
)
def test_a_wrong_first_message_ends_the_worker_before_vllm_starts(data: bytes, why: str, tmp_path: Path) -> None:
    status, kinds, lines = _sent(data, tmp_path)
    assert (status, kinds, len(lines)) == (0, ["hello"], 1), lines
    assert f"the connection to the server broke: {why}" in lines[0] and len(lines[0]) < 3000


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (struct.pack("!II", MAX_MESSAGE + 1, 0), f"a message of {MAX_MESSAGE + 1} bytes is too large"),
        (struct.pack("!II", 2, MAX_MESSAGE + 1), f"a message of {MAX_MESSAGE + 1} bytes is too large"),
        (_raw(b"{{}}"), "the header is not JSON"),
        (_raw(b"[" * 100_000), "the header is not JSON"),
        (_raw(b"[1]"), "the header is not a JSON object"),
        (encode_frame({"t": "adds"}), "an unknown message 'adds'"),
        (encode_frame({"t": "abort"}), "a malformed 'abort' message: KeyError: 'ids'"),
        (encode_frame({"t": "load_adapter"}), "a malformed 'load_adapter' message: KeyError: 'call'"),
        (encode_frame({"t": "add"}), "a malformed 'add' message: KeyError: 'number'"),
        (encode_frame(_ADD, b"123"), "a malformed 'add' message: ValueError: "),
        (encode_frame({**_ADD, "n": "1"}), "a malformed 'add' message: TypeError"),
        (encode_frame({**_ADD, "n": 9}), "a malformed 'add' message: ValueError: n is 9, not 1 to 8"),
        (encode_frame({**_ADD, "n": -1}), "a malformed 'add' message: ValueError: n is -1"),
        (encode_frame({**_ADD, "priority": "1"}), "a malformed 'add' message: TypeError: priority is '1'"),
        (encode_frame({**_ADD, "params": [1]}), "a malformed 'add' message: TypeError: params is [1]"),
        (encode_frame({**_ADD, "bad_words": [["a"]]}), "a malformed 'add' message: ValueError: 'a' is not"),
        (encode_frame({"t": "abort", "ids": [[1]]}), "a malformed 'abort' message: TypeError"),
        (encode_frame({"t": {"\n": 1}}), "an unknown message "),
        (_raw(b'{"t": "abort", "ids": [' + b"9" * 5000 + b"]}"), "the header is not JSON"),
        (_raw(b""), "the header is not JSON"),
        (_raw(b'{"t": "\xff"}'), "the header is not JSON"),
        (_START, "an unknown message 'start'"),
    ],
    ids=[
        *("a header too large", "a body too large", "no JSON", "too deep", "a list", "an unknown kind"),
        *("an abort of nothing", "a call without a number", "an empty request", "part of an id", "a text for a number"),
        *("too many answers", "fewer than no answers", "a text for a priority", "a list of parameters"),
        *("a letter for an id", "a list for a number", "an object for a kind", "a long integer"),
        *("an empty header", "no UTF-8", "a second start"),
    ],
)
def test_a_wrong_message_ends_a_worker_that_serves(data: bytes, why: str, tmp_path: Path) -> None:
    status, kinds, lines = _sent(_START + data, tmp_path)
    assert (status, kinds, len(lines)) == (0, ["hello", "ready"], 1), lines
    assert f"the connection to the server broke: {why}" in lines[0]


@pytest.mark.parametrize(
    ("data", "kinds"),
    [(_START[:5], ["hello"]), (_START[:-1], ["hello"]), (_START + _START[:9], ["hello", "ready"])],
    ids=["in a length", "in the start", "in a later message"],
)
def test_a_message_that_is_cut_off_ends_the_worker_in_silence(data: bytes, kinds: list[str], tmp_path: Path) -> None:
    """This happens if the server was killed while it wrote; nobody reads the worker's output then."""
    assert _sent(data, tmp_path, cut=True) == (0, kinds, [])


def test_a_worker_that_fails_ends_although_vllm_waits_at_the_exit(tmp_path: Path) -> None:
    broken = "import atexit, time\natexit.register(time.sleep, 3600)\nworker.Worker.run = None\nworker.main("
    status, kinds, lines = _sent(_START, tmp_path, program=_PROGRAM.replace("worker.main(", broken))
    assert (status, kinds) == (1, ["hello", "ready"])
    assert lines[-1] == "TypeError: 'NoneType' object is not callable"


def _engine(device: str, adapters: Any = None, data_parallel_size: int = 1) -> Any:
    """vLLM's config, and an ``add_lora`` that loads folders that exist."""

    async def add_lora(request: Any) -> None:
        if not Path(request.lora_path).is_dir():
            raise ValueError(f"no adapter\n in {request.lora_path}")

    config = Fields(
        lora_config=adapters,
        model_config=Fields(get_vocab_size=lambda: 400, max_model_len=64, dtype="torch.float32"),
        cache_config=Fields(kv_cache_size_tokens=64, kv_cache_memory_bytes=1),
        scheduler_config=Fields(max_num_seqs=8),
        device_config=Fields(device_type=device),
        parallel_config=Fields(data_parallel_size=data_parallel_size),
    )
    return Fields(vllm_config=config, add_lora=add_lora, errored=False)


def _worker(engine: Any) -> worker.Worker:
    nothing: Any = None
    return worker.Worker(nothing, engine, worker.Steps())


def test_every_engine_core_has_places_for_sequences() -> None:
    assert _worker(_engine("cuda", data_parallel_size=4)).describe()["max_num_seqs"] == 32


@pytest.fixture
def requests_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("vllm.lora.request")
    module.LoRARequest = lambda name, number, path: Fields(lora_path=path)
    for name in ("vllm", "vllm.lora"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.lora.request", module)


@pytest.mark.usefixtures("requests_of_vllm")
@pytest.mark.parametrize(("device", "argument"), [("cpu", "max_loras"), ("cuda", "max_cpu_loras")])
def test_vllm_gets_no_adapter_for_which_it_would_drop_another(device: str, argument: str, tmp_path: Path) -> None:
    limits = Fields(max_loras=4, max_cpu_loras=4) if device == "cpu" else Fields(max_loras=1, max_cpu_loras=3)
    filled = _worker(_engine(device, limits))
    adapters = [Adapter(str(number), number, str(tmp_path)) for number in range(5)]
    missing = asyncio.run(filled.load_all(adapters))
    why = f"at most 3 adapters can be loaded; set a larger {argument} in parameters.extra.vllm"
    assert missing == [(3, why), (4, why)]


@pytest.mark.usefixtures("requests_of_vllm")
def test_an_adapter_that_vllm_cannot_load_does_not_keep_the_others_from_loading(tmp_path: Path) -> None:
    engine = _engine("cuda", Fields(max_loras=1, max_cpu_loras=8))
    adapters = [Adapter("a", 1, "/nowhere"), Adapter("b", 2, str(tmp_path))]
    loading = _worker(engine)
    assert asyncio.run(loading.load_all(adapters)) == [(1, "no adapter in /nowhere")]
    assert list(loading._adapters) == [2]
    engine.errored = True  # vLLM itself has died, so the adapter may be sound
    with pytest.raises(ValueError, match="no adapter"):
        asyncio.run(_worker(engine).load_all(adapters))


def test_a_request_goes_through_the_wire_as_it_was() -> None:
    """The request's sequences share one prompt, and each has its own seed."""
    params: dict[str, Any] = {"seed": 2**63 - 1, "top_k": 3}
    request = Addition(7, [1, 2**32 - 1], params, 2, -5, "start: x", [[1], [2, 3]], 4, "salt")
    frame = request.encode()
    header_bytes, body_bytes = struct.unpack_from("!II", frame)
    assert body_bytes == 8
    header = json.loads(frame[8 : 8 + header_bytes])
    assert Addition.decode(header, frame[8 + header_bytes :]) == request
    assert [request.params_of(index)["seed"] for index in range(2)] == [2**63 - 1, 0]
