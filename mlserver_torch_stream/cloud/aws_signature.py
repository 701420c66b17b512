"""Signs requests to AWS' services (Signature Version 4), with credentials of the environment.

A client library for two calls would be larger than this package.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import quote


@dataclass(frozen=True, slots=True)
class Credentials:
    key: str
    secret: str
    region: str
    token: str | None = None

    @classmethod
    def find(cls, environ: Mapping[str, str]) -> Credentials | None:
        """The credentials in AWS_ACCESS_KEY_ID and its like; None where there are none."""
        region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
        key, secret = environ.get("AWS_ACCESS_KEY_ID"), environ.get("AWS_SECRET_ACCESS_KEY")
        return cls(key, secret, region, environ.get("AWS_SESSION_TOKEN") or None) if key and secret and region else None


@dataclass(frozen=True, slots=True)
class AwsRequest:
    """A request without its signature. ``path``: percent-encoded; ``headers``: names in lower case, with ``host``."""

    method: str
    path: str
    headers: Mapping[str, str]
    query: Mapping[str, str]
    body: bytes = b""

    @property
    def query_text(self) -> str:
        return "&".join(f"{quote(name, safe='')}={quote(text, safe='')}" for name, text in sorted(self.query.items()))


def signed(credentials: Credentials, request: AwsRequest, now: datetime, service: str) -> dict[str, str]:
    """The headers of the request, with its signature."""
    stamp, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
    headers = {**request.headers, "x-amz-date": stamp}
    if credentials.token:
        headers["x-amz-security-token"] = credentials.token
    names = ";".join(sorted(headers))
    lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    body = hashlib.sha256(request.body).hexdigest()
    whole = f"{request.method}\n{request.path}\n{request.query_text}\n{lines}\n{names}\n{body}"
    scope = f"{day}/{credentials.region}/{service}/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(whole.encode()).hexdigest()}"
    key = f"AWS4{credentials.secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    authorization = (
        f"AWS4-HMAC-SHA256 Credential={credentials.key}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    return {**headers, "authorization": authorization}
