"""A worker that speaks the protocol of the vLLM worker; each next token follows from the last one and its position.

It is a second implementation of the protocol, written with the standard library only, and shares no code with the
first. ``interpreter`` writes a program that runs it, which tests use as the interpreter with vLLM. Its arguments, the
keys of the setting ``vllm``, choose what goes wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_LENGTHS = struct.Struct("!II")
_ROOT = Path(__file__).resolve().parent.parent.parent
_PROGRAM = f"""#!{sys.executable}
import sys
sys.path.insert(0, {str(_ROOT)!r})
exec(sys.argv[2].replace("mlserver_torch_stream.engine.vllm.worker", "tests.engine.wire_worker"))
"""
_MAX_MESSAGE = 2**26
CONTEXT = 512
VOCAB = 400


def interpreter(folder: Path) -> Path:
    """Writes the program that stands for the interpreter, and returns its path."""
    path = folder / "python"
    path.write_text(_PROGRAM, encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def next_token(last: int, position: int) -> int:
    """Returns the token that follows ``last`` at this position: a letter in the vocabulary of the tests."""
    return 66 + (last * 7 + position * 3) % 26


def answer(prompt: list[int], count: int) -> list[int]:
    tokens: list[int] = []
    for position in range(len(prompt), len(prompt) + count):
        tokens.append(next_token((prompt + tokens)[-1], position))
    return tokens


def score(token: int) -> float:
    """Returns the log-probability of a token of a prompt."""
    return -token / 8


def _wait_for(gate: str | None) -> None:
    """Waits until the file exists, with which a test lets the worker go on."""
    while gate is not None and not Path(gate).exists():
        time.sleep(0.01)


class _Sequence:
    def __init__(self, number: int, params: dict[str, Any], prompt: list[int]) -> None:
        self.number = number
        self.params = params
        self.tokens = prompt
        self.prompt = len(prompt)
        self.cached: int | None = None

    def step(self) -> list[Any]:
        token = next_token(self.tokens[-1], len(self.tokens))
        self.tokens.append(token)
        done = len(self.tokens) - self.prompt
        reason = None
        if token in self.params["stop_token_ids"] and done > self.params["min_tokens"]:
            reason = "stop"
        elif done >= self.params["max_tokens"]:
            reason = "length"
        top = self.params.get("logprobs")
        logprobs = None if top is None else [[-0.5, [[token - rank, -0.5 - rank] for rank in range(top)]]]
        return [self.number, [token], reason, self.cached, logprobs, None, None]


class _Worker:
    def __init__(self, connection: socket.socket, args: dict[str, Any], folder: str) -> None:
        self.connection = connection
        self.args = args
        self.folder = folder
        self.waiting: list[_Sequence] = []
        self.running: list[_Sequence] = []
        self.seen: set[tuple[int, ...]] = set()
        self.steps = self.computed = self.hits = 0
        self.buffer = b""
        self.adapters: dict[int, str] = {}

    def serve(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self.connection, selectors.EVENT_READ)
        while True:
            busy = bool(self.running or self.waiting)
            if selector.select(self.args.get("step_s", 0.001) if busy else None):
                data = self.connection.recv(1 << 16)
                if not data:
                    return
                self.buffer += data
                while (frame := self._frame()) is not None:
                    self._take(*frame)
            self._step()

    def _frame(self) -> tuple[dict[str, Any], bytes] | None:
        if len(self.buffer) < _LENGTHS.size:
            return None
        header, body = _LENGTHS.unpack_from(self.buffer)
        assert max(header, body) <= _MAX_MESSAGE
        end = _LENGTHS.size + header + body
        if len(self.buffer) < end:
            return None
        frame, self.buffer = self.buffer[:end], self.buffer[end:]
        return json.loads(frame[_LENGTHS.size : _LENGTHS.size + header]), frame[_LENGTHS.size + header :]

    def _take(self, header: dict[str, Any], body: bytes) -> None:
        if record := self.args.get("record"):
            with open(record, "a", encoding="utf-8") as file:
                file.write(json.dumps(header) + "\n")
        if header["t"] == "add":
            if header["adapter"] is not None and header["adapter"] not in self.adapters:
                raise KeyError(header["adapter"])
            prompt = list(struct.unpack(f"={len(body) // 4}I", body))
            numbers = range(header["number"], header["number"] + header["n"])
            self.waiting += [_Sequence(number, header["params"], list(prompt)) for number in numbers]
        elif header["t"] == "abort":
            gone = set(header["ids"])
            self.waiting = [each for each in self.waiting if each.number not in gone]
            self.running = [each for each in self.running if each.number not in gone]
        elif header["t"] == "load_adapter" and not self.args.get("silent"):
            _wait_for(self.args.get("load_gate"))
            error = None if Path(header["path"]).is_dir() else f"no adapter in {header['path']}"
            if error is None:
                self.adapters[header["id"]] = header["name"]
            self._send({"t": "answered", "call": header["call"], "error": error})
        elif header["t"] == "unload_adapter":
            self.adapters.pop(header["id"], None)
            self._send({"t": "answered", "call": header["call"], "error": None})

    def _step(self) -> None:
        while self.waiting and len(self.running) < self.args["max_num_seqs"]:
            sequence = self.waiting.pop(0)
            blocks = sequence.prompt // 16
            sequence.cached = 16 * sum(tuple(sequence.tokens[: 16 * end]) in self.seen for end in range(1, blocks + 1))
            self.seen.update(tuple(sequence.tokens[: 16 * end]) for end in range(1, blocks + 1))
            self.hits += sequence.cached
            self.computed += sequence.prompt - sequence.cached
            if (top := sequence.params.get("prompt_logprobs")) is not None:
                rows = [
                    [score(token), [[token - rank, score(token) - rank] for rank in range(top)]]
                    for token in sequence.tokens[1:]
                ]
                self._send({"t": "scores", "number": sequence.number, "of": self.args.get("scores", rows)})
            self.running.append(sequence)
        if not self.running:
            return
        self.steps += 1
        if (after := self.args.get("die_after")) is not None and self.steps > after:
            os.kill(os.getpid(), signal.SIGKILL)
        if (after := self.args.get("hang_after")) is not None and self.steps > after and self._first_time("hung"):
            time.sleep(3600)
        if (garbage := self.args.get("garbage")) is not None:
            self.connection.sendall(bytes.fromhex(garbage))
            if self.args.get("leaves"):
                os._exit(3)
        rows = [each.step() for each in self.running]
        if (wrong := self.args.get("row")) is not None:
            rows[0] = wrong
        ended = {row[0] for row in rows if row[2] is not None}
        self.running = [each for each in self.running if each.number not in ended]
        stats = {
            "running": len(self.running),
            "waiting": len(self.waiting),
            "kv_usage": len(self.running) / self.args["max_num_seqs"],
            "steps": 1,
            "prefill_tokens": self.computed,
            "prefix_cache_hit_tokens": self.hits,
            "generation_tokens": len(rows),
            "num_preemptions": 0,
            "draft_tokens": 0,
            "accepted_draft_tokens": 0,
            **self.args.get("stats", {}),
        }
        self.computed = self.hits = 0
        self._send({"t": "outputs", "of": rows, "stats": stats})

    def _first_time(self, what: str) -> bool:
        """Returns whether no worker of this test has done ``what`` before."""
        mark = Path(self.args["marks"], what)
        first = not mark.exists()
        mark.touch()
        return first

    def _send(self, header: dict[str, Any]) -> None:
        text = json.dumps(header).encode()
        self.connection.sendall(_LENGTHS.pack(len(text), 0) + text)


def main(descriptor: int, folder: str) -> None:
    connection = socket.socket(fileno=descriptor)
    worker = _Worker(connection, {}, folder)
    worker._send(json.loads(os.environ.get("WIRE_HELLO", '{"t": "hello", "protocol": 2, "vllm": "0.32.0"}')))
    order = None
    while order is None:
        data = connection.recv(1 << 16)
        if not data:
            return
        worker.buffer += data
        order = worker._frame()
    worker.args = {"max_num_seqs": 8, **order[0]["args"]}
    missing = []
    for adapter in order[0]["adapters"]:
        if Path(adapter["path"]).is_dir():
            worker.adapters[adapter["number"]] = adapter["name"]
        else:
            missing.append([adapter["number"], f"no adapter in {adapter['path']}"])
    if refused := worker.args.get("refuse"):
        worker._send({"t": "refused", "field": "refuse", "why": refused})
        return
    if "descendants" in worker.args:  # as vLLM's engine core: in a session of its own, deaf to the death of its parent
        child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        Path(worker.args["descendants"]).write_text(f"{os.getpid()} {child.pid}", encoding="utf-8")
        Path("/dev/shm", f"wire-{os.getpid()}").touch()
        Path("/dev/shm", f"__KMP_REGISTERED_LIB_{child.pid}_0").touch()
        Path(folder, "shared-memory").write_text(f"wire-{os.getpid()}\n", encoding="utf-8")
    if environment := worker.args.get("environment"):
        Path(environment).write_text(json.dumps(dict(os.environ)), encoding="utf-8")
    time.sleep(worker.args.get("start_s", 0))
    _wait_for(worker.args.get("start_gate"))
    ready = {
        "t": "ready",
        "vocab_size": VOCAB,
        "max_model_len": worker.args.get("max_model_len") or CONTEXT,
        "max_num_seqs": worker.args["max_num_seqs"],
        "kv_cache_tokens": 8 * CONTEXT,
        "kv_cache_bytes": 8 * CONTEXT * 1024,
        "device": "cpu, float32",
        "missing": missing,
        **worker.args.get("ready", {}),
    }
    worker._send(ready)
    with contextlib.suppress(ConnectionError):
        worker.serve()
