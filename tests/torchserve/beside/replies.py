"""Clients: a request is a shell line that a real curl runs, or a Python client."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests

from tests.torchserve.beside.grpc_client import call
from tests.torchserve.beside.reply import Reply, without_ids
from tests.torchserve.beside.servers import Addresses

_TIMEOUT_S = 60
# What the page says once for all cases.
_NOT_COMPARED = frozenset({"date", "server", "x-accel-buffering", "keep-alive", "retry-after"})
_FAULTS = {
    18: "the connection ends before the body does",
    28: "no reply in time",
    52: "the connection ends without a reply",
    56: "the connection is reset",
}


def ask(
    lines: Sequence[str], together: bool, addresses: Addresses, folder: Path, seconds: int = _TIMEOUT_S
) -> list[Reply]:
    """Returns the replies to all lines, sent one after the other or at once; those to equal lines are sorted by status.

    ``folder`` has the files that the lines name. A request that takes longer than ``seconds`` has no reply.
    """
    one = partial(_ask, addresses=addresses, folder=folder, seconds=seconds)
    if not together:
        return [each for line in lines for each in one(line)]
    with ThreadPoolExecutor(len(lines)) as threads:
        replies = [each for found in threads.map(one, lines) for each in found]
    return replies if len(set(lines)) > 1 else sorted(replies, key=lambda reply: str(reply.status))


def _ask(line: str, addresses: Addresses, folder: Path, seconds: int) -> list[Reply]:
    words = shlex.split(line)
    if words[0] == "grpc":
        return [call(words[1:], addresses, folder, seconds)]
    words = [_addressed(word, addresses) for word in words]
    return _CLIENTS[words[0]](words[1:], folder, seconds)


def _addressed(word: str, addresses: Addresses) -> str:
    """A path belongs to the inference address, unless it begins with ``management:`` or is a file of this machine.

    ``<token>`` stands for the token of the management API.
    """
    word = word.replace("<token>", addresses.token)
    if word.startswith("management:/"):
        return f"{addresses.management}{word.removeprefix('management:')}"
    return f"{addresses.inference}{word}" if word.startswith("/") and not Path(word).is_file() else word


# --- curl ---


def _curl(arguments: Sequence[str], folder: Path, seconds: int) -> list[Reply]:
    """Returns one reply for each address of the line."""
    command = ["curl", "-sS", "-i", "--raw", "--max-time", str(seconds), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=seconds + 10)
    if done.returncode not in (0, *_FAULTS):
        raise AssertionError(f"curl ended with {done.returncode}: {done.stderr.decode(errors='replace')}")
    fault = _FAULTS.get(done.returncode, "")
    head_only = "-I" in arguments or "--head" in arguments
    replies = _read(done.stdout, head_only)
    if fault:
        last = replies.pop() if replies else Reply()
        replies.append(Reply(last.status, last.headers, last.pieces, fault))
    return replies


def _read(raw: bytes, head_only: bool) -> list[Reply]:
    """Parses consecutive HTTP/1.1 replies."""
    replies = []
    while raw:
        head, _, raw = raw.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        status = int(first.split()[1])
        if status < 200:  # 100 Continue
            continue
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        pieces, raw = _body(raw, headers, head_only or status in (204, 304))
        if pieces:
            headers.pop("content-length", None)
        replies.append(Reply(status, _compared(status, headers), [without_ids(piece) for piece in pieces]))
    return replies


def _body(raw: bytes, headers: Mapping[str, str], empty: bool) -> tuple[list[bytes], bytes]:
    if empty:
        return [], raw
    if headers.get("transfer-encoding") == "chunked":
        return _chunks(raw)
    length = int(headers.get("content-length", len(raw)))
    return [raw[:length]], raw[length:]


def _chunks(raw: bytes) -> tuple[list[bytes], bytes]:
    pieces = []
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            return pieces, raw.removeprefix(b"\r\n")
        pieces.append(raw[:length])
        raw = raw[length + 2 :]
    return pieces, b""


def _compared(status: int, headers: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in headers.items() if name not in _NOT_COMPARED}
    if status >= 400 or kept.get("connection", "").lower() == "keep-alive":  # TorchServe closes it after an error
        kept.pop("connection", None)
    if "allow" in kept:  # a set, in any order
        kept["allow"] = ", ".join(sorted(kept["allow"].split(", ")))
    return {name: without_ids(value.encode("latin-1")).decode("latin-1") for name, value in kept.items()}


# --- clients of Python ---


def _requests(arguments: Sequence[str], folder: Path, seconds: int) -> list[Reply]:
    """``requests post ADDRESS KIND=VALUE…``: ``data=TEXT``, ``files=NAME:FILE…``; the body read in pieces."""
    method, address, *given = arguments
    options: dict[str, Any] = {}
    for kind, _, value in (each.partition("=") for each in given):
        if kind == "files":
            options["files"] = {
                name: (folder / file).read_bytes()
                for name, _, file in (each.partition(":") for each in value.split(","))
            }
        elif kind == "file":
            options["data"] = (folder / value).read_bytes()
        else:
            options[kind] = value
    with requests.request(method, address, stream=True, timeout=seconds, **options) as response:
        pieces = [without_ids(piece) for piece in response.iter_content(chunk_size=None)]
        headers = _compared(response.status_code, {name.lower(): value for name, value in response.headers.items()})
        return [Reply(response.status_code, headers, pieces)]


def _ts_scripts(arguments: Sequence[str], folder: Path, seconds: int) -> list[Reply]:
    """``ts_scripts ADDRESS MODEL FILE``: TorchServe's own client, in a checkout of it at ``folder``."""
    address, model, file = arguments
    url = urlsplit(address)
    script = f"import sys; sys.path.insert(0, {str(folder)!r}); from ts_scripts.tsutils import run_inference\n"
    script += f"reply = run_inference({model!r}, {file!r}, host={url.hostname!r}, port={str(url.port)!r})\n"
    script += "sys.stdout.buffer.write(b'%d ' % reply.status_code + reply.content)"
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, timeout=seconds + 60)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    status, _, body = done.stdout.partition(f"## Running inference on {model} model\n".encode())[2].partition(b" ")
    return [Reply(int(status), {}, [body])]


_CLIENTS: Mapping[str, Callable[[Sequence[str], Path, int], list[Reply]]] = {
    "curl": _curl,
    "requests": _requests,
    "ts_scripts": _ts_scripts,
}
