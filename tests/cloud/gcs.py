"""A scripted GCS bucket with its XML API, as Google documents it: generations, and writes that depend on them.

Uses none of our code. With ``lost``, so many answers to writes are lost.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit

from tests.scripted_http import Handler, serving

_DATE = "Wed, 21 Oct 2026 07:28:00 GMT"


@dataclass
class Bucket:
    """``objects`` has the content and generation of each key."""

    url: str = ""
    objects: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    lost: int = 0
    writes: list[tuple[str, str | None]] = field(default_factory=list)  # key, and the generation that was asked for
    written: int = 0

    def storage(self) -> dict[str, str]:
        """The options of the store; writes need a token, whatever the server."""
        return {"base_url": self.url, "bearer_token": "token"}


def _handler(bucket: Bucket) -> type[Handler]:
    class Gcs(Handler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            if "list-type=2" in self.path:
                return self.answer(200, self._listing())
            body, generation = bucket.objects.get(self._key(), (b"", 0))
            if not generation:
                return self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            if self.headers.get("If-Match") not in (None, _etag(body)):
                return self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            marks = {"ETag": _etag(body), "x-goog-generation": str(generation), "Last-Modified": _DATE}
            wanted = self.headers.get("Range")
            if wanted is None:
                return self.answer(200, body, marks)
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            part = body[int(first) : int(last) + 1]
            self.answer(206, part, {**marks, "Content-Range": f"bytes {first}-{last}/{len(body)}"})

        def do_PUT(self) -> None:
            body, key, asked = self.received(), self._key(), self.headers.get("x-goog-if-generation-match")
            bucket.writes.append((key, asked))
            _, generation = bucket.objects.get(key, (b"", 0))
            if asked not in (None, str(generation)):
                return self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            bucket.written += 1
            bucket.objects[key] = (body, 1000 + bucket.written)
            if bucket.lost:
                bucket.lost -= 1
                self.close_connection = True
                return self.connection.close()
            self.answer(200, b"", {"ETag": _etag(body), "x-goog-generation": str(1000 + bucket.written)})

        def _key(self) -> str:
            return unquote(urlsplit(self.path).path).removeprefix("/bucket/")

        def _listing(self) -> bytes:
            (prefix,) = parse_qs(urlsplit(self.path).query).get("prefix", [""])
            found = "".join(
                f"<Contents><Key>{key}</Key><LastModified>2026-10-21T07:28:00Z</LastModified>"
                f"<ETag>{_etag(body)}</ETag><Size>{len(body)}</Size></Contents>"
                for key, (body, _) in sorted(bucket.objects.items())
                if key.startswith(prefix)
            )
            return f"<ListBucketResult>{found}</ListBucketResult>".encode()

    return Gcs


def _etag(body: bytes) -> str:
    return f'"{hashlib.md5(body).hexdigest()}"'


@contextmanager
def gcs_bucket() -> Iterator[Bucket]:
    """Yields the bucket ``gs://bucket``, which is reached with its ``storage``."""
    bucket = Bucket()
    with serving(_handler(bucket)) as bucket.url:
        yield bucket
