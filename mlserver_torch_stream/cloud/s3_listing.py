"""Lists a bucket of S3 with all its keys, of which the library of stores cannot name some and then stops to list.

Speaks ListObjectsV2 itself.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any
from urllib.parse import quote, unquote_plus, urlsplit
from xml.etree import ElementTree

import httpx

from mlserver_torch_stream.cloud.aws_signature import AwsRequest, Credentials, signed
from mlserver_torch_stream.cloud.rows import AccessDenied, StoreUnavailable

_EMPTY = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class S3Listing:
    """``credentials``: None for a bucket that anybody may list. ``stall_s``: the longest silence in seconds."""

    endpoint: str
    bucket: str
    prefix: str
    credentials: Credentials | None
    stall_s: float

    @classmethod
    def find(cls, url: str, options: Mapping[str, str], stall_s: float) -> S3Listing | None:
        """None where the URL is not S3's, or the credentials or the address are not in ``options`` or the environment,
        but those of the machine's role, for example."""
        given = {f"AWS_{name.upper().removeprefix('AWS_')}": value for name, value in options.items()}
        environ = {**os.environ, **given}
        environ.setdefault("AWS_REGION", environ.get("AWS_DEFAULT_REGION") or "us-east-1")
        credentials = Credentials.find(environ)
        public = environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true")
        hosted = environ.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "").lower() in ("1", "true")
        if not url.startswith(("s3://", "s3a://")) or hosted or not (credentials or public):
            return None
        endpoint = environ.get("AWS_ENDPOINT") or environ.get("AWS_ENDPOINT_URL")
        bucket, _, prefix = url.partition("://")[2].rstrip("/").partition("/")
        endpoint = endpoint or f"https://s3.{environ['AWS_REGION']}.amazonaws.com"
        return cls(endpoint.rstrip("/"), bucket, f"{prefix}/" if prefix else "", credentials, stall_s)

    async def objects(self, after: str | None) -> AsyncGenerator[tuple[str, int, str], None]:
        """The key below the prefix, the size and the ETag of each object, in the order of the keys. Raises CloudError.

        ``after``: only keys after this one.
        """
        asked = {"list-type": "2", "encoding-type": "url", "prefix": self.prefix}
        if after is not None:
            asked["start-after"] = self.prefix + after
        async with httpx.AsyncClient(timeout=self.stall_s) as client:
            while True:
                page = await self._page(client, asked)
                encoded = _text(page, "EncodingType") == "url"
                for each in page.findall("{*}Contents"):
                    key = _text(each, "Key")
                    key = unquote_plus(key) if encoded else key
                    yield key.removeprefix(self.prefix), int(_text(each, "Size")), _text(each, "ETag")
                token = _text(page, "NextContinuationToken")
                if not token:
                    return
                asked = {**asked, "continuation-token": token}

    async def _page(self, client: httpx.AsyncClient, asked: Mapping[str, str]) -> Any:
        parts = urlsplit(self.endpoint)
        path = f"{parts.path}/{quote(self.bucket)}"
        headers = {"host": parts.netloc, "x-amz-content-sha256": _EMPTY}
        request = AwsRequest("GET", path, headers, asked)
        if self.credentials is not None:
            headers = signed(self.credentials, request, datetime.now(timezone.utc), "s3")
        url = f"{parts.scheme}://{parts.netloc}{path}?{request.query_text}"
        try:
            answer = await client.get(url, headers=headers)
        except httpx.HTTPError as error:
            raise StoreUnavailable(f"{self.endpoint}: {error or type(error).__name__}") from None
        if answer.status_code == httpx.codes.OK:
            try:
                return ElementTree.fromstring(answer.content)
            except ElementTree.ParseError as error:
                raise StoreUnavailable(f"{self.endpoint} answered a listing with what is no XML: {error}") from None
        text = f"{self.endpoint} answered {answer.status_code} to a listing: {answer.text[:300]}"
        raise AccessDenied(text) if answer.status_code in (401, 403) else StoreUnavailable(text)


def _text(element: Any, name: str) -> str:
    return str(element.findtext(f"{{*}}{name}") or "")
