"""Reads the input of a batch before any item is answered, and writes its output and error files.

If a file is written a second time, for example after a crash, it gets the same bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass

from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.batches.batch_record import BatchProblem, output_file_id
from mlserver_torch_stream.cloud.batches.batch_store import FileStore, FileUpload
from mlserver_torch_stream.cloud.naming import part_name
from mlserver_torch_stream.cloud.rows import ObjectMissing, Row
from mlserver_torch_stream.cloud.store import Store
from mlserver_torch_stream.protocol.openai_batch import is_answered, plain_line
from mlserver_torch_stream.protocol.openai_batch_models import OUTPUT_PURPOSE

MAX_ITEMS = 50_000  # OpenAI's bound
_MAX_PROBLEMS = 20
_ITEMS_AT_A_TIME = 32
_EMPTY = BatchProblem("empty_file", "the input file has no rows")
_TOO_MANY = BatchProblem("too_many_rows", f"the input file has more than {MAX_ITEMS} rows")


@dataclass(frozen=True, slots=True)
class InputSummary:
    """The result of checking a batch's input. ``problems`` are the reasons why no item is answered; empty if the input
    is valid.
    """

    items: int = 0
    models: tuple[str, ...] = ()
    problems: tuple[BatchProblem, ...] = ()


async def check_input(items: AsyncGenerator[Row, None], is_loaded: Callable[[str], bool]) -> InputSummary:
    """Checks the items of an input file. Stops at the first item beyond ``MAX_ITEMS``, or where the file is damaged."""
    count, models = 0, set[str]()
    seen = set[bytes]()
    problems: list[BatchProblem] = []
    async with aclosing(items) as source:
        async for item in source:
            count += 1
            if count > MAX_ITEMS:
                return InputSummary(problems=(_TOO_MANY,))
            if item.failure is not None and item.line is None:
                return InputSummary(problems=(BatchProblem(item.failure.code, "the input file cannot be read"),))
            model = None if item.body is None else item.body.get("model")
            if isinstance(model, str) and is_loaded(model):
                models.add(model)
            name = hashlib.blake2b(item.custom_id.encode("utf-8", "replace"), digest_size=16).digest()
            if name in seen and len(problems) < _MAX_PROBLEMS:
                named = f"custom_id {item.custom_id[:100]!r}"
                message = f"{named} is already used on an earlier line; each line needs a different one"
                problems.append(BatchProblem("duplicate_custom_id", message, "custom_id", item.line))
            seen.add(name)
            if count % _ITEMS_AT_A_TIME == 0:
                await asyncio.sleep(0)  # parsing awaits nothing, so this lets the server's other tasks run
    return InputSummary(count, tuple(sorted(models)), tuple(problems) if count else (_EMPTY,))


_Line = tuple[bytes, bool, str | None]  # the line, whether it has an answer, and the code of its error


class OutputFile:
    """An output file, which is created when its first line is written. ``file_id`` is None before that. ``codes`` are
    the error codes of its lines.
    """

    def __init__(self, files: FileStore, file_id: str) -> None:
        self.items = 0
        self.codes: set[str] = set()
        self._files = files
        self._id = file_id
        self._upload: FileUpload | None = None

    @property
    def file_id(self) -> str | None:
        """The file's id; None as long as no line has been written."""
        return None if self._upload is None else self._id

    async def write(self, lines: list[_Line]) -> None:
        if not lines:
            return
        if self._upload is None:
            self._upload = self._files.begin(self._id, OUTPUT_PURPOSE)
        await self._upload.write(b"".join(line for line, *_ in lines))
        self.items += len(lines)
        self.codes.update(code for *_, code in lines if code is not None)

    async def end(self, filename: str) -> None:
        if self._upload is not None:
            await self._upload.end(filename)


async def write_output_files(
    batch_id: str,
    run: Store,
    files: FileStore,
    retry: Retry,
    missing: Callable[[int], AsyncGenerator[bytes, None]],
) -> tuple[OutputFile, OutputFile]:
    """Writes and returns the file of the answers and the file of the errors. Raises CloudError.

    ``missing`` yields the output lines from a given number on; they are not in any part.
    """
    answered = OutputFile(files, output_file_id(batch_id, "output"))
    failed = OutputFile(files, output_file_id(batch_id, "errors"))
    number = 0

    async def write(block: bytes) -> None:
        lines = await asyncio.to_thread(lambda: list(_lines(block)))
        await answered.write([line for line in lines if line[1]])
        await failed.write([line for line in lines if not line[1]])

    while True:
        try:
            part = await retry.run(run.get, part_name(number))
        except ObjectMissing:
            break
        await write(part)
        number += 1
    async with aclosing(missing(answered.items + failed.items)) as blocks:
        async for block in blocks:
            await write(block)
    await answered.end(f"{batch_id}_output.jsonl")
    await failed.end(f"{batch_id}_error.jsonl")
    return answered, failed


def _lines(block: bytes) -> Iterator[_Line]:
    for raw in block.splitlines():
        line = json.loads(raw)
        code = line["error"]["code"] if line["error"] is not None else None
        text = json.dumps(plain_line(line), ensure_ascii=False, separators=(",", ":"))
        yield text.encode() + b"\n", is_answered(line), code
