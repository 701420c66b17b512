"""The options of ``mlserver-torch-stream cloud``."""

from __future__ import annotations

import argparse
import json
from typing import Any

from mlserver_torch_stream.cli.argument_types import count, listen_address, nbytes, positive, seconds
from mlserver_torch_stream.cloud.rows import Kind
from mlserver_torch_stream.cloud.tables import Column

STDOUT = "-"
URL_DEFAULTS = {"concurrency": 32, "timeout": 300.0}  # the defaults of options that need --url
# The defaults of options for tables, which cannot be combined with --kafka.
TABLE_DEFAULTS = {
    "column": [],
    "header": False,
    "encoding": "utf-8",
    "delimiter": None,
    "quote": '"',
    "members": None,
}
_STATUS_HELP = "Exit status: 0 all rows answered, 1 some failed, 2 not started, 3 ended early, 130 interrupted."


def parser() -> argparse.ArgumentParser:
    """Returns the parser of ``cloud run`` and ``cloud watch``."""
    whole = argparse.ArgumentParser(
        prog="mlserver-torch-stream cloud",
        description="Answer prompts from objects of a bucket, a folder or a web server.",
    )
    commands = whole.add_subparsers(dest="command", metavar="command", required=True)
    run = commands.add_parser("run", help="answer the prompts of all objects, and end", epilog=_STATUS_HELP)
    _add_input(run)
    _add_model(run)
    _add_objects(run)
    _add_stages(run)
    _add_tables(run)
    _add_ending(run)
    watch = commands.add_parser(
        "watch", help="answer the prompts of objects or records as they arrive", epilog=_STATUS_HELP
    )
    _add_watch(watch)
    watch.set_defaults(dry_run=False)
    _add_model(watch)
    _add_objects(watch)
    _add_stages(watch)
    _add_tables(watch)
    return whole


def _add_input(run: argparse.ArgumentParser) -> None:
    run.add_argument("--input", help="s3://, gs://, az://, http(s)://, a folder, or one object")
    run.add_argument("--output", default=STDOUT, help="a prefix for numbered parts; - is JSONL on stdout (default)")
    run.add_argument("--glob", help="keys below --input: * within a level, ** across levels")
    run.add_argument(
        "--manifest",
        help="an object that names keys below --input, one per line; without --input, URLs of any hosts and buckets",
    )
    run.add_argument("--part-rows", type=int, default=64, help="rows in one part (default: %(default)s)")
    run.add_argument(
        "--worker", type=_worker, default=(1, 1), metavar="I/N", help="write every N-th part, from the I-th"
    )
    run.add_argument("--limit", type=positive, help="read only the first rows of the input, at most this many")
    run.add_argument("--on", choices=["ray"], help="spread the parts over a Ray cluster")
    run.add_argument("--workers", type=positive, default=2, help="workers that --on starts (default: %(default)s)")


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model", help="the model to load: embedded://…, a folder, a .gguf file, a hub id; with --url its name"
    )
    command.add_argument(
        "--served-model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help="further names of the model that rows may use",
    )
    command.add_argument("--url", help="ask this server instead of one that the command starts")
    command.add_argument(
        "--api", choices=["v2", "openai", "torchserve"], default="v2", help="the protocol of --url (default: v2)"
    )
    command.add_argument("--unary", action="store_true", help="ask --url for whole answers instead of streams")
    command.add_argument(
        "--concurrency",
        type=positive,
        help=f"the maximum number of requests in flight at --url (default: {URL_DEFAULTS['concurrency']})",
    )
    command.add_argument(
        "--timeout",
        type=seconds,
        help=f"seconds to wait while --url sends nothing (default: {URL_DEFAULTS['timeout']:g})",
    )
    command.add_argument("--extra", type=_object, default={}, help="settings of the engine or of --handler, as JSON")
    command.add_argument(
        "--parameters",
        type=_object,
        default={},
        help="request parameters for rows that lack them, or headers for a handler, as JSON",
    )
    command.add_argument("--chat", action="store_true", help="a text object is a user's message, not a raw prompt")
    command.add_argument(
        "--as",
        dest="kind",
        choices=[kind.value for kind in Kind if kind is not Kind.ARCHIVE],
        help="read all objects as this kind (default: by their endings)",
    )


def _add_objects(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--handler",
        metavar="FILE|MAR",
        help="pass each object to this TorchServe handler, which runs in separate processes",
    )
    command.add_argument("--tensor", metavar="NAME", help="send each object to --url as a BYTES tensor of this name")
    command.add_argument("--chunk-bytes", type=nbytes, help="split objects of any size into chunks of this many bytes")
    command.add_argument(
        "--sequences",
        action="store_true",
        help="send the chunks of an object to one worker of a stateful --handler, in order",
    )
    command.add_argument("--whole-bytes", type=nbytes, help="the maximum size of a whole object (default: 64MiB)")
    command.add_argument(
        "--rows",
        choices=["object", "chunk", "piece"],
        default="object",
        help="write an output row for each object, chunk, or piece of a streamed answer (default: %(default)s)",
    )


def _add_tables(run: argparse.ArgumentParser) -> None:
    run.add_argument(
        "--column",
        type=_column,
        action="append",
        default=[],
        metavar="COLUMN[=FIELD]",
        help="the CSV or TSV column (a name, or a number from 1) or the JSONL key that becomes the prompt or the body "
        "of a row; with =FIELD, that field of the body",
    )
    run.add_argument("--header", action="store_true", help="the first record names the columns; implied by a name")
    run.add_argument(
        "--encoding", default=TABLE_DEFAULTS["encoding"], help="the encoding of tables (default: %(default)s)"
    )
    run.add_argument("--delimiter", help="the character between columns (default: a comma, in TSV a tab)")
    run.add_argument(
        "--quote", default=TABLE_DEFAULTS["quote"], help='the character that quotes; "" for none (default: %(default)s)'
    )
    run.add_argument("--members", metavar="GLOB", help="read these members of archives: * within a level, ** across")


def _add_stages(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--storage",
        type=_pair,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the object store, such as endpoint=…",
    )
    command.add_argument("--prefetch", type=positive, default=32, help="objects fetched ahead (default: %(default)s)")
    command.add_argument(
        "--prefetch-bytes",
        type=nbytes,
        default=64 * 2**20,
        help="the maximum number of bytes that are fetched ahead (default: 64MiB)",
    )
    command.add_argument(
        "--batch-rows",
        type=positive,
        help="the maximum number of rows in a batch (default: 8; with --url, 1; with --handler, its batchSize)",
    )
    command.add_argument(
        "--batch-bytes", type=nbytes, help="the maximum number of bytes of input in a batch (default: 16MiB)"
    )
    command.add_argument(
        "--batch-tokens",
        type=positive,
        help="the maximum number of tokens of prompts in a batch, instead of --batch-bytes",
    )
    command.add_argument(
        "--max-wait",
        type=seconds,
        default=0.05,
        help="the maximum number of seconds that a batch waits after its first row (default: %(default)s)",
    )
    command.add_argument(
        "--batches",
        type=positive,
        help="the maximum number of batches in flight (default: 8; with --url, --concurrency; with --handler, a few "
        "more than its workers)",
    )
    command.add_argument(
        "--window",
        type=positive,
        default=256,
        help="the maximum number of rows that are read and not delivered yet (default: %(default)s)",
    )
    command.add_argument(
        "--window-bytes",
        type=nbytes,
        default=128 * 2**20,
        help="the maximum number of input bytes in these rows (default: 128MiB)",
    )
    command.add_argument(
        "--tries", type=positive, default=6, help="attempts at each fetch and write (default: %(default)s)"
    )
    command.add_argument(
        "--stall", type=seconds, default=30.0, help="seconds to wait while a store sends nothing (default: %(default)s)"
    )
    command.add_argument("--metrics", metavar="FILE", help="write the run's metrics to this file, as JSON")


def _add_ending(run: argparse.ArgumentParser) -> None:
    run.add_argument("--dry-run", action="store_true", help="print what the run would do, and do nothing")
    run.add_argument("--retry-failed", action="store_true", help="infer the failed rows of --output again, in place")
    failures = run.add_mutually_exclusive_group()
    failures.add_argument("--fail-fast", action="store_true", help="end the run at the first row that fails")
    failures.add_argument("--max-failures", type=count, help="end the run when more rows than this fail")
    run.add_argument(
        "--progress",
        choices=["auto", "on", "off"],
        default="auto",
        help="show the progress; auto: if stderr is a terminal",
    )


def _add_watch(watch: argparse.ArgumentParser) -> None:
    watch.add_argument("--input", help="the prefix whose new objects are inferred")
    watch.add_argument("--output", required=True, help="a prefix for the results")
    watch.add_argument("--glob", help="keys below --input")
    watch.add_argument(
        "--queue", help="URL of the SQS queue with the notifications of new objects; without it --input is polled"
    )
    watch.add_argument(
        "--listen",
        type=listen_address,
        metavar="[HOST:]PORT",
        help="receive notifications of new objects over HTTP (host: 127.0.0.1)",
    )
    watch.add_argument("--listen-key", metavar="FILE", help="with --listen: a file with the key that events must carry")
    watch.add_argument(
        "--listen-tls", nargs=2, metavar=("CERTIFICATE", "KEY"), help="with --listen: PEM files, for https"
    )
    watch.add_argument(
        "--sns-topic", action="append", default=[], metavar="ARN", help="with --listen: accept messages of this topic"
    )
    watch.add_argument("--poll", type=seconds, default=2.0, help="seconds between two polls (default: %(default)s)")
    watch.add_argument("--kafka", metavar="HOST:PORT", help="read rows from Kafka instead of objects")
    watch.add_argument("--topic", help="with --kafka: the topic to read")
    watch.add_argument("--group", help="with --kafka: the consumer group whose offsets are committed")
    watch.add_argument(
        "--dead-letter", metavar="TOPIC", help="with --kafka: a topic to which failed records are sent too"
    )
    watch.add_argument(
        "--part-rows",
        type=positive,
        default=64,
        help="rows in one part of an archive's result, or with --kafka (default: %(default)s)",
    )
    watch.add_argument("--limit", type=positive, help="end after this many objects or records")


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def _column(text: str) -> Column:
    try:
        return Column.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError("must be KEY=VALUE")
    return name, value


def _worker(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    try:
        worker = int(index), int(count)
    except ValueError:
        raise argparse.ArgumentTypeError("must be I/N") from None
    if not 1 <= worker[0] <= worker[1]:
        raise argparse.ArgumentTypeError("must be I/N with I from 1 to N")
    return worker
