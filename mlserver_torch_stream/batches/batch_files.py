"""Reads the input of a batch before any row is answered, and writes its output and error files.

Files that are written twice, as after a crash, are the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field

from mlserver_torch_stream.batches.batch_record import BatchProblem, output_file_id
from mlserver_torch_stream.batches.file_store import OUTPUT_PURPOSE, FileStore
from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.naming import part_name
from mlserver_torch_stream.cloud.rows import ObjectMissing, Row
from mlserver_torch_stream.cloud.store import ObjectUpload, Store
from mlserver_torch_stream.protocol.openai_batch import is_answered, plain_line

MAX_ROWS = 50_000  # OpenAI's bound
_MAX_PROBLEMS = 20
_ROWS_AT_A_TIME = 32
_EMPTY = BatchProblem("empty_file", "the input file holds no rows")
_TOO_MANY = BatchProblem("too_many_rows", f"the input file holds more than {MAX_ROWS} rows")


@dataclass(frozen=True, slots=True)
class InputSummary:
    """``problems``: why no row of it is answered; empty if they are."""

    rows: int
    models: tuple[str, ...]
    problems: tuple[BatchProblem, ...]


async def check_input(rows: AsyncGenerator[Row, None], is_loaded: Callable[[str], bool]) -> InputSummary:
    """Stops at the first row that is one too many, and where the file cannot be read."""
    count, models = 0, set[str]()
    seen = set[bytes]()
    problems: list[BatchProblem] = []
    async with aclosing(rows) as source:
        async for row in source:
            count += 1
            if count > MAX_ROWS:
                return InputSummary(count, (), (_TOO_MANY,))
            if row.failure is not None and row.line is None:
                return InputSummary(count, (), (BatchProblem(row.failure.code, "the input file cannot be read"),))
            model = None if row.body is None else row.body.get("model")
            if isinstance(model, str) and is_loaded(model):
                models.add(model)
            name = hashlib.blake2b(row.custom_id.encode("utf-8", "replace"), digest_size=16).digest()
            if name in seen and len(problems) < _MAX_PROBLEMS:
                problems.append(_duplicate(row))
            seen.add(name)
            if count % _ROWS_AT_A_TIME == 0:
                await asyncio.sleep(0)  # the rows of a block are parsed without a wait; streams of the server run here
    return InputSummary(count, tuple(sorted(models)), tuple(problems) if count else (_EMPTY,))


def _duplicate(row: Row) -> BatchProblem:
    message = (
        f"custom_id {row.custom_id[:100]!r} stands on an earlier line too, so that answers could not be told apart"
    )
    return BatchProblem("duplicate_custom_id", message, "custom_id", row.line)


_Line = tuple[bytes, bool, str | None]  # the line, whether it bears an answer, and the code of its error


@dataclass(frozen=True, slots=True)
class BatchOutput:
    """The ids of the files, None for one that would be empty; the counts of rows; the codes of rows without an
    answer."""

    output_file_id: str | None
    error_file_id: str | None
    completed: int
    failed: int
    codes: frozenset[str]


@dataclass
class _OutputFile:
    """A file that is begun with its first row."""

    files: FileStore
    id: str
    rows: int = 0
    upload: ObjectUpload | None = None
    codes: set[str] = field(default_factory=set)

    async def write(self, lines: list[_Line]) -> None:
        if not lines:
            return
        if self.upload is None:
            self.upload = self.files.rewrite(self.id)
        await self.upload.write(b"".join(line for line, *_ in lines))
        self.rows += len(lines)
        self.codes.update(code for *_, code in lines if code is not None)

    async def end(self, filename: str) -> str | None:
        if self.upload is None:
            return None
        await self.upload.close()
        await self.files.describe(self.id, self.upload.size, filename, OUTPUT_PURPOSE)
        return self.id


async def write_output_files(
    batch_id: str,
    run: Store,
    files: FileStore,
    retry: Retry,
    missing: Callable[[int], AsyncGenerator[bytes, None]],
) -> BatchOutput:
    """``missing``: the output rows from a number on, which follow the last part. Raises CloudError."""
    answered = _OutputFile(files, output_file_id(batch_id, "output"))
    failed = _OutputFile(files, output_file_id(batch_id, "errors"))
    number = 0

    async def write(rows: bytes) -> None:
        lines = await asyncio.to_thread(lambda: list(_lines(rows)))
        await answered.write([line for line in lines if line[1]])
        await failed.write([line for line in lines if not line[1]])

    while True:
        try:
            part = await retry.run(run.get, part_name(number))
        except ObjectMissing:
            break
        await write(part)
        number += 1
    async with aclosing(missing(answered.rows + failed.rows)) as blocks:
        async for block in blocks:
            await write(block)
    return BatchOutput(
        await answered.end(f"{batch_id}_output.jsonl"),
        await failed.end(f"{batch_id}_error.jsonl"),
        answered.rows,
        failed.rows,
        frozenset(failed.codes),
    )


def _lines(part: bytes) -> Iterator[_Line]:
    for raw in part.splitlines():
        line = json.loads(raw)
        code = line["error"]["code"] if line["error"] is not None else None
        text = json.dumps(plain_line(line), ensure_ascii=False, separators=(",", ":"))
        yield text.encode() + b"\n", is_answered(line), code
