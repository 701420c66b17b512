"""Objects and their chunks sent to servers: as TorchServe's ``/predictions``, and as V2's BYTES tensors.

The servers are a real MLServer with our runtime, and a scripted TorchServe that fails as a test defines.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mlserver_torch_stream.cloud.answers import AnswerTooLarge, PieceCollector, predicted
from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.endpoint import ServerEndpoint
from mlserver_torch_stream.cloud.pipeline import PipelineLimits
from mlserver_torch_stream.cloud.rows import Kind, Result, Row, RunIdentity, RunRefused
from mlserver_torch_stream.cloud.run import CloudRun, stream
from tests.cloud.command import cloud, joined, trouble
from tests.cloud.faulty import faulty_server
from tests.cloud.handlers import counted, predictions, rows, told, write
from tests.scripted_http import Handler, serving
from tests.server.harness import Model, Server, serve
from tests.torchserve.predicting import SETTINGS, SHIM, TORCHSERVE

_OBJECTS = {"a b.png": bytes(range(256)) * 9, "b.bin": b"pieces" * 200, "empty": b"", "t.txt": b"text \xff"}


@pytest.fixture(scope="module")
def mlserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("count")
    model = Model("count", str(write(folder / "h")), implementation=TORCHSERVE, extra=SHIM, version="1.0")
    batched = write(folder / "b", batchSize=3, maxBatchDelay=1)
    second = Model("batched", str(batched), implementation=TORCHSERVE, extra=SHIM)
    with serve(folder / "models", [model, second], settings=SETTINGS) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for key, body in _OBJECTS.items():
        (tmp_path / "in" / key).write_bytes(body)
    return tmp_path


def _expected(key: str, chunk: int | None = None) -> list[tuple[Any, ...]]:
    return counted(key.replace(" ", "%20"), _OBJECTS[key], chunk)


def _last_json(prediction: Any) -> Any:
    """Returns what the handler has returned after the pieces that it sent."""
    return json.loads(prediction[prediction.index("{") :]) if isinstance(prediction, str) else prediction


@pytest.mark.parametrize("model", ["count", "count/1.0"])
def test_each_object_or_chunk_is_posted_to_torchserves_path(
    mlserver: Server, folder: Path, model: str, capfd: Any
) -> None:
    run = ("run", "--input", folder / "in", "--url", mlserver.url, "--api", "torchserve", "--model", model)
    assert cloud(*run) == 0
    found = rows(capfd.readouterr().out)
    assert [row["key"] for row in found] == list(_OBJECTS)
    for row in found:
        assert told([_last_json(each) for each in predictions(row)]) == _expected(row["key"])
    assert predictions(found[0])[0]["kind"] == "image/png"
    assert predictions(found[1])[0].startswith("piece 0 piece 1 {")
    assert cloud(*run, "--chunk-bytes", "700") == 0
    for row in rows(capfd.readouterr().out):
        assert told([_last_json(each) for each in predictions(row)]) == _expected(row["key"], 700)


def test_each_piece_of_a_streamed_answer_is_a_row_of_its_own(mlserver: Server, folder: Path, capfd: Any) -> None:
    run = ("run", "--input", folder / "in", "--url", mlserver.url, "--api", "torchserve", "--model", "count")
    assert cloud(*run, "--rows", "piece", "--chunk-bytes", "1200") == 0
    found = rows(capfd.readouterr().out)
    assert [(row["custom_id"], row["piece"]["index"]) for row in found] == [
        *(("a b.png#0", 0), ("a b.png#1", 0)),
        *(("b.bin#0", 0), ("b.bin#0", 1), ("b.bin#0", 2)),
        *(("empty#0", 0), ("t.txt#0", 0)),
    ]
    assert [predictions(row) for row in found[2:4]] == [["piece 0 "], ["piece 1 "]]
    assert predictions(found[4])[0]["bytes"] == 1200


def test_a_v2_server_gets_tensors_of_raw_bytes(mlserver: Server, folder: Path, capfd: Any) -> None:
    run = ("run", "--input", folder / "in", "--url", mlserver.url, "--model", "count", "--tensor", "body")
    for options, chunk in (((), None), (("--chunk-bytes", "700"), 700)):
        assert cloud(*run, *options) == 0
        found = rows(capfd.readouterr().out)
        assert [row["key"] for row in found] == list(_OBJECTS)
        for row in found:
            outputs = [answer[0] for answer in predictions(row)]
            assert {(each["name"], each["datatype"]) for each in outputs} == {("output", "BYTES")}
            assert told([_last_json(each["data"][0]) for each in outputs]) == _expected(row["key"], chunk)


def test_a_list_of_urls_is_streamed_in_batches_to_a_server_of_this_project(mlserver: Server) -> None:
    """Each batch of the run is one batch of the handler, though its delay is too short to gather one."""
    limits = PipelineLimits(batch_rows=3, max_wait=10.0)

    async def answers(urls: list[str], batches: bool | None) -> list[tuple[str, int, int]]:
        run = CloudRun(urls=urls, kind=Kind.BYTES, limits=limits)
        endpoint = ServerEndpoint(mlserver.url, "batched", "torchserve", batches=batches)
        found = [(result.row, result.outcome.response or {}) async for result in stream(run, endpoint)]
        return [(row.key, body["predictions"][0]["bytes"], body["predictions"][0]["batch"]) for row, body in found]

    with faulty_server({f"/{size}.bin": bytes(size) for size in range(1, 7)}) as host:
        urls = [f"{host.url}/{size}.bin" for size in (3, 1, 2, 6, 5, 4)]
        keys = [(url, int(url[-5]), 3) for url in urls]
        assert asyncio.run(answers(urls, None)) == keys
        assert [found[:2] for found in asyncio.run(answers(urls, False))] == [found[:2] for found in keys]
        for run in ({"urls": urls, "output": "out"}, {"urls": urls, "input": "in"}):
            with pytest.raises(RunRefused, match="urls: "):
                CloudRun(**run)


# Sleeps if a body begins with "slow".
_SLEEPS = """
import time

def handle(data, context):
    if data is None:
        return None
    time.sleep(3.0 if any(bytes(row["body"]).startswith(b"slow") for row in data) else 0.0)
    return [len(row["body"]) for row in data]
"""


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its clients may pause for a second and a half, and send bodies of at most 100,000 bytes. It says often that it is
    alive.
    """
    folder = tmp_path_factory.mktemp("strict")
    model = Model("sleeps", str(write(folder / "h", _SLEEPS)), implementation=TORCHSERVE, extra=SHIM)
    limits = {"PIECE_TIMEOUT": "0.5", "MAX_BODY_BYTES": "100000", "SSE_PING_INTERVAL": "0.2"}
    environment = {f"MLSERVER_TORCH_STREAM_{name}": value for name, value in limits.items()}
    with serve(folder / "models", [model], settings=SETTINGS, environment=environment) as running:
        yield running


def _streamed(
    server: Server, folder: Path, bodies: Mapping[str, bytes], limits: PipelineLimits, timeout: float = 60.0
) -> list[Any]:
    """Returns the prediction for each object, or the status of its failure. A request is not sent again."""
    for name, body in bodies.items():
        (folder / name).write_bytes(body)

    async def results() -> list[Any]:
        run = CloudRun(str(folder), kind=Kind.BYTES, limits=limits)
        endpoint = ServerEndpoint(server.url, "sleeps", "torchserve", timeout=timeout, retry=Retry(tries=1))
        return [
            found.outcome.failure.status if found.outcome.failure else (found.outcome.response or {})["predictions"][0]
            async for found in stream(run, endpoint)
        ]

    return asyncio.run(results())


def test_a_batch_may_take_longer_than_a_client_may_pause_within_a_body(strict: Server, tmp_path: Path) -> None:
    """All batches are one body, so the client sends nothing while it waits for the only batch."""
    bodies = {"1.bin": b"slow", "2.bin": b"quick", "3.bin": b"slowly"}
    assert _streamed(strict, tmp_path, bodies, PipelineLimits(batch_rows=1, batches=1)) == [4, 5, 6]


def test_a_server_that_answers_a_batch_is_not_silent(strict: Server, tmp_path: Path) -> None:
    limits = PipelineLimits(batch_rows=1, batches=1)
    assert _streamed(strict, tmp_path, {"1.bin": b"slow", "2.bin": b"slowly"}, limits, timeout=1.0) == [4, 6]


@pytest.mark.parametrize("large", [0, 2])
@pytest.mark.parametrize("batch_rows", [1, 4])
def test_an_object_that_the_server_does_not_take_fails_alone(
    strict: Server, large: int, batch_rows: int, tmp_path: Path
) -> None:
    """Wherever it comes, no other batch of the same body fails."""
    bodies = {f"{number}.bin": bytes(200_000 if number == large else 100_000) for number in range(4)}
    limits = PipelineLimits(batch_rows=batch_rows, max_wait=1.0)
    expected = [413 if number == large else 100_000 for number in range(4)]
    assert _streamed(strict, tmp_path, bodies, limits) == expected


@dataclass
class _Tensors:
    """A V2 server that reverses the elements of a tensor; ``refuses`` says whether it refuses several."""

    shape: list[int]
    refuses: bool = False
    url: str = ""
    asked: list[tuple[list[int], Any]] = field(default_factory=list)


@contextmanager
def _tensors(server: _Tensors) -> Iterator[_Tensors]:
    class V2(Handler):
        def do_GET(self) -> None:
            inputs = [{"name": "x", "datatype": "BYTES", "shape": server.shape}]
            self.answer(200, json.dumps({"name": "m", "inputs": inputs}).encode(), {"Content-Type": "application/json"})

        def do_POST(self) -> None:
            body, length = self.received(), int(self.headers["Inference-Header-Content-Length"])
            (tensor,), raw, values = json.loads(body[:length])["inputs"], body[length:], []
            server.asked.append((tensor["shape"], json.loads(body[:length])["parameters"].get("x-object-key")))
            while raw:
                size = int.from_bytes(raw[:4], "little")
                values.append(raw[4 : 4 + size].decode()[::-1])
                raw = raw[4 + size :]
            if len(values) > 1 and server.refuses:
                return self.answer(400, b'{"error": "one at a time"}')
            output = {"name": "y", "datatype": "BYTES", "shape": [len(values)], "data": values}
            self.answer(200, json.dumps({"outputs": [output]}).encode())

    with serving(V2) as server.url:
        yield server


@pytest.mark.parametrize(
    ("server", "asked"),
    [
        (_Tensors([-1]), [[3]]),
        (_Tensors([1]), [[1], [1], [1]]),
        (_Tensors([-1], refuses=True), [[3], [1], [1], [1]]),
        (_Tensors([-1, 1]), [[3, 1]]),
        (_Tensors([1, 1]), [[1, 1], [1, 1], [1, 1]]),
        (_Tensors([-1, 2]), [[1], [1], [1]]),
    ],
)
def test_a_batch_is_one_tensor_of_a_v2_server_whose_metadata_allow_it(
    server: _Tensors, asked: list[list[int]], tmp_path: Path
) -> None:
    for name in ("ab", "cd", "efg"):
        (tmp_path / name).write_text(name)

    async def answers() -> list[Any]:
        limits = PipelineLimits(batch_rows=3, max_wait=10.0)
        run = CloudRun(str(tmp_path), kind=Kind.BYTES, limits=limits)
        return [found.outcome.response async for found in stream(run, ServerEndpoint(server.url, "m", tensor="x"))]

    with _tensors(server):
        found = [body["predictions"] for body in asyncio.run(answers())]
    assert [shape for shape, _ in server.asked] == asked
    assert {key for shape, key in server.asked if shape[0] == 1} == ({"ab", "cd", "efg"} if len(asked) > 1 else set())
    output = {"name": "y", "datatype": "BYTES", "shape": [1]}
    assert found == [[[{**output, "data": [text]}]] for text in ("ba", "dc", "gfe")]


def test_a_model_that_is_not_there_ends_the_run(mlserver: Server, folder: Path, capfd: Any) -> None:
    run = ("run", "--input", folder / "in", "--url", mlserver.url, "--api", "torchserve")
    for model, said in (("other", "Model not found: other"), ("count/9", "Model version: 9 does not exist")):
        assert cloud(*run, "--model", model) == 3
        assert said in capfd.readouterr().err


@dataclass
class _TorchServe:
    """``script`` has for each object's content the (status, error type) of the next requests for it."""

    url: str = ""
    script: dict[bytes, list[tuple[int, str]]] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    delay: float = 0.0
    flying: list[list[bytes]] = field(default_factory=list)  # those that are there when an answer of 200 is sent
    here: list[bytes] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def _torchserve() -> Iterator[_TorchServe]:
    server = _TorchServe()

    class Answers(Handler):
        def do_POST(self) -> None:
            body = self.received()
            with server.lock:
                server.asked.append((self.path, {name.lower(): text for name, text in self.headers.items()}, body))
                coming = server.script.get(body) or []
                status, kind = coming.pop(0) if coming else (200, "")
                server.here.append(body)
            time.sleep(server.delay)
            with server.lock:
                if status == 200:
                    server.flying.append(list(server.here))
                server.here.remove(body)
            if kind == "cut":
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.wfile.write(b"5\r\nhello\r\n")
                self.close_connection = True
            elif status == 200:
                self.answer(200, b"answer to " + body, {"Content-Type": "text/plain"})
            elif kind:
                self.answer(status, json.dumps({"code": status, "type": kind, "message": "as asked"}).encode())
            else:
                self.answer(status, b"the handler's own")

    with serving(Answers) as server.url:
        yield server


@pytest.fixture
def torchserve() -> Iterator[_TorchServe]:
    with _torchserve() as running:
        yield running


def _run(server: _TorchServe, folder: Path, *options: Any) -> tuple[Any, ...]:
    for key in list((folder / "in").iterdir()):
        key.unlink()
    for number in range(4):
        (folder / "in" / f"{number}.bin").write_bytes(b"object %d" % number)
    return ("run", "--input", folder / "in", "--url", server.url, "--api", "torchserve", "--model", "m", *options)


_OURS = "ServiceUnavailableException"


@pytest.mark.long
@pytest.mark.parametrize(
    "failures",
    [
        [(503, _OURS)] * 3,
        [(429, "")],
        [(200, "cut")] * 2,
        [(503, "InternalServerException")] * 2,
        [(500, "InternalServerException")],
    ],
)
def test_what_may_pass_is_asked_again(
    torchserve: _TorchServe, folder: Path, failures: list[tuple[int, str]], capfd: Any
) -> None:
    torchserve.script = {b"object 2": list(failures)}
    assert cloud(*_run(torchserve, folder)) == 0
    found = rows(capfd.readouterr().out)
    assert [predictions(row) for row in found] == [[f"answer to object {number}"] for number in range(4)]
    assert len(torchserve.asked) == 4 + len(failures)


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        ((503, "InternalServerException"), 503),
        ((507, "InternalServerException"), 507),
        ((404, ""), 404),
        ((200, "cut"), 502),
        ((413, "TooLongFrameException"), 413),
    ],
)
def test_an_object_at_which_the_handler_fails_is_an_error_row(
    torchserve: _TorchServe, folder: Path, failure: tuple[int, str], status: int, capfd: Any
) -> None:
    torchserve.script = {b"object 2": [failure] * 5}
    assert cloud(*_run(torchserve, folder)) == 1
    found = rows(capfd.readouterr().out)
    assert [trouble(row) is None for row in found] == [True, True, False, True]
    assert found[2]["response"]["status_code"] == status
    said = {"": "the handler's own", "cut": "after 1 piece of the answer"}.get(failure[1], "as asked")
    assert said in found[2]["response"]["body"]["error"]["message"]


@pytest.mark.long
def test_the_last_try_of_an_object_is_made_while_no_other_is_sent(
    torchserve: _TorchServe, folder: Path, capfd: Any
) -> None:
    """The server may have failed it because of another object in the same batch."""
    torchserve.script = {b"object %d" % number: [(500, "InternalServerException")] * 2 for number in range(4)}
    torchserve.delay = 0.2
    assert cloud(*_run(torchserve, folder)) == 0
    assert all(len(together) == 1 for together in torchserve.flying)
    assert [predictions(row) for row in rows(capfd.readouterr().out)] == [[f"answer to object {n}"] for n in range(4)]


@pytest.mark.parametrize("failure", [(404, "ModelNotFoundException"), (401, "InvalidKeyException"), (403, "")])
def test_what_holds_for_every_object_ends_the_run(
    torchserve: _TorchServe, folder: Path, failure: tuple[int, str]
) -> None:
    torchserve.script = {b"object 1": [failure] * 5}
    output = ("--output", folder / "out", "--part-rows", "1", "--concurrency", "1")
    run = _run(torchserve, folder, *output)
    assert cloud(*run) == 3
    torchserve.script = {}
    assert cloud(*run) == 0
    assert [predictions(row) for row in rows(joined(folder / "out"))] == [[f"answer to object {n}"] for n in range(4)]


def test_parameters_and_places_are_headers_and_the_model_is_in_the_path(
    torchserve: _TorchServe, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    run = _run(torchserve, folder, "--chunk-bytes", "5", "--rows", "chunk", "--parameters", '{"X-Own": "1", "n": 2}')
    assert cloud(*run) == 0
    path, headers, body = next(each for each in torchserve.asked if each[1]["x-request-id"] == "3.bin#1")
    assert path == "/predictions/m" and body == b"t 3"
    expected = {
        **{"x-object-key": "3.bin", "x-object-size": "8", "x-chunk-index": "1", "x-chunk-offset": "5"},
        **{"x-chunk-last": "true", "x-own": "1", "n": "2", "content-type": "application/octet-stream"},
        **{"authorization": "Bearer secret-key"},
    }
    assert expected.items() <= headers.items()


def test_the_same_command_goes_on_where_a_server_went_away(torchserve: _TorchServe, folder: Path) -> None:
    run = _run(torchserve, folder, "--output", folder / "out", "--part-rows", "2", "--chunk-bytes", "3")
    assert cloud(*run) == 0
    (folder / "out/part-000001.jsonl").unlink()
    (folder / "out/done.json").unlink()
    before, torchserve.asked[:] = joined(folder / "out"), []
    assert cloud(*run) == 0
    after = joined(folder / "out")
    assert after.startswith(before) and len(rows(after)) == 4
    assert {headers["x-object-key"] for _, headers, _ in torchserve.asked} == {"2.bin", "3.bin"}


@pytest.mark.parametrize(
    ("value", "content_type", "prediction"),
    [
        (b'{"a": [1, NaN]}', "", {"a": [1, None]}),
        (b'"text"', "application/json; charset=utf-8", "text"),
        (b"5", "", 5),
        (b"5", "text/plain", "5"),
        (b"{", "application/json", "{"),
        ("grün".encode(), "", "grün"),
        (b"\xff\x00", "", {"base64": "/wA="}),
        (b"", "", ""),
        (b"[" * 600 + b"]" * 600, "", "[" * 600 + "]" * 600),
        (b"[" * 400 + b"]" * 400 + b" " * 9, "text/plain", "[" * 400 + "]" * 400 + " " * 9),
    ],
)
def test_an_answer_is_json_text_or_base64(value: bytes, content_type: str, prediction: Any) -> None:
    outcome = predicted([(value, content_type)])
    assert outcome.response == {
        "object": "prediction",
        "content_type": content_type or None,
        "predictions": [prediction],
    }


def test_an_answer_of_any_depth_can_be_written() -> None:
    """Python can parse JSON with more levels than it can write inside an output row."""
    for levels in range(490, 1000):
        outcome = predicted([(b"[" * levels + b"]" * levels, "")])
        line = Result(Row(0, "a", None, "a"), outcome).encode(RunIdentity("run", 0))
        assert line.count(b"]") == levels + 1


def test_the_pieces_of_an_answer_are_bounded_in_number() -> None:
    pieces = PieceCollector()
    for _ in range(1 << 18):
        pieces.add(b"x", "")
    with pytest.raises(AnswerTooLarge, match="more than 262144 pieces"):
        pieces.add(b"x", "")
