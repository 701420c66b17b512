"""The page's files over HTTP, and what they must not contain. Needs no model and no browser."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from mlserver_torch_stream.server.access.access_control import OpenEndpoints
from mlserver_torch_stream.server.host import ServerHost
from mlserver_torch_stream.server.options import ServerOptions, read_options
from mlserver_torch_stream.server.page import page_routes
from mlserver_torch_stream.server.page import page_routes as module
from mlserver_torch_stream.server.page.page_routes import page_files, page_paths

_FOLDER = Path(module.__file__).parent / "files"
_FILES = sorted(_FOLDER.iterdir())
_PATHS = sorted(page_paths())
_SVG = "http://www.w3.org/2000/svg"  # a name, which nobody asks for
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


class _Asking:
    """A client of an application in this process; ``root_path`` is the prefix that a proxy has removed."""

    def __init__(self, app: Starlette, root_path: str) -> None:
        self._app, self._root_path = app, root_path
        self.get, self.head = partial(self.request, "GET"), partial(self.request, "HEAD")

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self._app, root_path=self._root_path)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return await client.request(method, path, **options)

        return asyncio.run(ask())


def _asking(options: ServerOptions, root_path: str = "") -> _Asking:
    async def described(request: Any) -> PlainTextResponse:
        return PlainTextResponse("described")

    app = Starlette(routes=[Route("/", described, methods=["OPTIONS"])])
    page_routes.add_routes(ServerHost(SimpleNamespace(_app=app)), options)
    return _Asking(app, root_path)


@pytest.fixture(scope="module")
def asking() -> _Asking:
    return _asking(ServerOptions(page=True))


def test_there_is_no_page_unless_it_is_asked_for() -> None:
    assert not read_options({}).page and read_options({"MLSERVER_TORCH_STREAM_PAGE": "true"}).page
    client = _asking(read_options({}))
    assert {client.get(path).status_code for path in _PATHS} <= {404, 405}
    assert not OpenEndpoints(metrics=False, repository=False).rest("GET", "/", None)


@pytest.mark.parametrize("path", _PATHS)
def test_a_file_has_its_type_and_may_load_nothing_from_elsewhere(asking: _Asking, path: str) -> None:
    response = asking.get(path)
    kind = "html" if path == "/" else path.rpartition(".")[2]
    assert response.status_code == 200 and response.headers["content-type"].partition(";")[0] == _TYPES[kind]
    assert response.headers["x-content-type-options"] == "nosniff"
    policy = dict(part.strip().partition(" ")[::2] for part in response.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'self'" and policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in response.headers["content-security-policy"]
    assert asking.head(path).status_code == 200


@pytest.mark.parametrize("path", _PATHS)
def test_a_browser_that_has_a_file_asks_each_time_and_gets_it_once(asking: _Asking, path: str) -> None:
    first = asking.get(path)
    assert first.headers["cache-control"] == "no-cache"
    again = asking.get(path, headers={"If-None-Match": first.headers["etag"]})
    assert again.status_code == 304 and not again.content
    assert asking.get(path, headers={"If-None-Match": "*"}).status_code == 304
    assert asking.get(path, headers={"If-None-Match": '"another"'}).content == first.content


def test_other_methods_and_paths_are_left_to_other_routes(asking: _Asking) -> None:
    assert asking.request("OPTIONS", "/").text == "described"
    assert asking.request("POST", "/page/app.js").status_code == 404
    assert {
        asking.get(path).status_code for path in ("/page", "/page/", "/page/nothing.js", "/page/..%2foptions.py")
    } == {404}


def test_the_page_is_there_behind_a_root_path() -> None:
    client = _asking(ServerOptions(page=True), root_path="/models")
    assert client.get("/page/app.js").status_code == 200


def test_every_file_of_the_folder_is_served_and_every_file_that_is_named_is_there() -> None:
    assert {"/" if each.name == "index.html" else f"/page/{each.name}" for each in _FILES} == page_paths()
    named = set(re.findall(r'(?:src|href)="([^"#]+)"', (_FOLDER / "index.html").read_text()))
    assert named and {f"/{each}" for each in named} <= page_paths()
    imported = {(file.name, name) for file in _FILES for name in re.findall(r'from "\./(.+?)"', file.read_text())}
    assert len(imported) > 15 and {f"/page/{name}" for _, name in imported} <= page_paths()


def test_a_file_names_no_other_host_and_nothing_from_the_root() -> None:
    """Below a prefix, a path from the root would belong to another server."""
    for file in _FILES:
        text = file.read_text()
        assert set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", text)) <= {_SVG}, file
        assert re.findall(r"""(?:src|href|action)="/|(?:call|fetch|from|import|url)\(?\s*["'`]/""", text) == [], file


def test_no_text_ever_becomes_markup_or_code() -> None:
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|srcdoc|\beval\(|new Function"
    for file in _FILES:
        text = file.read_text()
        assert re.findall(markup, text) == [], file
        if file.suffix == ".html":
            assert re.findall(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)|javascript:", text) == [], file


def test_the_files_are_small_and_readable() -> None:
    for file in _FILES:
        lines = file.read_text().splitlines()
        assert len(lines) <= 300 and max(map(len, lines)) <= 120, file


def test_the_key_is_kept_for_the_tab_alone() -> None:
    """Only the colour scheme outlives the tab."""
    lasting = [
        line
        for file in _FILES
        for line in file.read_text().splitlines()
        if re.search("localStorage|cookie|indexedDB", line)
    ]
    assert lasting and all("torch-stream-theme" in line for line in lasting)


def test_the_control_of_each_label_and_each_name_that_the_scripts_use_is_in_the_page() -> None:
    page = page_files()["/"].content.decode()
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    used = {name for file in _FILES for name in re.findall(r'byId\("([^"]+)"\)', file.read_text())}
    named = set(re.findall(r'(?:for|aria-controls|aria-describedby|aria-labelledby)="([^"]+)"', page))
    assert len(used) > 20 and used | named <= set(ids)
