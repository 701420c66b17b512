"""The options of ``mlserver-torch-stream cloud`` for objects whose bytes are passed on unchanged."""

from __future__ import annotations

import argparse
import json
import re

from mlserver_torch_stream.cli.argument_types import nbytes
from mlserver_torch_stream.cli.object_row import ObjectRequest
from mlserver_torch_stream.cloud.parse import WHOLE_BYTES, Chunking
from mlserver_torch_stream.cloud.rows import Kind, RunRefused
from mlserver_torch_stream.model_source import find_path

_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_MAX_HEADERS = 2**20  # bytes
_SET_HERE = re.compile(r"x-(object|chunk)-.*|x-request-id|content-.*|host|connection|transfer-encoding")
_TEXT = re.compile(r"[\t\x20-\x7e]*")


def add_objects(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--handler",
        metavar="FILE|MAR",
        help="pass each object to this TorchServe handler, which runs in separate processes",
    )
    command.add_argument("--tensor", metavar="NAME", help="send each object to --url as a BYTES tensor of this name")
    command.add_argument("--chunk-bytes", type=nbytes, help="split objects of any size into chunks of so many bytes")
    command.add_argument("--whole-bytes", type=nbytes, help="the most bytes of a whole object (default: 64MiB)")
    command.add_argument(
        "--rows",
        choices=["object", "chunk", "piece"],
        default="object",
        help="write an output row for each object, chunk, or piece of a streamed answer (default: %(default)s)",
    )


def hands_objects(arguments: argparse.Namespace) -> bool:
    """True if the bytes of objects are passed on unchanged, to a handler or as a tensor."""
    return arguments.handler is not None or arguments.api == "torchserve" or arguments.tensor is not None


def kind_for_all(arguments: argparse.Namespace) -> Kind | None:
    """How all objects are read; None: by their endings."""
    if hands_objects(arguments):
        return Kind.BYTES
    return None if arguments.kind is None else Kind(arguments.kind)


def chunking(arguments: argparse.Namespace) -> Chunking:
    return Chunking(arguments.chunk_bytes, arguments.rows == "object", arguments.whole_bytes or WHOLE_BYTES)


def object_request(arguments: argparse.Namespace) -> ObjectRequest:
    """Raises RunRefused."""
    headers = {}
    for name, value in arguments.parameters.items():
        if not isinstance(value, str | int | float) or not _HEADER.fullmatch(name) or not _TEXT.fullmatch(str(value)):
            raise RunRefused(f"--parameters: {name}: must be the name and the text of a header")
        if _SET_HERE.fullmatch(name.lower()):
            raise RunRefused(f"--parameters: {name}: is set for each request")
        headers[name.lower()] = value if isinstance(value, str) else json.dumps(value)
    return ObjectRequest(headers, arguments.rows == "piece")


def check_object_options(arguments: argparse.Namespace) -> None:
    """Raises RunRefused if two options of whole objects, or one of them and an option of prompts, contradict."""
    if not hands_objects(arguments):
        for name, given in (
            ("chunk-bytes", arguments.chunk_bytes),
            ("whole-bytes", arguments.whole_bytes),
            ("rows", arguments.rows != "object"),
        ):
            if given:
                raise RunRefused(f"--{name}: is for objects that --handler, --api torchserve or --tensor takes")
        return
    _check_taker(arguments)
    if arguments.rows == "chunk" and arguments.chunk_bytes is None:
        raise RunRefused("--rows: chunk needs --chunk-bytes")
    if arguments.whole_bytes is not None and arguments.chunk_bytes is not None:
        raise RunRefused("--whole-bytes: is for objects that are not split into chunks; leave out --chunk-bytes")
    for name, value in (
        ("as", arguments.kind),
        ("chat", arguments.chat),
        ("served-model-name", arguments.served_model_name),
        ("unary", arguments.unary),
        ("batch-tokens", arguments.batch_tokens),
        ("kafka", getattr(arguments, "kafka", None)),
    ):
        if value:
            raise RunRefused(f"--{name}: is for prompts, not for --handler, --api torchserve or --tensor")
    object_request(arguments)


def _check_taker(arguments: argparse.Namespace) -> None:
    if arguments.handler is not None:
        for name in ("model", "url", "tensor"):
            if getattr(arguments, name) is not None:
                raise RunRefused(f"--{name}: is for a server or an engine, and cannot be combined with --handler")
        if find_path(re.sub(r"(?<=\.py):\w+$", "", arguments.handler), None) is None:
            raise RunRefused(f"--handler: no such file: {arguments.handler}")
        _check_message(arguments)
    elif arguments.api == "torchserve":
        if arguments.url is None:
            raise RunRefused("--url: --api torchserve needs the URL of the server")
        if arguments.model is None:
            raise RunRefused("--model: names the handler's model at --url, as in name or name/version")
        if arguments.tensor is not None:
            raise RunRefused("--tensor: is for V2 servers; --api torchserve posts the bytes themselves")
    else:
        if arguments.url is None or arguments.api != "v2":
            raise RunRefused("--tensor: is for a V2 server; give its --url")
        if arguments.rows == "piece":
            raise RunRefused("--rows: a V2 server is asked for whole answers, which have no pieces")


def _check_message(arguments: argparse.Namespace) -> None:
    """A chunk, or a whole object, and its headers are one message to a worker."""
    from mlserver_torch_stream.handlers.frames import MAX_BYTES

    most = MAX_BYTES - _MAX_HEADERS
    if max(arguments.chunk_bytes or 0, arguments.whole_bytes or 0) > most:
        name = "chunk" if arguments.chunk_bytes else "whole"
        raise RunRefused(f"--{name}-bytes: a handler takes at most {most} bytes at a time")
