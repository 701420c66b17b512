"""Reads API keys from a file, again whenever the file changes, and checks the keys of requests.

Knows nothing of transports. Only digests of the keys are kept, and no message quotes a key.
"""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from mlserver.logging import logger

from mlserver_torch_stream.errors import SettingsError

_KEY = re.compile(r"[\x21-\x7e]+")  # what a header can carry without quotes
_SCHEME = "bearer"


class ApiKeys:
    """One key a line; empty lines and lines that begin with ``#`` are skipped. Raises SettingsError."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        try:
            self._version: object = self._file_version()
            self._digests = self._read()
        except OSError as error:
            raise SettingsError(f"the file of keys {path} cannot be read: {os.strerror(error.errno or 0)}") from None

    def accept(self, authorizations: Sequence[str]) -> bool:
        """Whether there is exactly one value of ``Authorization``, and it is ``Bearer`` and a valid key."""
        self._follow_the_file()
        if len(authorizations) != 1:
            return False
        scheme, _, key = authorizations[0].partition(" ")
        given = _digest(key.strip(" "))
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == _SCHEME and any(matches)

    def _follow_the_file(self) -> None:
        """A file that cannot be read any more, or has no key, leaves the last keys; the log says so once."""
        try:
            version: object = self._file_version()
        except OSError as error:
            version = error.errno
        if version == self._version:
            return
        self._version = version
        try:
            self._digests = self._read()
            logger.info(f"The keys in {self._path} were read again: there are {len(self._digests)}")
        except (OSError, SettingsError) as error:
            reason = error if isinstance(error, SettingsError) else os.strerror(error.errno or 0)
            logger.error(f"The keys in {self._path} cannot be read again, so the keys read last stay valid: {reason}")

    def _file_version(self) -> tuple[int, int, int, int]:
        """Differs once the file has been written, or replaced by another one, even by one of the same age."""
        found = self._path.stat()
        return found.st_ctime_ns, found.st_mtime_ns, found.st_ino, found.st_size

    def _read(self) -> frozenset[bytes]:
        lines = self._path.read_bytes().decode("latin-1").split("\n")
        keys = [(number, line.strip(" \t\r")) for number, line in enumerate(lines, 1)]
        keys = [(number, key) for number, key in keys if key and not key.startswith("#")]
        for number, key in keys:
            if not _KEY.fullmatch(key):
                raise SettingsError(f"line {number} of {self._path} has characters that a header cannot carry")
        if not keys:
            raise SettingsError(f"the file of keys {self._path} has no key")
        return frozenset(_digest(key) for _, key in keys)


def _digest(key: str) -> bytes:
    """All digests have one length, so that the time of a comparison does not depend on the length of a key."""
    return sha256(key.encode("utf-8", "surrogateescape")).digest()
