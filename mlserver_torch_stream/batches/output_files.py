"""Writes the output and the error file of a batch from the parts of its run, row by row.

Knows nothing of how rows are answered. Written twice, as after a crash, the files are the same.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field

from mlserver_torch_stream.batches.file_store import OUTPUT_PURPOSE, FileStore
from mlserver_torch_stream.batches.object_ids import output_file_id
from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.cloud_errors import ObjectMissing
from mlserver_torch_stream.cloud.naming import part_name
from mlserver_torch_stream.cloud.object_upload import ObjectUpload
from mlserver_torch_stream.cloud.store import Store
from mlserver_torch_stream.protocol.openai_batch import is_answered, plain_line

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
