"""Calls AWS services with boto3 in threads, and lists all keys of an S3 bucket.

The object-store library cannot represent some keys, and stops listing at such a key.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any

import boto3
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
)
from botocore.parsers import ResponseParserError

from mlserver_torch_stream.cloud.rows import AccessDenied, CloudError, ObjectMissing, RunRefused, StoreUnavailable
from mlserver_torch_stream.work_threads import in_thread

_CONNECT_S = 10.0
_BUSY = (429, 500, 502, 503, 504)
_NO_CREDENTIALS = (CredentialRetrievalError, NoCredentialsError, NoRegionError, PartialCredentialsError)
_DEFAULT_REGION = "us-east-1"


class AwsClient:
    """A client of one AWS service. Raises RunRefused for an invalid address.

    ``credentials`` are arguments of boto3's session; without them boto3 searches the environment, the profiles and the
    machine's role. ``silence`` is the number of seconds to wait for an answer.
    """

    def __init__(
        self, service: str, endpoint: str, silence: float, credentials: Mapping[str, str], signed: bool = True
    ) -> None:
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or _DEFAULT_REGION
        self._session = boto3.session.Session(**{"region_name": region, **credentials})
        self._endpoint = endpoint
        config = Config(
            retries={"max_attempts": 0},  # the caller tries again
            connect_timeout=_CONNECT_S,
            read_timeout=silence,
            s3={"addressing_style": "path"},
            **({} if signed else {"signature_version": UNSIGNED}),
        )
        try:
            self._client = self._session.client(service, endpoint_url=endpoint, config=config)
        except (BotoCoreError, ValueError) as error:  # no region, or an invalid endpoint
            raise RunRefused(f"{endpoint}: {error}") from None

    @property
    def has_credentials(self) -> bool:
        """Returns True if boto3 finds credentials. Blocks while boto3 asks for the machine's role."""
        try:
            return self._session.get_credentials() is not None
        except BotoCoreError:
            return False

    async def call(self, method: str, **arguments: Any) -> Any:
        """Calls a method of the service in a thread, and returns the response. Raises CloudError if the call fails.

        If the caller is cancelled, the call continues in its thread, and its response is dropped.
        """
        try:
            return await in_thread(lambda: getattr(self._client, method)(**arguments))
        except _NO_CREDENTIALS as error:
            raise RunRefused(f"{self._endpoint}: {error}") from None
        except (BotoCoreError, ResponseParserError) as error:
            raise StoreUnavailable(f"{self._endpoint}: {error}") from None
        except ClientError as error:
            raise self._refusal(error) from None

    def close(self) -> None:
        self._client.close()

    def _refusal(self, error: ClientError) -> CloudError:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        code = str(error.response.get("Error", {}).get("Code"))
        text = f"{self._endpoint} answered {status}: {error}"
        if status in _BUSY or "Throttl" in code:
            return StoreUnavailable(text)
        return ObjectMissing(text) if "NonExistentQueue" in code or "NoSuch" in code else AccessDenied(text)


@dataclass(frozen=True, slots=True)
class S3Listing:
    """Lists the objects of an S3 bucket below a prefix.

    ``credentials`` are arguments of boto3's session; None for a public bucket. ``stall_s`` is the longest silence in
    seconds.
    """

    endpoint: str
    bucket: str
    prefix: str
    credentials: Mapping[str, str] | None
    stall_s: float

    @classmethod
    def find(cls, url: str, options: Mapping[str, str], stall_s: float) -> S3Listing | None:
        """Returns the listing of a URL; None if it is not an S3 URL.

        Also returns None if the credentials or the address are neither in ``options`` nor in the environment, for
        example because they come from the machine's role.
        """
        given = {f"AWS_{name.upper().removeprefix('AWS_')}": value for name, value in options.items()}
        environ = {**os.environ, **given}
        region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or _DEFAULT_REGION
        credentials = {"region_name": region}
        for name in ("aws_access_key_id", "aws_secret_access_key", "aws_session_token"):
            if value := environ.get(name.upper()):
                credentials[name] = value
        public = environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true")
        hosted = environ.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "").lower() in ("1", "true")
        known = "aws_access_key_id" in credentials and "aws_secret_access_key" in credentials
        if not url.startswith(("s3://", "s3a://")) or hosted or not (known or public):
            return None
        endpoint = environ.get("AWS_ENDPOINT") or environ.get("AWS_ENDPOINT_URL")
        bucket, _, prefix = url.partition("://")[2].rstrip("/").partition("/")
        endpoint = endpoint or f"https://s3.{region}.amazonaws.com"
        prefix = f"{prefix}/" if prefix else ""
        return cls(endpoint.rstrip("/"), bucket, prefix, credentials if known else None, stall_s)

    async def objects(self, after: str | None) -> AsyncGenerator[tuple[str, int, str], None]:
        """Yields the key below the prefix, the size and the ETag of each object, in the order of the keys.

        Raises CloudError.

        Keys up to and including ``after`` are left out.
        """
        signed = self.credentials is not None
        known = self.credentials or {"region_name": _DEFAULT_REGION}
        client = AwsClient("s3", self.endpoint, self.stall_s, known, signed)
        asked = {"Bucket": self.bucket, "Prefix": self.prefix}
        if after is not None:
            asked["StartAfter"] = self.prefix + after
        try:
            while True:
                page = await client.call("list_objects_v2", **asked)
                for each in page.get("Contents", ()):
                    yield each["Key"].removeprefix(self.prefix), each["Size"], each["ETag"]
                if not page.get("NextContinuationToken"):
                    return
                asked["ContinuationToken"] = page["NextContinuationToken"]
        finally:
            client.close()
