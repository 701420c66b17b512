"""Serves the page at ``/`` and its files. They can be read without an API key, but the requests that the page sends
need a key.

On ``/`` only GET and HEAD are answered here; other methods are left to other routes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from mlserver_torch_stream.server.host import ServerHost
from mlserver_torch_stream.server.options import ServerOptions
from mlserver_torch_stream.server.rest.endpoints import SelectiveRoute

_FOLDER = Path(__file__).parent / "files"
_INDEX = "index.html"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The page may only load its own files and call its own server; it cannot be framed, and cannot post a form.
_POLICY = (
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)


@dataclass(frozen=True)
class PageFile:
    """A file of the page: its bytes, and the headers of its responses."""

    content: bytes
    headers: Mapping[str, str]


def page_files() -> dict[str, PageFile]:
    """Returns the files by their paths: ``index.html`` is at ``/``, all others are below ``/page/``."""
    return {_path(place): _read(place) for place in sorted(_FOLDER.iterdir()) if place.suffix in _MEDIA_TYPES}


def page_paths() -> frozenset[str]:
    """Returns the REST paths of the page's files."""
    return frozenset(page_files())


def _path(place: Path) -> str:
    return "/" if place.name == _INDEX else f"/page/{place.name}"


def _read(place: Path) -> PageFile:
    content = place.read_bytes()
    headers = {
        "content-type": _MEDIA_TYPES[place.suffix],
        "cache-control": "no-cache",  # browsers keep it, and ask at each visit whether it has changed
        "etag": f'"{sha256(content).hexdigest()[:32]}"',
        "content-security-policy": _POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    return PageFile(content, headers)


def add_routes(host: ServerHost, options: ServerOptions) -> None:
    """Adds the routes of the page's files. Called once for a server."""
    if options.page:
        host.add_routes([_PageRoute(path, file) for path, file in page_files().items()])


class _PageRoute(SelectiveRoute):
    """One file, read when the server starts."""

    def __init__(self, path: str, file: PageFile) -> None:
        super().__init__(path, self._answer)
        self._file = file

    async def _answer(self, request: Request) -> Response:
        """Answers with the file, or with 304 if the browser has it."""
        known = {each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")}
        if known & {self._file.headers["etag"], "*"}:
            return Response(status_code=304, headers=self._file.headers)
        return Response(self._file.content, headers=self._file.headers)
