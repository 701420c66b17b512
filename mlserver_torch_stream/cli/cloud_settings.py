"""Checks the options of ``cloud run`` and ``cloud watch``, and turns them into the settings of the run."""

from __future__ import annotations

import argparse
import json
import os
import re
from typing import Any

from mlserver_torch_stream.cli.argument_types import openai_key
from mlserver_torch_stream.cli.cloud_options import STDOUT, URL_DEFAULTS
from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.endpoint import ServerEndpoint
from mlserver_torch_stream.cloud.parse import WHOLE_BYTES, Chunking
from mlserver_torch_stream.cloud.pipeline import PipelineLimits
from mlserver_torch_stream.cloud.prefetch import PrefetchedRange
from mlserver_torch_stream.cloud.requests import ObjectRequest, RowRequest
from mlserver_torch_stream.cloud.rows import Kind, RunRefused
from mlserver_torch_stream.cloud.run import CloudRun
from mlserver_torch_stream.cloud.tables import Tables
from mlserver_torch_stream.model_source import find_path

OK, ROWS_FAILED, REFUSED, ENDED, INTERRUPTED = 0, 1, 2, 3, 130


def make_row_request(arguments: argparse.Namespace, *models: str) -> RowRequest:
    """Returns how rows become requests. A row's ``model`` may be a name in ``models`` or in --served-model-name."""
    media = arguments.url is not None and arguments.api == "openai"
    return RowRequest(arguments.parameters, arguments.chat, media, {*arguments.served_model_name, *models})


def make_endpoint(arguments: argparse.Namespace, model: str) -> ServerEndpoint:
    """Returns the endpoint of the model at --url."""
    return ServerEndpoint(
        arguments.url,
        model,
        "v2" if arguments.tensor is not None else arguments.api,
        rows=make_row_request(arguments, model),
        objects=object_request(arguments) if hands_objects(arguments) else None,
        tensor=arguments.tensor,
        batches=False,
        concurrency=arguments.concurrency,
        stream=not arguments.unary,
        key=api_key(),
        timeout=arguments.timeout,
        name=shown_name(arguments),
    )


def shown_name(arguments: argparse.Namespace) -> str | None:
    """Returns the model's name in answers if --served-model-name sets it; else None."""
    return arguments.served_model_name[0] if arguments.served_model_name else None


def created() -> int | None:
    """Returns the creation time for output rows if SOURCE_DATE_EPOCH sets it, which makes runs reproducible; else None.

    Raises RunRefused if the variable is not a whole number.
    """
    text = os.environ.get("SOURCE_DATE_EPOCH")
    if not text:
        return None
    if not text.isdecimal():
        raise RunRefused(f"SOURCE_DATE_EPOCH: must be a whole number of seconds, got {text!r}")
    return int(text)


def make_limits(arguments: argparse.Namespace, batch_rows: int = 8, batches: int = 8) -> PipelineLimits:
    """Returns the limits of the stages. ``batch_rows`` and ``batches`` are the defaults of the options."""
    remote = arguments.url is not None
    rows = arguments.batch_rows or (1 if remote else batch_rows)
    batches = arguments.batches or (arguments.concurrency if remote else batches)
    weight = arguments.batch_tokens or arguments.batch_bytes or 16 * 2**20
    return PipelineLimits(arguments.window, arguments.window_bytes, rows, weight, arguments.max_wait, batches)


def make_run(arguments: argparse.Namespace, model: str) -> CloudRun:
    """Returns the run. ``model`` is the model's name or location, which is part of the run's identity."""
    index, count = arguments.worker
    failures = 0 if arguments.fail_fast else arguments.max_failures
    return CloudRun(
        input=arguments.input,
        model=identity(arguments, model),
        output=None if arguments.output == STDOUT else arguments.output,
        glob=arguments.glob,
        manifest=arguments.manifest,
        kind=kind_for_all(arguments),
        part_rows=arguments.part_rows,
        lane=index,
        lanes=count,
        max_failures=failures,
        retry_failed=arguments.retry_failed,
        limits=make_limits(arguments),
        ahead=PrefetchedRange(arguments.prefetch, arguments.prefetch_bytes),
        retry=Retry(arguments.tries),
        stall_s=arguments.stall,
        storage=dict(arguments.storage),
        created=created(),
        chunking=chunking(arguments),
        tables=tables(arguments),
        limit=arguments.limit,
    )


def identity(arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    """Returns the options on which answers depend. A run with other values of these options cannot resume the
    output.
    """
    by = "handler" if arguments.handler else "engine" if arguments.url is None else arguments.api
    shaping = {"parameters": arguments.parameters, "chat": arguments.chat, "extra": arguments.extra}
    of_objects = {} if arguments.tensor is None else {"tensor": arguments.tensor}
    if arguments.rows == "piece":
        of_objects["rows"] = arguments.rows
    return {"name": model, "by": by, **shaping, "served": arguments.served_model_name, **of_objects}


def check(arguments: argparse.Namespace) -> None:
    """Raises RunRefused if options contradict each other; the message names one of them."""
    check_object_options(arguments)
    for name, default in URL_DEFAULTS.items():
        if arguments.url is None and getattr(arguments, name) is not None:
            raise RunRefused(f"--{name}: applies only to requests to a server; give its --url")
        if arguments.url is not None and getattr(arguments, name) is None:
            setattr(arguments, name, default)
    if arguments.url is None and (arguments.api != "v2" or arguments.unary):
        raise RunRefused("--api and --unary: apply only to requests to a server; give its --url")
    if arguments.url is not None and arguments.extra:
        raise RunRefused("--extra: cannot be combined with --url, because the server has its own settings")
    if arguments.url is not None and arguments.batch_tokens:
        raise RunRefused("--batch-tokens: with --url the prompts' tokens are not known; use --batch-bytes")
    if arguments.batch_tokens and arguments.batch_bytes:
        raise RunRefused("--batch-bytes: a batch is bounded by bytes or by --batch-tokens, not by both")
    if arguments.command == "run" and arguments.on is not None:
        if arguments.output == STDOUT:
            raise RunRefused("--on: several workers need an --output that they share")
        if arguments.worker != (1, 1):
            raise RunRefused("--worker: cannot be combined with --on, which sets it")


def api_key() -> str | None:
    """Returns the API key in the environment, or None. Raises RunRefused if a header cannot contain the key."""
    try:
        return openai_key()
    except ValueError as error:
        raise RunRefused(str(error)) from None


_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_MAX_HEADERS = 2**20  # bytes
_SET_HERE = re.compile(r"x-(object|chunk)-.*|x-request-id|content-.*|host|connection|transfer-encoding")
_TEXT = re.compile(r"[\t\x20-\x7e]*")


def hands_objects(arguments: argparse.Namespace) -> bool:
    """True if the bytes of objects are passed on unchanged, to a handler or as a tensor."""
    return arguments.handler is not None or arguments.api == "torchserve" or arguments.tensor is not None


def kind_for_all(arguments: argparse.Namespace) -> Kind | None:
    """Returns the kind of all objects; None if the endings of their keys decide."""
    if hands_objects(arguments) and not getattr(arguments, "column", None):
        return Kind.BYTES
    return None if arguments.kind is None else Kind(arguments.kind)


def tables(arguments: argparse.Namespace) -> Tables:
    """Returns how tables and archives are read. Raises RunRefused if one of their options is wrong.

    A handler or a tensor gets the unchanged archive, unless an option asks for its members.
    """
    data = hands_objects(arguments)
    return Tables(
        tuple(arguments.column),
        arguments.header,
        arguments.encoding,
        arguments.delimiter,
        arguments.quote,
        data=data,
        archives=not data or bool(arguments.column) or arguments.members is not None,
        members=arguments.members,
    )


def chunking(arguments: argparse.Namespace) -> Chunking:
    """Returns how whole objects are cut into chunks."""
    joined, most = arguments.rows == "object", arguments.whole_bytes or WHOLE_BYTES
    return Chunking(arguments.chunk_bytes, joined, most, arguments.sequences)


def object_request(arguments: argparse.Namespace) -> ObjectRequest:
    """Returns how whole objects become requests. Raises RunRefused for a header that cannot be sent."""
    headers = {}
    for name, value in arguments.parameters.items():
        if not isinstance(value, str | int | float) or not _HEADER.fullmatch(name) or not _TEXT.fullmatch(str(value)):
            rule = "the name must be a valid HTTP header name, and the value a number or printable ASCII text"
            raise RunRefused(f"--parameters: {name}: {rule}")
        if _SET_HERE.fullmatch(name.lower()):
            raise RunRefused(f"--parameters: {name}: cannot be set, because the command sets it for each request")
        headers[name.lower()] = value if isinstance(value, str) else json.dumps(value)
    return ObjectRequest(headers, arguments.rows == "piece")


def check_object_options(arguments: argparse.Namespace) -> None:
    """Raises RunRefused if options for whole objects contradict each other or an option for prompts."""
    if arguments.sequences:
        if arguments.handler is None:
            raise RunRefused("--sequences: needs a --handler")
        if arguments.chunk_bytes is None:
            raise RunRefused("--sequences: needs --chunk-bytes, because a sequence consists of an object's chunks")
        if arguments.rows != "object":
            raise RunRefused("--rows: with --sequences an object is one row, since its chunks share a state")
    if not hands_objects(arguments):
        for name, given in (
            ("chunk-bytes", arguments.chunk_bytes),
            ("whole-bytes", arguments.whole_bytes),
            ("rows", arguments.rows != "object"),
        ):
            if given:
                raise RunRefused(f"--{name}: applies only with --handler, --api torchserve or --tensor")
        return
    _check_taker(arguments)
    columns = getattr(arguments, "column", None)
    if arguments.chunk_bytes is not None and (columns or getattr(arguments, "members", None)):
        raise RunRefused("--chunk-bytes: splits whole objects, so it cannot be combined with --column or --members")
    if arguments.rows == "chunk" and arguments.chunk_bytes is None:
        raise RunRefused("--rows: chunk needs --chunk-bytes")
    if arguments.whole_bytes is not None and arguments.chunk_bytes is not None:
        raise RunRefused("--whole-bytes: is for objects that are not split into chunks; leave out --chunk-bytes")
    for name, value in (
        ("as", arguments.kind if not columns else None),
        ("chat", arguments.chat),
        ("served-model-name", arguments.served_model_name),
        ("unary", arguments.unary),
        ("batch-tokens", arguments.batch_tokens),
        ("kafka", getattr(arguments, "kafka", None)),
    ):
        if value:
            raise RunRefused(f"--{name}: applies only to prompts, not to --handler, --api torchserve or --tensor")
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
            raise RunRefused("--model: --api torchserve needs the name of the model at --url, as name or name/version")
        if arguments.tensor is not None:
            raise RunRefused("--tensor: is for V2 servers; --api torchserve posts the bytes themselves")
    else:
        if arguments.url is None or arguments.api != "v2":
            raise RunRefused("--tensor: needs the --url of a V2 server, and --api v2")
        if arguments.rows == "piece":
            raise RunRefused("--rows: a V2 server is asked for whole answers, which have no pieces")


def _check_message(arguments: argparse.Namespace) -> None:
    """Raises RunRefused if a chunk or a whole object, with its headers, may be too large for one message to a
    worker.
    """
    from mlserver_torch_stream.handlers.frames import MAX_BYTES

    most = MAX_BYTES - _MAX_HEADERS
    if max(arguments.chunk_bytes or 0, arguments.whole_bytes or 0) > most:
        name = "chunk" if arguments.chunk_bytes else "whole"
        raise RunRefused(f"--{name}-bytes: a handler accepts at most {most} bytes at a time")
