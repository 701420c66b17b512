"""Routes for the page at ``/`` and its files. They need no key; the requests that the page sends do.

Knows nothing of what the files do. Other methods of ``/`` are left to the routes that have them.
"""

from __future__ import annotations

from mlserver.rest.server import RESTServer
from starlette.requests import Request
from starlette.responses import Response

from mlserver_torch_stream.server.options import ServerOptions
from mlserver_torch_stream.server.page.page_files import PageFile, page_files
from mlserver_torch_stream.server.rest.selective_route import SelectiveRoute


def add_routes(server: RESTServer, options: ServerOptions) -> None:
    """Called once for a server."""
    if options.page:
        server._app.router.routes[:0] = [_PageRoute(path, file) for path, file in page_files().items()]


class _PageRoute(SelectiveRoute):
    """One file, read when the server starts."""

    def __init__(self, path: str, file: PageFile) -> None:
        super().__init__(path, self._answer)
        self._file = file

    async def _answer(self, request: Request) -> Response:
        """304 to a browser that has the file."""
        known = {each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")}
        if known & {self._file.headers["etag"], "*"}:
            return Response(status_code=304, headers=self._file.headers)
        return Response(self._file.content, headers=self._file.headers)
