"""Unpacks a ``.mar`` (a zip) or a ``.tar.gz``, within bounds, into a temporary folder of this process.

The bound applies to the bytes that are written; the sizes that an archive claims are not trusted. The process holds a
lock on the folder, which the kernel releases however the process ends. A folder without a lock was left by a killed
process, and is removed when the next folder is made. The lock also keeps systemd-tmpfiles from cleaning the folder.
"""

from __future__ import annotations

import fcntl
import gzip
import logging
import os
import re
import shutil
import stat
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Generator, Iterator, MutableMapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from mlserver_torch_stream.errors import LoadFailed, SettingsError
from mlserver_torch_stream.file_lock import wait_for_lock

BYTES_KEY, FILES_KEY = "maxUnpackedBytes", "maxUnpackedFiles"
# Compression hardly shrinks weights, and shrinks text to a tenth; DEFLATE shrinks the zeros of a bomb to a thousandth.
_MAX_RATIO = 100
_LEAST_BYTES = 1 << 30  # the lowest bound on the unpacked size, which small archives get
_FILES = 50_000  # a whole environment of Python packages has 20,000 to 30,000
_CHUNK = 1 << 16  # bytes of one read, and the maximum size of one member's headers, such as a long name
_ZIP, _GZIP = b"PK", b"\x1f\x8b"
_DRIVE = re.compile(r"[A-Za-z]:/")


@dataclass(frozen=True, slots=True)
class UnpackBounds:
    """The limits of an unpacked archive. ``bytes`` of None means 100 times the archive's size, and at least 1 GiB."""

    bytes: int | None = None
    files: int = _FILES  # files and folders

    def bytes_of(self, archive: Path) -> int:
        """Returns the largest number of bytes to which ``archive`` may unpack."""
        return self.bytes or max(_LEAST_BYTES, _MAX_RATIO * archive.stat().st_size)


DEFAULT_BOUNDS = UnpackBounds()
Wanted = Callable[[str], bool]  # whether the member of this name is unpacked


def everything(name: str) -> bool:
    """A ``Wanted`` that unpacks every member."""
    return True


def take_bounds(extra: MutableMapping[str, Any]) -> UnpackBounds:
    """Removes the two keys of the bounds from ``parameters.extra``, and returns the bounds. Raises SettingsError."""
    return UnpackBounds(_taken(extra, BYTES_KEY, None), _taken(extra, FILES_KEY, _FILES))


def _taken(extra: MutableMapping[str, Any], key: str, default: Any) -> Any:
    given = extra.pop(key, default)
    number = int(given) if isinstance(given, str) and given.isdecimal() else given  # Seldon's parameters are strings
    if given is not default and (type(number) is not int or number <= 0):
        raise SettingsError(f"parameters.extra: {key}: must be a whole number above 0, got {given!r}")
    return number


def unpack(archive: Path, folder: Path, bounds: UnpackBounds, wanted: Wanted = everything) -> None:
    """Unpacks the ``wanted`` members of ``archive`` into ``folder``.

    Raises LoadFailed at the first member that must not be unpacked: a link, a device, a path that leads out of the
    folder, or a member that exceeds ``bounds``. For a damaged archive the errors of zipfile and tarfile are raised.
    """
    target = _Target(archive, folder, bounds, wanted)
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed, closing(_of_zip(packed)) as members:
            target.write(members)
    elif _begins(archive, _ZIP):
        raise zipfile.BadZipFile("it is a zip file that is damaged or incomplete")
    elif not _begins(archive, _GZIP):
        raise zipfile.BadZipFile("it is neither a zip nor a .tar.gz")
    else:
        with _BoundedReads(archive) as content, tarfile.open(fileobj=content, mode="r:") as tar:
            target.write(_of_tar(tar))
            target.skip(content)  # the checksum follows the last member


def _begins(archive: Path, signature: bytes) -> bool:
    with archive.open("rb") as file:
        return file.read(len(signature)) == signature


@dataclass(frozen=True, slots=True)
class _Member:
    name: str
    size: int  # as the archive claims it
    plain: bool  # a file or a folder
    content: IO[bytes] | None  # None for a folder


def _of_zip(archive: zipfile.ZipFile) -> Generator[_Member, None, None]:
    for info in archive.infolist():
        kind = stat.S_IFMT(info.external_attr >> 16)
        plain = kind in (0, stat.S_IFREG, stat.S_IFDIR)
        with archive.open(info) as content:
            yield _Member(info.filename, info.file_size, plain, None if info.is_dir() else content)


class _BoundedReads(gzip.GzipFile):
    """Limits each read, because tarfile reads all headers of a member, such as a long name, at once."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0:
            raise LoadFailed(f"{self.name}: the headers of a member have no valid size")
        if size > _CHUNK:
            raise LoadFailed(f"{self.name}: the headers of a member have {size} bytes, more than the limit, {_CHUNK}")
        return super().read(size)


def _of_tar(archive: tarfile.TarFile) -> Iterator[_Member]:
    for info in archive:
        content = archive.extractfile(info) if info.isfile() else None
        yield _Member(info.name, info.size, info.isfile() or info.isdir(), content)


class _Target:
    """Writes the members of one archive into a folder."""

    def __init__(self, archive: Path, folder: Path, bounds: UnpackBounds, wanted: Wanted) -> None:
        self._archive = archive
        self._wanted = wanted
        self._folder = folder
        self._most_bytes = bounds.bytes_of(archive)
        self._most_files = bounds.files
        self._bytes = 0
        self._files = 0
        self._made = {folder}

    def write(self, members: Iterator[_Member]) -> None:
        for member in members:
            if not self._wanted(member.name):
                continue
            path = self._path(member)
            if member.content is None:
                self._make(path)
                continue
            if member.size > shutil.disk_usage(self._folder).free:
                raise LoadFailed(f"{self._archive}: no space on the disk for {member.name!r} ({member.size} bytes)")
            self._make(path.parent)
            self._count_file()
            self._copy(member.content, path)

    def _path(self, member: _Member) -> Path:
        if not member.plain:
            raise LoadFailed(f"{self._archive}: {member.name!r} is a link or a device, which is not unpacked")
        name = member.name.replace("\\", "/")  # archives that were made on Windows have backslashes
        parts = PurePosixPath(name).parts
        if name.startswith("/") or ".." in parts or _DRIVE.match(name):
            raise LoadFailed(f"{self._archive}: {member.name!r} leads out of the archive")
        if member.content is not None and not parts:
            raise LoadFailed(f"{self._archive}: {member.name!r} is not a valid name for a file")
        return self._folder.joinpath(*parts)

    def _make(self, folder: Path) -> None:
        """Makes a folder and its missing parents; each counts towards the bound."""
        if folder in self._made:
            return
        self._make(folder.parent)
        self._count_file()
        folder.mkdir()
        self._made.add(folder)

    def _count_file(self) -> None:
        self._files += 1
        if self._files > self._most_files:
            raise LoadFailed(
                f"{self._archive}: has more than {self._most_files} files and folders: "
                f"if the archive needs them, raise parameters.extra.{FILES_KEY} (import-mar: --max-unpacked-files)"
            )

    def _copy(self, content: IO[bytes], path: Path) -> None:
        with path.open("xb") as file:
            for chunk in self._counted(content):
                file.write(chunk)

    def skip(self, content: IO[bytes] | gzip.GzipFile) -> None:
        """Reads the bytes after the last member, usually padding, to the end. They count towards the bound."""
        self._bytes = -tarfile.RECORDSIZE
        for _ in self._counted(content):
            pass

    def _counted(self, content: IO[bytes] | gzip.GzipFile) -> Iterator[bytes]:
        while chunk := content.read(_CHUNK):
            self._bytes += len(chunk)
            if self._bytes > self._most_bytes:
                raise LoadFailed(
                    f"{self._archive}: unpacks to more than {self._most_bytes} bytes: "
                    f"if the archive needs them, raise parameters.extra.{BYTES_KEY} (import-mar: --max-unpacked-bytes)"
                )
            yield chunk


logger = logging.getLogger(__name__)
_PREFIX = "mlserver-torch-stream-mar-"
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class OwnFolder:
    """A new folder, locked by this process until ``remove``."""

    def __init__(self) -> None:
        """Raises OSError if the folder cannot be made or locked.

        On a file system without locks it has none, and ``_remove_abandoned`` removes no folder there.
        """
        _remove_abandoned()
        made = tempfile.mkdtemp(prefix=f".{_PREFIX}")
        self._descriptor = os.open(made, _OPEN)
        self.path = Path(made)
        try:
            wait_for_lock(self._descriptor)
        except OSError as error:
            self.remove()
            raise OSError(error.errno, f"the folder cannot be locked: {error.strerror}", made) from error
        # Other processes look for this name only, so the folder gets it after the lock is taken.
        self.path = self.path.rename(self.path.with_name(self.path.name[1:]))

    def remove(self) -> None:
        """Removes the folder and releases the lock. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _remove_abandoned() -> None:
    with os.scandir(tempfile.gettempdir()) as entries:
        found = [entry.path for entry in entries if entry.name.startswith(_PREFIX)]
    for path in found:
        try:
            descriptor = os.open(path, _OPEN)
        except OSError:  # a link, a file, another user's folder, or a removed one
            continue
        try:
            if os.fstat(descriptor).st_uid == os.geteuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # also fails without locks in the file system
                shutil.rmtree(path, ignore_errors=True)
                logger.info("Removed %s, left by a process that was killed", path)
        except OSError:  # the lock is held, so the folder's process is alive
            continue
        finally:
            os.close(descriptor)
