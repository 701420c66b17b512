"""The worker's parts that need no process: its socket for handlers, values, and the protocol between them."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mlserver_torch_stream.handlers.config.worker_settings import DEFAULT
from mlserver_torch_stream.handlers.frames import BrokenFrame, FrameReader, begin_frame, encode_header
from mlserver_torch_stream.handlers.worker import values
from mlserver_torch_stream.handlers.worker.channel import Channel


class _Call:
    """One call's context, and the messages that the server receives from it."""

    def __init__(self, count: int, **limits: int) -> None:
        from mlserver_torch_stream.handlers.worker.cancellation import StopAlone
        from mlserver_torch_stream.handlers.worker.channel import Channel
        from mlserver_torch_stream.handlers.worker.handler_context import HandlerContext, Metrics, Outlet, WorkerRequest

        self._near, self._far = socket.socketpair()
        self.reader = FrameReader(self._far)
        self.channel: Any = Channel(self._near, **limits)
        metrics = Metrics(self.channel, "model", DEFAULT)
        self.context: Any = HandlerContext("model", "/", {}, count, None, "0", True, metrics, {})
        requests = [WorkerRequest(f"r{index}", {}, ()) for index in range(count)]
        self.outlet = Outlet(requests, self.channel, StopAlone())
        self.context.for_call(requests, self.outlet)

    def send(self, ret: Any, request_ids: dict[int, str] | None = None) -> None:
        from ts.handler_utils.utils import send_intermediate_predict_response

        ids = self.context.request_ids if request_ids is None else request_ids
        send_intermediate_predict_response(ret, ids, "ok", 200, self.context)

    def heard(self) -> list[tuple[str, bytes | str, bool]]:
        """Returns the id, the value or error, and whether it is the last, for each part of the next message."""
        frame = self.reader.read_values()
        assert frame is not None
        header, (body,) = frame
        if header["t"] == "failed":
            return [(request_id, header["message"], True) for request_id in header["ids"]]
        found = []
        for item in header["items"]:
            found.append((item["id"], body[: item["n"]], item["last"]))
            body = body[item["n"] :]
        return found

    def close(self) -> None:
        self.reader.close()
        self.channel._reader.close()  # a worker has one channel until it ends
        self._near.close()
        self._far.close()


@pytest.fixture
def call(shim: None, request: pytest.FixtureRequest) -> Iterator[_Call]:
    made = _Call(2, **getattr(request, "param", {}))
    yield made
    made.close()


def test_a_closed_connection_is_noticed_within_one_piece(call: _Call) -> None:
    from mlserver_torch_stream.handlers.worker.cancellation import ClientsLeft

    call.send(["a", "b"])
    call.channel.cancel(["r0"])
    call.send(["a", "b"])  # one of them still reads
    call.channel.cancel(["r1"])
    with pytest.raises(ClientsLeft):
        call.send(["a", "b"])
    assert [call.heard() for _ in range(3)] == [[("r0", b"a", False), ("r1", b"b", False)], [("r1", b"b", False)], []]


def test_pieces_go_to_those_that_are_named_by_place_by_index_or_by_map(call: _Call) -> None:
    call.send({1: "by index"})
    call.send(["", "by map"], {1: "r1"})
    assert call.heard() == [("r1", b"by index", False)]
    assert call.heard() == [("r1", b"by map", False)]


def test_a_handler_ends_one_member_early(call: _Call) -> None:
    """Later pieces for that member are dropped."""
    call.context.set_response_header(0, "ts_stream_next", "false")
    call.send(["last", "more"])
    call.send(["late", "more"])
    assert call.heard() == [("r0", b"last", True), ("r1", b"more", False)]
    assert call.heard() == [("r1", b"more", False)]
    assert call.outlet.ended == {"r0"}


def test_a_piece_that_cannot_be_serialised_fails_alone(call: _Call) -> None:
    call.send({0: object(), 1: "fine"})
    ((request_id, message, last),) = call.heard()
    assert request_id == "r0" and last and "Unsupported model output data type" in str(message)
    assert call.heard() == [("r1", b"fine", False)]
    assert call.outlet.ended == {"r0"}


@pytest.mark.parametrize("call", [{"most_bytes": 3000}], indirect=True)
def test_pieces_go_in_as_many_messages_as_they_need_and_one_that_fits_in_none_fails_alone(call: _Call) -> None:
    call.send(["a" * 2000, "b" * 2000])
    assert [call.heard() for _ in range(2)] == [[("r0", b"a" * 2000, False)], [("r1", b"b" * 2000, False)]]
    call.send(["a" * 3000, "b"])
    call.send(["late", "b"])
    ((request_id, message, _),) = call.heard()
    assert request_id == "r0" and "a piece of 3000 bytes is too large" in str(message)
    assert [call.heard() for _ in range(2)] == [[("r1", b"b", False)]] * 2
    assert call.outlet.ended == {"r0"}


def test_a_lone_surrogate_reaches_the_server_as_its_escape_wherever_it_stands(call: _Call) -> None:
    from ts.metrics.dimension import Dimension

    call.context.set_response_header(0, "x-a", "\ud800 \U0001f600")
    call.context.set_response_content_type(0, "text/\udfff")
    call.channel.pieces([call.context.piece(0, "text", True)])
    header, _ = call.reader.read_values() or ({}, b"")
    (item,) = header["items"]
    assert item["headers"] == {"x-a": "\\ud800 \U0001f600"} and item["ct"] == "text/\\udfff"
    call.context.metrics.add_counter("Counter", 1, dimensions=[Dimension("host", "\ud800")])
    header, _ = call.reader.read_values() or ({}, b"")
    assert header["labels"]["host"] == "\\ud800"


def test_what_a_handler_has_done_to_its_context_fails_its_own_request_alone(call: _Call) -> None:
    from mlserver_torch_stream.handlers.worker.handler_context import values

    call.context.request_ids.clear()
    call.context.request_processor[1] = None
    assert call.context.piece(0, "mine", True).request_id == "r0"
    with pytest.raises(values.Unserialisable, match="the handler's result cannot be sent: AttributeError"):
        call.context.piece(1, "other", True)


def test_other_ranks_send_nothing(call: _Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    call.send(["a", "b"])
    monkeypatch.setenv("LOCAL_RANK", "0")
    call.send(["c", "d"])
    assert call.heard()[0][1] == b"c"


def test_a_status_that_is_text_is_a_number_for_the_server(call: _Call) -> None:
    call.context.set_response_status("503", "", 0)
    assert call.context.piece(0, "late", True).status == 503


def test_the_deprecated_place_of_the_sender_works_and_says_so(call: _Call) -> None:
    from ts.protocol.otf_message_handler import send_intermediate_predict_response

    with pytest.warns(PendingDeprecationWarning):
        send_intermediate_predict_response(["a", "b"], call.context.request_ids, "ok", 200, call.context)
    assert [value for _, value, _ in call.heard()] == [b"a", b"b"]


@pytest.mark.parametrize("code", ["500", None, 500.0])
def test_a_code_that_is_no_integer_is_the_handlers_error(call: _Call, code: Any) -> None:
    """The server would not understand it."""
    from ts.handler_utils.utils import send_intermediate_predict_response

    with pytest.raises(TypeError, match="integer"):
        send_intermediate_predict_response(["a", "b"], call.context.request_ids, "no", code, call.context)


def test_headers_and_content_types_travel_with_a_piece_and_the_marker_does_not(call: _Call) -> None:
    call.context.set_response_content_type(0, "text/plain")
    call.context.set_response_header(0, "x-a", "b")
    call.send({0: "a"})
    header, _ = call.reader.read_values() or ({}, b"")
    assert header["items"][0]["ct"] == "text/plain" and header["items"][0]["headers"] == {"x-a": "b"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"\xff\x00", b"\xff\x00"),
        (bytearray(b"raw"), b"raw"),
        ("Grüße", "Grüße".encode()),
        ({"a": [1, 2]}, json.dumps({"a": [1, 2]}, indent=2).encode()),
        (3, b"3"),
        (None, b"null"),
    ],
)
def test_values_are_spelled_as_torchserve_spells_them(value: Any, expected: bytes) -> None:
    assert values.encode(value) == expected


def test_a_tensor_is_spelled_by_torch_save() -> None:
    import io

    import torch

    saved = values.encode(torch.tensor([1.5, 2.5]))
    assert torch.equal(torch.load(io.BytesIO(saved)), torch.tensor([1.5, 2.5]))


def test_what_no_client_can_be_sent_says_so() -> None:
    loop: list[Any] = []
    loop.append(loop)
    for value in (object(), {1, 2}, loop):
        with pytest.raises(values.Unserialisable, match="Unsupported model output data type"):
            values.encode(value)


@pytest.mark.parametrize(
    ("raw", "content_type", "expected"),
    [
        (b'{"a": 1}', "application/json", {"a": 1}),
        (b'{"a": 1}', "application/json; charset=utf-8", {"a": 1}),
        (b"text", "text/plain", "text"),
        (b"text", "", bytearray(b"text")),
        (b"text", "image/png", bytearray(b"text")),
        (b"{no json", "application/json", bytearray(b"{no json")),
        (b"\xff", "text/plain", bytearray(b"\xff")),
    ],
)
def test_bodies_are_decoded_as_their_content_type_says(raw: bytes, content_type: str, expected: Any) -> None:
    decoded = values.decode(raw, content_type)
    assert decoded == expected and type(decoded) is type(expected)


def _binary(code: int, message: str, *requests: tuple[str, str, bytes]) -> bytes:
    """Returns a response as TorchServe's package writes it.

    ``requests`` are the id, ``ts_stream_next`` and value of each.
    """

    def text(value: bytes) -> bytes:
        return struct.pack("!i", len(value)) + value

    frame = struct.pack("!i", code) + text(message.encode())
    for request_id, stream_next, value in requests:
        header = struct.pack("!i", 1) + text(b"ts_stream_next") + text(stream_next.encode())
        frame += text(request_id.encode()) + text(b"text/plain") + struct.pack("!i", 200) + text(b"OK")
        frame += header + text(value)
    return frame + struct.pack("!i", -1)


def test_responses_in_the_binary_format_of_torchserves_package_are_sent(call: _Call) -> None:
    call.context.cl_socket.sendall(_binary(200, "ok", ("r0", "true", b"more"), ("r1", "false", b"last")))
    assert call.heard() == [("r0", b"more", False), ("r1", b"last", True)]
    call.context.cl_socket.sendall(_binary(507, "no room", ("r0", "true", b"error"), ("r1", "true", b"error")))
    assert call.heard() == [("r0", "no room", True)]
    assert call.outlet.ended == {"r0", "r1"}
    call.context.cl_socket.sendall(None)  # as on other ranks than the first


def test_a_send_without_results_fails_its_requests_with_the_message(call: _Call) -> None:
    from ts.handler_utils.utils import send_intermediate_predict_response

    send_intermediate_predict_response(None, {1: "r1"}, "no room", 507, call.context)
    assert call.heard() == [("r1", "no room", True)] and call.outlet.ended == {"r1"}


def test_a_response_that_is_cut_off_is_refused(shim: None) -> None:
    from mlserver_torch_stream.handlers.worker.handler_context import parse

    with pytest.raises(ValueError, match="incomplete"):
        parse(b"\x00\x00\x00\xc8\x00\x00\x00\x05abc")


def test_a_forked_child_says_nothing_and_does_not_keep_the_connection_open() -> None:
    program = """
import os, socket, sys
from mlserver_torch_stream.handlers.worker.channel import Channel
near, far = socket.socketpair()
channel = Channel(near)
child = os.fork()
if child == 0:
    far.close()
    channel.send("child")
    sys.stdin.readline()  # stays
    os._exit(0)
channel.send("parent")
os.close(near.fileno())
print(far.makefile("rb").read())
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdin is not None
    line = child.stdout.readline()
    child.stdin.close()  # the forked one goes on until then
    child.wait(20)
    child.stdout.close()
    assert "parent" in line and "child" not in line


@pytest.mark.slow
def test_the_shim_has_the_signatures_of_the_package() -> None:
    """Functions in both have the same arguments in the same order."""
    ours, theirs = (_signatures(which) for which in ("shim", "package"))
    for name, arguments in ours.items():
        if theirs[name] == ["self", "args", "kwargs"]:  # decorated there, without a trace of what it takes
            continue
        assert theirs[name][: len(arguments)] == arguments, name


def _signatures(which: str) -> dict[str, list[str]]:
    program = f"""
import importlib, inspect, json
from mlserver_torch_stream.handlers.worker.handler import provide_ts
provide_ts({which!r})
assert ("shim" in importlib.import_module("ts").__file__) == ({which!r} == "shim")
names = {{
    "ts.handler_utils.utils": ["send_intermediate_predict_response", "import_class"],
    "ts.protocol.otf_message_handler": ["send_intermediate_predict_response"],
    "ts.torch_handler.base_handler": ["BaseHandler"], "ts.context": ["Context", "RequestProcessor"],
    "ts.service": ["PredictionException"], "ts.handler_utils.timer": ["timed"],
    "ts.handler_utils.hf_batch_streamer": ["TextIteratorStreamerBatch"],
    "ts.metrics.metric_cache_yaml_impl": ["MetricsCacheYamlImpl"], "ts.metrics.caching_metric": ["CachingMetric"],
    "ts.metrics.dimension": ["Dimension"],
    "ts.utils.util": ["list_classes_from_module", "load_label_mapping", "map_class_to_label", "get_yaml_config"],
    "ts.torch_handler.request_envelope.base": ["BaseEnvelope"],
}}
found = {{}}
def note(path, callable_):
    found[path] = [name for name in inspect.signature(callable_).parameters if name not in ("decode", "decode_kwargs")]
for module, members in names.items():
    for member in members:
        thing = getattr(importlib.import_module(module), member)
        note(f"{{module}}.{{member}}", thing)
        for name, method in inspect.getmembers(thing, inspect.isfunction) if inspect.isclass(thing) else ():
            if not name.startswith("_"):
                note(f"{{module}}.{{member}}.{{name}}", method)
print("@" + json.dumps(found))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.rpartition("@")[2]))


def test_the_values_of_a_batch_are_read_one_by_one() -> None:
    near, far = socket.socketpair()
    with closing(near), closing(far), closing(FrameReader(far)) as reader:
        for sizes in ([1, 0, 2], [1, 1]):
            near.sendall(begin_frame(encode_header({"sizes": sizes}), 3) + b"abc")
        assert reader.read_values() == ({"sizes": [1, 0, 2]}, [b"a", b"", b"bc"])
        with pytest.raises(BrokenFrame, match="the values have 2 bytes, and the body has 3"):
            reader.read_values()


@pytest.mark.skipif(sys.platform != "linux", reason="counts a thread's switches in /proc")
def test_a_thread_that_waits_for_a_message_sleeps_while_others_send() -> None:
    """The kernel wakes a thread in ``recv`` whenever the other side reads what was sent on this socket."""
    near, far = socket.socketpair()
    with near, far, closing(FrameReader(near)) as reader:
        waiting = threading.Thread(target=reader.read)
        waiting.start()
        status = Path(f"/proc/self/task/{waiting.native_id}/status")
        while "S (sleeping)" not in status.read_text():
            time.sleep(0.01)
        before = _switches(status)
        for _ in range(100):
            near.sendall(b"x")
            assert far.recv(1) == b"x"
            time.sleep(0.001)
        woken = _switches(status) - before
        far.shutdown(socket.SHUT_RDWR)
        waiting.join()
    assert woken < 10


def _switches(status: Path) -> int:
    """Returns how often a thread has given up its core to wait."""
    return int(status.read_text().split("\nvoluntary_ctxt_switches:")[1].split()[0])


def test_the_channel_of_this_process_is_not_a_forked_one() -> None:
    near, far = socket.socketpair()
    with near, far:
        channel = Channel(near)
        assert not channel.forked
        channel._reader.close()


def test_a_handler_gets_no_error_of_a_connection_that_the_server_has_closed() -> None:
    """The process ends without that error, whose traceback would be logged at every shutdown."""
    lost: list[bool] = []
    near, far = socket.socketpair()
    with near:
        channel = Channel(near, lost=lambda: lost.append(True))
        far.close()
        channel.send("metric")
        assert lost == [True]
        channel._reader.close()
