"""Verifies the topic, age and signature of messages that SNS posts, and confirms subscriptions to listed topics."""

from __future__ import annotations

import asyncio
import base64
import re
import ssl
import time
from collections.abc import Collection, Mapping
from datetime import datetime, timezone
from typing import Any

import aiohttp
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from yarl import URL

from mlserver_torch_stream.cloud.connections import make_connector
from mlserver_torch_stream.cloud.rows import StoreUnavailable

_AWS = re.compile(r"sns\.[a-z]{2,}(-[a-z]+)+-\d\.amazonaws\.com(\.cn)?")
_CERTIFICATE_PATH = re.compile(r"/SimpleNotificationService-[0-9a-f]+\.pem")
_MAX_AGE_S = 3600.0  # the longest time for which SNS tries to deliver a message
_MAX_AHEAD_S = 300.0  # how far SNS's clock may be ahead of ours
_FETCH_S = 5.0
_MAX_ANSWER_BYTES = 64 * 2**10
_MAX_CERTIFICATES = 16
_HASHES: Mapping[str, type[hashes.HashAlgorithm]] = {"1": hashes.SHA1, "2": hashes.SHA256}
_NOTIFICATION = ("Message", "MessageId", "Subject", "Timestamp", "TopicArn", "Type")
_CONFIRMATION = ("Message", "MessageId", "SubscribeURL", "Timestamp", "Token", "TopicArn", "Type")
_SIGNED = {
    "Notification": _NOTIFICATION,
    "SubscriptionConfirmation": _CONFIRMATION,
    "UnsubscribeConfirmation": _CONFIRMATION,
}


class MessageRejected(Exception):
    """The message is not a recent message of SNS for a listed topic."""


class SnsVerifier:
    """Verifies the messages of SNS.

    ``topics`` are the ARNs of the topics whose messages are accepted. ``hosts`` are the hosts (with a port if the URL
    has one) from which certificates are fetched and at which subscriptions are confirmed, over HTTPS only. ``tls``
    contains the certificate authorities that verify these hosts.
    """

    def __init__(
        self, topics: Collection[str], hosts: re.Pattern[str] = _AWS, tls: ssl.SSLContext | None = None
    ) -> None:
        self._topics = topics
        self._hosts = hosts
        self._tls = tls
        self._certificates: dict[str, x509.Certificate] = {}

    async def read(self, envelope: Mapping[str, Any]) -> str | None:
        """Returns the text of a notification; None for any other message. Confirms the subscription if the message asks
        for it.

        Raises MessageRejected, or StoreUnavailable if a certificate or a confirmation cannot be fetched now.
        """
        kind = envelope.get("Type")
        if str(envelope.get("TopicArn")) not in self._topics:
            raise MessageRejected("TopicArn: is not a topic named with --sns-topic")
        if not isinstance(kind, str) or kind not in _SIGNED:
            raise MessageRejected("Type: is not a known type of SNS message")
        if any(not isinstance(value, str) for value in map(envelope.get, _SIGNED[kind]) if value is not None):
            raise MessageRejected("the fields of an SNS message must be strings")
        _check_age(envelope)
        await self._check_signature(envelope, _SIGNED[kind])
        if kind == "Notification":
            return str(envelope.get("Message", ""))
        if kind == "SubscriptionConfirmation":
            await self._get(self._url(envelope, "SubscribeURL"))
        return None

    async def _check_signature(self, envelope: Mapping[str, Any], fields: Collection[str]) -> None:
        algorithm = _HASHES.get(str(envelope.get("SignatureVersion")))
        if algorithm is None:
            raise MessageRejected("SignatureVersion: must be 1 or 2")
        signed = "".join(f"{name}\n{envelope[name]}\n" for name in fields if envelope.get(name) is not None)
        certificate = await self._certificate(self._url(envelope, "SigningCertURL"))
        now = datetime.now(timezone.utc)
        if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
            raise MessageRejected("SigningCertURL: the certificate is not valid now")
        key = certificate.public_key()
        if not isinstance(key, rsa.RSAPublicKey):
            raise MessageRejected("SigningCertURL: the certificate has no RSA key")
        try:
            signature = base64.b64decode(envelope.get("Signature") or "", validate=True)
            key.verify(signature, signed.encode(), padding.PKCS1v15(), algorithm())
        except (InvalidSignature, ValueError, TypeError):
            raise MessageRejected("Signature: does not match the message") from None

    def _url(self, envelope: Mapping[str, Any], name: str) -> URL:
        try:
            url = URL(str(envelope.get(name, "")))
        except ValueError:
            raise MessageRejected(f"{name}: is not a URL") from None
        if url.scheme != "https" or not self._hosts.fullmatch(url.raw_authority):
            raise MessageRejected(f"{name}: is not a URL of SNS")
        if name == "SigningCertURL" and (not _CERTIFICATE_PATH.fullmatch(url.raw_path) or url.raw_query_string):
            raise MessageRejected(f"{name}: is not the URL of an SNS certificate")
        return url

    async def _certificate(self, url: URL) -> x509.Certificate:
        found = self._certificates.get(str(url))
        if found is None:
            try:
                found = x509.load_pem_x509_certificate(await self._get(url))
            except ValueError:
                raise MessageRejected("SigningCertURL: does not return a certificate") from None
            if len(self._certificates) >= _MAX_CERTIFICATES:
                self._certificates.clear()
            self._certificates[str(url)] = found
        return found

    async def _get(self, url: URL) -> bytes:
        timeout = aiohttp.ClientTimeout(total=_FETCH_S)
        tls: ssl.SSLContext | bool = True if self._tls is None else self._tls
        try:
            async with (
                aiohttp.ClientSession(connector=make_connector(), timeout=timeout, trust_env=True) as session,
                session.get(url, allow_redirects=False, ssl=tls) as response,
            ):
                if response.status != 200:
                    raise StoreUnavailable(f"{url.host} answered {response.status}")
                body = bytearray()
                async for part in response.content.iter_any():
                    body += part
                    if len(body) > _MAX_ANSWER_BYTES:
                        raise MessageRejected(f"{url.host} answered more than {_MAX_ANSWER_BYTES} bytes")
                return bytes(body)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise StoreUnavailable(f"{url.host}: {error or type(error).__name__}") from error


def _check_age(envelope: Mapping[str, Any]) -> None:
    try:
        sent = datetime.strptime(str(envelope.get("Timestamp")), "%Y-%m-%dT%H:%M:%S.%fZ")
    except ValueError:
        raise MessageRejected("Timestamp: is not a time") from None
    age = time.time() - sent.replace(tzinfo=timezone.utc).timestamp()
    if not -_MAX_AHEAD_S <= age <= _MAX_AGE_S:
        raise MessageRejected(f"Timestamp: is not within the last {_MAX_AGE_S:.0f} seconds")
