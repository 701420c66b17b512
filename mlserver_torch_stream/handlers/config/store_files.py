"""Finds archives in a model store, downloads them into it, and defines the errors of management requests.

An archive is downloaded only from a URL that the settings allow.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPMessage
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from mlserver_torch_stream.errors import RequestError, SettingsError
from mlserver_torch_stream.handlers.config.archive import ENDINGS, MANIFEST
from mlserver_torch_stream.handlers.config.properties import MAR, MODEL_SNAPSHOT, settings_by_version


class ManagementRefusal(RequestError):
    """An error of the management API: an HTTP status, and ``kind``, the name of TorchServe's exception."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


def bad_request(message: str) -> ManagementRefusal:
    """Returns a refusal with status 400."""
    return ManagementRefusal(400, "BadRequestException", message)


def no_model(message: str) -> ManagementRefusal:
    """Returns a refusal with status 404."""
    return ManagementRefusal(404, "ModelNotFoundException", message)


def internal(message: str) -> ManagementRefusal:
    """Returns a refusal with status 500."""
    return ManagementRefusal(500, "InternalServerException", message)


_TIMEOUT_S = 60.0  # the time limit for connecting, and for each read
_CHUNK = 1 << 20


class StoreFiles:
    """The archives in ``folder``, the model store; None means that the server has no model store.

    An archive is downloaded if a pattern in ``allowed`` matches its whole URL.
    """

    def __init__(self, folder: Path | None, allowed: Sequence[str]) -> None:
        self._folder = folder
        self._allowed = [re.compile(pattern, re.IGNORECASE) for pattern in allowed]
        self._downloading: set[str] = set()  # the names of files that are being downloaded
        self._names = threading.Lock()

    def fetch(self, url: str) -> Path:
        """Returns the path of the archive that ``url`` names, and blocks while it is downloaded.

        Raises ManagementRefusal.
        """
        if self._folder is None:
            raise no_model("Model store has not been configured.")
        if not url:
            raise no_model("empty url")
        if ".." in url:
            raise no_model(f"Relative path is not allowed in url: {url}")
        if is_remote(url):
            return self._download(url, self._folder)
        return self._stored(url, self._folder)

    def remove_download(self, url: str) -> None:
        """Removes a downloaded archive, when its model is unregistered, as in TorchServe, or cannot be registered."""
        if self._folder is not None and is_remote(url):
            (self._folder / _file_name(url)).unlink(missing_ok=True)

    def url_of(self, uri: str) -> str:
        """Returns the URL that describes an archive: as in TorchServe, the file's name if it is in the model store."""
        path = Path(uri)
        in_store = self._folder is not None and path.parent.absolute() == self._folder.absolute()
        return path.name if in_store else uri

    def _stored(self, url: str, folder: Path) -> Path:
        """Returns the file or folder directly in the store that ``url`` names, as a name or as a path."""
        if "://" in url and not url.startswith("file://"):
            raise self._not_allowed(url)
        path = folder / url.removeprefix("file://")
        if path.parent.absolute() != folder.absolute() or path.name.startswith("."):
            raise no_model(f"{url} is not in the model store")
        if not os.path.exists(path):  # False also for an invalid file name
            raise no_model(f"Model not found at: {url}")
        return path.absolute()

    def _download(self, url: str, folder: Path) -> Path:
        self.check(url)
        name = _file_name(url)
        if not name.endswith(ENDINGS) or name.startswith("."):
            raise ManagementRefusal(
                400, "DownloadArchiveException", f"{url} does not name a file that ends with {', '.join(ENDINGS)}"
            )
        path, part = folder / name, folder / f".{name}.{uuid4().hex}"
        with self._claimed(path):
            try:
                self._copy(url, part)
                part.rename(path)
            except OSError as error:  # URLError is a subclass
                raise ManagementRefusal(
                    400, "DownloadArchiveException", f"Failed to download archive from: {url}: {error}"
                ) from None
            finally:
                part.unlink(missing_ok=True)
        return path.absolute()

    @contextmanager
    def _claimed(self, path: Path) -> Iterator[None]:
        """Reserves ``path`` for one download. Raises ManagementRefusal if the file exists or is being downloaded."""
        with self._names:
            if path.name in self._downloading or path.exists():
                raise internal(f"Model file already exists {path.name}")
            self._downloading.add(path.name)
        try:
            yield
        finally:
            self._downloading.discard(path.name)

    def _copy(self, url: str, part: Path) -> None:
        opener = urllib.request.build_opener(_AllowedRedirects(self))
        with opener.open(url, timeout=_TIMEOUT_S) as response, part.open("xb") as file:
            while chunk := response.read(_CHUNK):
                if shutil.disk_usage(part.parent).free < len(chunk):
                    raise OSError("no space left on the disk")
                file.write(chunk)

    def check(self, url: str) -> None:
        """Raises ManagementRefusal unless the settings allow a download from the URL."""
        if not is_remote(url) or not any(pattern.fullmatch(url) for pattern in self._allowed):
            raise self._not_allowed(url)

    def _not_allowed(self, url: str) -> ManagementRefusal:
        return no_model(f"Given URL {url} does not match any allowed URL(s)")


class _AllowedRedirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirect only to a URL that the settings allow."""

    def __init__(self, files: StoreFiles) -> None:
        self._files = files

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        self._files.check(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def is_remote(url: str) -> bool:
    """Whether the URL of an archive begins with ``http://`` or ``https://``."""
    return url.lower().startswith(("http://", "https://"))


def _file_name(url: str) -> str:
    return unquote(urlsplit(url).path).rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class StoredModel:
    """An archive to load; its file may be missing. If ``name`` or ``version`` is None, the archive's own is used.

    ``snapshot`` holds the model's settings in a TorchServe snapshot.
    """

    path: Path
    name: str | None = None
    version: str | None = None
    snapshot: Mapping[str, Any] = field(default_factory=dict)


def stored_models(store: Path, properties: Mapping[str, str]) -> list[StoredModel]:
    """Returns the archives that the snapshot lists; without a snapshot, those that ``load_models`` chooses.

    ``load_models`` is ``all``, ``none`` or a list of names. Raises SettingsError.
    """
    if not store.is_dir():
        raise SettingsError(f"model_store: no such folder: {store}")
    if MODEL_SNAPSHOT in properties:
        return list(_of_snapshot(store, properties[MODEL_SNAPSHOT]))
    listed = properties["load_models"]
    if listed.lower() == "all":
        return [StoredModel(path) for path in sorted(store.iterdir()) if _is_archive(path)]
    return [] if listed.lower() == "none" else list(_listed(store, listed))


def _of_snapshot(store: Path, value: str) -> Iterator[StoredModel]:
    for name, versions in settings_by_version(MODEL_SNAPSHOT, value).items():
        for version, settings in versions.items():
            place = f"{MODEL_SNAPSHOT}: {name} {version}"
            mar = settings.get(MAR)
            if not mar or not isinstance(mar, str):
                raise SettingsError(f"config.properties: {place}: has no {MAR}")
            yield StoredModel(_in_store(store, mar, place), name, version, settings)


def _listed(store: Path, value: str) -> Iterator[StoredModel]:
    for entry in filter(None, (word.strip() for word in value.split(","))):
        name, equals, file = entry.partition("=")
        yield StoredModel(_in_store(store, file if equals else name, "load_models"), name if equals else None)


def _in_store(store: Path, file: str, place: str) -> Path:
    if "://" in file:
        raise SettingsError(f"{place}: {file}: nothing is downloaded: put the archive into the model store")
    path = store / file
    if ".." in Path(file).parts or Path(file).is_absolute():
        raise SettingsError(f"{place}: {file} is not in the model store {store}")
    return path


def _is_archive(path: Path) -> bool:
    if path.name.startswith("."):
        return False
    return (path / MANIFEST).is_file() if path.is_dir() else path.name.endswith(ENDINGS)
