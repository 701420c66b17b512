"""A call of TorchServe's gRPC inference service as a line of words, and its reply.

``inference:Predictions model_name=echo input.data=hello metadata.x-own=yes timeout=1``: fields of the request, entries
of its ``input`` (``@`` before a file's name), metadata, seconds until the deadline. ``+`` begins another request of the
same call, which is sent when the one before it has a response.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Semaphore
from typing import Any

import grpc
from google.protobuf import empty_pb2, json_format

from tests.torchserve.beside.reply import Reply, without_ids
from tests.torchserve.beside.servers import Addresses
from tests.torchserve.inference_client import PredictionsRequest, Stub

_ALL_SIZES = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def call(words: Sequence[str], addresses: Addresses, folder: Path, seconds: float) -> Reply:
    """Returns the messages, the metadata and the status. ``folder`` has the files that the words name."""
    method = words[0].removeprefix("inference:")
    requests, metadata, timeout = _read(method, words[1:], addresses, folder)
    with grpc.insecure_channel(addresses.grpc_inference, options=_ALL_SIZES) as channel:
        options = {"metadata": metadata, "timeout": timeout or seconds}
        return _answers(getattr(Stub(channel), method), method, requests, options, seconds)


def _read(
    method: str, words: Sequence[str], addresses: Addresses, folder: Path
) -> tuple[list[Any], list[tuple[str, str]], float]:
    """Returns the requests, the metadata, and the timeout, which is 0 if none is given."""
    make = empty_pb2.Empty if method == "Ping" else PredictionsRequest
    requests, metadata, timeout = [make()], [], 0.0
    for word in words:
        name, _, value = word.partition("=")
        if word == "+":
            requests.append(make())
        elif name == "timeout":
            timeout = float(value)
        elif name.startswith("metadata."):
            metadata.append((name.removeprefix("metadata."), value.replace("<token>", addresses.token)))
        elif name.startswith("input."):
            given = (folder / value[1:]).read_bytes() if value.startswith("@") else value.encode()
            requests[-1].input[name.removeprefix("input.")] = given
        else:
            json_format.ParseDict({name: {"true": True}.get(value, value)}, requests[-1])
    return requests, metadata, timeout


def _answers(ask: Any, method: str, requests: Sequence[Any], options: dict[str, Any], seconds: float) -> Reply:
    answered = Semaphore(0)

    def one_by_one() -> Iterator[Any]:
        for request in requests:
            yield request
            answered.acquire(timeout=seconds)

    pieces = []
    try:
        if method.startswith("Stream"):
            running = ask(one_by_one() if method.endswith("2") else requests[0], **options)
            for response in running:
                pieces.append(_shown(response))
                answered.release()
        else:
            response, running = ask.with_call(requests[0], **options)
            pieces.append(_shown(response))
    except grpc.RpcError as error:
        running = error
    finally:
        answered.release(len(requests))
    metadata = {key: str(value) for key, value in (*running.initial_metadata(), *running.trailing_metadata())}
    said = without_ids((running.details() or "").encode()).decode()
    return Reply(running.code().name, metadata, pieces, details=said)


def _shown(response: Any) -> bytes:
    """Returns the one field of a response; for a prediction also its sequence and its status, if it has them."""
    text = next(bytes(getattr(response, name)) if name == "prediction" else str(getattr(response, name)).encode()
                for name in ("prediction", "health") if hasattr(response, name))  # fmt: skip
    if not hasattr(response, "prediction"):
        return without_ids(text)
    if response.HasField("sequence_id") and response.sequence_id:
        text = f"{response.sequence_id}: ".encode() + text
    if response.HasField("status"):
        text += f"status {response.status.code} {response.status.message}".encode()
        text += b"".join(b" " + detail for detail in response.status.details)
    return without_ids(text)
