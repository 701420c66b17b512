"""One compared case: its requests, the reason if the replies differ, and the files that requests name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.torchserve.beside.servers import MAX_BYTES

FILES: Mapping[str, bytes] = {
    "kitten.jpg": b"\xff\xd8\xff\xe0 not really a kitten",
    "dog.jpg": b"\xff\xd8\xff\xe0 not really a dog",
    "sample.txt": b"some text\n",
    "input.json": b'{"instances": [[1, 2], [3]], "x": "\xc3\xbc"}',
    "base64.json": b'{"instances": [{"b64": "aGVsbG8="}]}',
    "empty": b"",
    "large.bin": bytes(range(256)) * (MAX_BYTES // 300),
    "too-large.bin": bytes(MAX_BYTES + 1),
}


@dataclass(frozen=True)
class Case:
    """``lines`` are sent one after the other, or at once. ``why`` says why the replies differ, if they do."""

    name: str
    lines: str | tuple[str, ...]
    why: str = ""
    together: bool = False

    @property
    def requests(self) -> list[str]:
        return [self.lines] if isinstance(self.lines, str) else list(self.lines)
