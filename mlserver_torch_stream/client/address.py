"""Checks the arguments of a client: the server's URL, the headers and the key of its requests, its timeout, its
authorities.

A wrong argument raises ValueError, whose message never quotes a header's value or the key.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import SplitResult, urlsplit

Api = Literal["v2"]
_HTTP, _GRPC = ("http", "https"), ("grpc", "grpcs")
_TLS = ("https", "grpcs")
_HEADER_NAME = re.compile(r"[A-Za-z0-9-_.]+")
_HEADER_VALUE = re.compile(r"([\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?)?")  # HTTP does not allow blanks at its ends
_KEY = re.compile(r"[\x21-\x7e]+")
_FRAMING = ("content-length", "transfer-encoding")  # the transport says how long a body is
_BINARY = "-bin"  # the end of the names whose values are bytes over gRPC
_LONGEST_TIMEOUT_S = 1e9


def is_grpc(url: str, api: Api) -> bool:
    """Whether the URL's scheme means gRPC, not HTTP."""
    if api not in get_args(Api):
        raise ValueError(f"api: must be v2, got {api!r}; for OpenAI's API use the openai package")
    parts = _parts(url)
    if parts.scheme not in (*_HTTP, *_GRPC) or not parts.hostname:
        schemes = ", ".join(f"{scheme}://" for scheme in (*_HTTP, *_GRPC))
        raise ValueError(f"url: must begin with one of {schemes} and name a host, got {without_credentials(url)!r}")
    if parts.scheme in _HTTP:
        return False
    if parts.port is None or parts.path not in ("", "/") or parts.username is not None:
        raise ValueError(f"url: over gRPC, must have only a host and a port, got {without_credentials(url)!r}")
    return True


def _parts(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        readable = parts.port != 0 and url.isprintable() and not re.search(r"[\s?#]", url)
    except ValueError:  # such as a port that is not a number
        readable = False
    if not readable:
        raise ValueError(f"url: must consist of a scheme, a host, a port and a path, got {without_credentials(url)!r}")
    return parts


def grpc_target(url: str) -> str:
    """Returns the ``host:port`` of a URL."""
    return urlsplit(url).netloc


def without_credentials(url: str) -> str:
    """Returns the URL without the user name and password, so that it can be shown."""
    return re.sub(r"//[^/]*@", "//", url)


def checked_headers(headers: Mapping[str, str] | None, api_key: str | None, *, grpc: bool) -> dict[str, str]:
    """Returns the headers, with one more that carries the key."""
    if api_key is not None:
        if not _KEY.fullmatch(api_key):
            raise ValueError("api_key: is empty, or has characters that a header cannot contain")
        if any(name.lower() == "authorization" for name in headers or {}):
            raise ValueError("api_key: cannot be combined with an Authorization header in headers")
    for name, value in (headers or {}).items():
        if not _HEADER_NAME.fullmatch(name):
            raise ValueError(f"headers: {name!r} is not a valid name of a header")
        if name.lower() in _FRAMING or (grpc and name.lower().endswith(_BINARY)):
            raise ValueError(f"headers: {name} cannot be set")
        if not _HEADER_VALUE.fullmatch(value):
            raise ValueError(f"headers: the value of {name} has characters that a header cannot contain")
    return {**(headers or {}), **({} if api_key is None else {"Authorization": f"Bearer {api_key}"})}


def checked_timeout(seconds: float) -> float:
    """Returns the timeout in seconds. Raises ValueError if the timeout is not above 0, or too long."""
    if not 0 < seconds <= _LONGEST_TIMEOUT_S:
        raise ValueError(f"timeout: must be above 0 and at most {_LONGEST_TIMEOUT_S:.0f} seconds, got {seconds}")
    return seconds


def read_authorities(ca_file: str | os.PathLike[str] | None, url: str) -> bytes | None:
    """Returns the certificates in a PEM file, which are then the only ones that the client trusts; None means the
    default certificates.
    """
    if ca_file is None:
        return None
    if urlsplit(url).scheme not in _TLS:
        raise ValueError(f"ca_file: there is no TLS at {without_credentials(url)!r}, only at https:// and grpcs://")
    try:
        authorities = Path(ca_file).read_bytes()
        tls_context(authorities)
        return authorities
    except (OSError, ValueError) as error:
        raise ValueError(f"ca_file: {os.fspath(ca_file)} contains no usable certificates: {error}") from None


def tls_context(authorities: bytes) -> ssl.SSLContext:
    """Returns a context that trusts only these certificates, of authorities or of servers."""
    context = ssl.create_default_context(cadata=authorities.decode("ascii"))
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
