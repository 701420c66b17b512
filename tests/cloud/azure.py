"""A scripted blob container that, like Azure, lists ETags without quotes, but returns and expects them with quotes.

Uses none of our code, and only serves reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import urlsplit

from tests.scripted_http import Handler, serving

_DATE = "Wed, 21 Oct 2026 07:28:00 GMT"
_ETAG = "0x8DC0FFEE"


def _listing(objects: Mapping[str, bytes]) -> bytes:
    blobs = "".join(
        f"<Blob><Name>{name}</Name><Properties><Last-Modified>{_DATE}</Last-Modified><Etag>{_ETAG}</Etag>"
        f"<Content-Length>{len(data)}</Content-Length><Content-Type>text/plain</Content-Type></Properties></Blob>"
        for name, data in objects.items()
    )
    return f"<EnumerationResults><Blobs>{blobs}</Blobs><NextMarker/></EnumerationResults>".encode()


@contextmanager
def azure_server(objects: Mapping[str, bytes]) -> Iterator[str]:
    """Yields the URL of a server that has ``objects`` in every container."""

    class Azure(Handler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            if "comp=list" in self.path:
                return self.answer(200, _listing(objects))
            if self.headers.get("If-Match") not in (None, f'"{_ETAG}"'):
                return self.answer(412)
            body = objects[urlsplit(self.path).path.rpartition("/")[2]]
            self.answer(200, body, {"ETag": f'"{_ETAG}"', "Last-Modified": _DATE})

    with serving(Azure) as url:
        yield url
