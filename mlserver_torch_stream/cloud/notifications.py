"""Reads notifications of new objects: S3's, which MinIO sends too, and the CloudEvents of Google and Azure.

A notification names objects by bucket and key; ``InputPlace`` says which of these objects belong to a watcher's input.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_plus


@dataclass(frozen=True, slots=True)
class Created:
    """One new object of a notification. For Azure, ``bucket`` is the container in the storage account ``account``."""

    bucket: str
    key: str
    account: str = ""


@dataclass(frozen=True, slots=True)
class InputPlace:
    """The objects of ``bucket`` below ``prefix`` whose keys, relative to the prefix, match ``pattern``.

    ``account`` is Azure's storage account; it is empty if the account is not known.
    """

    bucket: str
    prefix: str
    pattern: re.Pattern[str]
    account: str = ""

    @classmethod
    def of_url(cls, url: str, pattern: re.Pattern[str], account: str = "") -> InputPlace:
        """Returns the place of a URL such as ``s3://bucket/prefix``."""
        bucket, _, prefix = url.partition("://")[2].rstrip("/").partition("/")
        return cls(bucket, f"{prefix}/" if prefix else "", pattern, account)

    def keys(self, created: Sequence[Created]) -> list[str] | None:
        """Returns the matching keys, relative to the prefix and without duplicates; None if an object is outside this
        place.

        An object whose key ends with a slash, or is the prefix itself, only represents a folder, and is left out.
        """
        if not all(self._holds(each) for each in created):
            return None
        keys = dict.fromkeys(each.key.removeprefix(self.prefix) for each in created)
        return [key for key in keys if key and not key.endswith("/") and self.pattern.fullmatch(key)]

    def _holds(self, created: Created) -> bool:
        key = created.key
        if self.account and created.account.lower() != self.account.lower():
            return False
        return created.bucket == self.bucket and key.startswith(self.prefix) and ".." not in key.split("/")


def read_notification(body: str) -> list[Created] | None:
    """Returns the new objects that a message of a queue names; None if it is not a notification of S3.

    The notification may be wrapped in a message of SNS, whose signature is not verified.
    """
    try:
        value = json.loads(body)
        if value.get("Type") == "Notification":
            value = json.loads(value["Message"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return read_s3(value)


def read_s3(value: Any) -> list[Created] | None:
    """Returns the new objects of a notification of S3; an empty list for S3's test event and for other events.

    Returns None if ``value`` is not an S3 notification.

    The keys in a notification are form-encoded.
    """
    try:
        if value.get("Event") == "s3:TestEvent":
            return []
        created = [record for record in value["Records"] if "ObjectCreated" in record["eventName"]]
        return [
            Created(str(each["s3"]["bucket"]["name"]), unquote_plus(each["s3"]["object"]["key"])) for each in created
        ]
    except (KeyError, TypeError, AttributeError):
        return None


_GOOGLE, _AZURE = "google.cloud.storage.object.v1.", "Microsoft.Storage."
_CREATED = (f"{_GOOGLE}finalized", f"{_AZURE}BlobCreated")
_GOOGLE_BUCKET = re.compile(r"//storage\.googleapis\.com/projects/[^/]+/buckets/(?P<bucket>[^/]+)")
_GOOGLE_KEY = re.compile(r"objects/(?P<key>.+)", re.DOTALL)
_AZURE_SOURCE = re.compile(r".*/storageAccounts/(?P<account>[^/]+)", re.IGNORECASE)
_AZURE_SUBJECT = re.compile(r"/blobServices/default/containers/(?P<bucket>[^/]+)/blobs/(?P<key>.+)", re.DOTALL)


def read_cloud_event(attributes: Mapping[str, Any], data: Any) -> list[Created] | None:
    """Returns the new objects of a CloudEvent of Google's or Azure's storage, or of one that carries S3's notification.

    Returns an empty list for other events of these storages, and None for any other event. Raises ValueError for a
    version other than 1.0.
    """
    if attributes.get("specversion") != "1.0":
        raise ValueError("specversion: must be 1.0")
    kind, source, subject = (str(attributes.get(name, "")) for name in ("type", "source", "subject"))
    if not kind.startswith((_GOOGLE, _AZURE)):
        return read_s3(data)
    if kind not in _CREATED:
        return []
    if kind.startswith(_AZURE):
        place, blob = _AZURE_SOURCE.fullmatch(source), _AZURE_SUBJECT.fullmatch(subject)
        return None if place is None or blob is None else [Created(blob["bucket"], blob["key"], place["account"])]
    bucket, key = _GOOGLE_BUCKET.fullmatch(source), _GOOGLE_KEY.fullmatch(subject)
    return None if bucket is None or key is None else [Created(bucket["bucket"], key["key"])]
