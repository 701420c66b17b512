"""A scripted S3 bucket with objects of any size that are not stored: the bytes of a range are made on request.

Uses none of our code. A large object is zeros, with the number of each MiB in its first eight bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.scripted_http import Handler, serving

MIB = 2**20
_ZEROS = bytes(MIB - 8)
_DATE = "Wed, 21 Oct 2026 07:28:00 GMT"


def made(start: int, end: int) -> Iterator[bytes]:
    """Yields bytes ``start`` to ``end`` of a large object."""
    while start < end:
        block, at = divmod(start, MIB)
        piece = (struct.pack(">Q", block) + _ZEROS)[at : at + end - start]
        yield piece
        start += len(piece)


@dataclass
class SparseBucket:
    """``objects`` has each key's bytes, or the size of a large object; ``versions`` those of replaced keys."""

    objects: dict[str, bytes | int] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    ranges: list[tuple[str, int, int]] = field(default_factory=list)  # what was asked for
    url: str = ""

    def options(self) -> list[str]:
        """The command's options for this bucket."""
        return ["--storage", f"endpoint={self.url}", "--storage", "skip_signature=true", "--storage", "region=x"]

    def size(self, key: str) -> int:
        content = self.objects[key]
        return content if isinstance(content, int) else len(content)

    def etag(self, key: str) -> str:
        return f'"{self.size(key)}-{self.versions.get(key, 0)}"'


def _handler(bucket: SparseBucket) -> type[Handler]:
    class Sparse(Handler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            if "list-type=2" in self.path:
                return self.answer(200, self._listing())
            key = unquote(urlsplit(self.path).path).removeprefix("/bucket/")
            if key not in bucket.objects:
                return self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            if self.headers.get("If-Match") not in (None, bucket.etag(key)):
                return self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            self._send(key, bucket.size(key))

        def _send(self, key: str, size: int) -> None:
            wanted = self.headers.get("Range")
            first, _, last = (wanted or f"bytes=0-{size - 1}").removeprefix("bytes=").partition("-")
            start, end = int(first), min(size, int(last) + 1)
            self.send_response(206 if wanted else 200)
            self.send_header("Content-Length", str(end - start))
            self.send_header("ETag", bucket.etag(key))
            self.send_header("Last-Modified", _DATE)
            if wanted:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
            self.end_headers()
            if self.command == "HEAD":
                return
            bucket.ranges.append((key, start, end))
            content = bucket.objects[key]
            for piece in made(start, end) if isinstance(content, int) else (content[start:end],):
                self.wfile.write(piece)

        def _listing(self) -> bytes:
            (prefix,) = parse_qs(urlsplit(self.path).query).get("prefix", [""])
            found = "".join(
                f"<Contents><Key>{escape(key)}</Key><LastModified>2026-10-21T07:28:00Z</LastModified>"
                f"<ETag>{escape(bucket.etag(key))}</ETag><Size>{bucket.size(key)}</Size></Contents>"
                for key in sorted(bucket.objects)
                if key.startswith(prefix)
            )
            return f"<ListBucketResult>{found}</ListBucketResult>".encode()

    return Sparse


@contextmanager
def sparse_bucket(objects: dict[str, bytes | int]) -> Iterator[SparseBucket]:
    """Yields the bucket ``s3://bucket``, which is reached with its ``options``."""
    bucket = SparseBucket(objects)
    with serving(_handler(bucket)) as bucket.url:
        yield bucket
