"""Receives S3's notifications from an SQS queue. Messages are hidden from other consumers while they are processed, and
deleted afterwards.

boto3 gets the credentials from the environment, a profile or the machine's role.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from mlserver_torch_stream.cloud.aws import AwsClient
from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.notifications import InputPlace, read_notification
from mlserver_torch_stream.cloud.rows import CloudError, RunRefused
from mlserver_torch_stream.cloud.watch import Announced

_WAIT_S = 20  # the longest poll that SQS allows
_HELD_S = 60  # how long a message is hidden from other consumers; prolonged while it is processed
_MAX_MESSAGES = 10


class Queue:
    """Announces the new objects of ``place``.

    A message about other objects is passed to ``report`` and left in the queue. Raises RunRefused if ``url`` is not the
    URL of a queue, or if there are no credentials. Blocks while boto3 looks for credentials.
    """

    def __init__(
        self,
        url: str,
        place: InputPlace,
        retry: Retry,
        report: Callable[[str], None],
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise RunRefused(f"--queue: {url} is not the URL of a queue")
        region = re.match(r"sqs\.([a-z0-9-]+)\.", parts.netloc)
        known = {"region_name": region[1]} if region else {}
        try:
            self._client = AwsClient("sqs", f"{parts.scheme}://{parts.netloc}", _WAIT_S + 10, known)
        except CloudError as error:
            raise RunRefused(f"--queue: {error.message}") from None
        if not self._client.has_credentials:
            raise RunRefused("--queue: needs AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or a role")
        self._url = url
        self._place = place
        self._retry = retry
        self._report = report
        self._held: dict[str, asyncio.Task[None]] = {}

    async def announcements(self) -> AsyncGenerator[Announced, None]:
        """Yields new objects until the caller closes it. Raises CloudError."""
        asked = {"MaxNumberOfMessages": _MAX_MESSAGES, "WaitTimeSeconds": _WAIT_S, "VisibilityTimeout": _HELD_S}
        while True:
            answer = await self._call("receive_message", asked)
            messages = answer.get("Messages") or ()
            for message in messages:  # even a message that waits until the messages before it are announced
                self._held[message["ReceiptHandle"]] = asyncio.create_task(self._hold(message["ReceiptHandle"]))
            for message in messages:
                async for announced in self._announced(message["Body"], message["ReceiptHandle"]):
                    yield announced

    async def _announced(self, body: str, receipt: str) -> AsyncGenerator[Announced, None]:
        created = read_notification(body)
        keys = None if created is None else self._place.keys(created)
        if keys is None:
            self._held.pop(receipt).cancel()
            self._report(body[:200])
            return
        if not keys:
            await self._delete(receipt)
            return
        left = len(keys)

        async def done() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                await self._delete(receipt)

        for key in keys:
            yield Announced(key, done)

    async def _hold(self, receipt: str) -> None:
        """Keeps the message hidden. If this fails, SQS delivers the message again, but its result already exists."""
        while True:
            await asyncio.sleep(_HELD_S / 3)
            with suppress(CloudError):
                await self._call("change_message_visibility", {"ReceiptHandle": receipt, "VisibilityTimeout": _HELD_S})

    async def _delete(self, receipt: str) -> None:
        self._held.pop(receipt).cancel()
        await self._call("delete_message", {"ReceiptHandle": receipt})

    async def aclose(self) -> None:
        for task in self._held.values():
            task.cancel()
        await asyncio.gather(*self._held.values(), return_exceptions=True)
        self._client.close()

    async def _call(self, method: str, values: Mapping[str, Any]) -> Any:
        return await self._retry.run(self._attempt, method, values)

    async def _attempt(self, method: str, values: Mapping[str, Any]) -> Any:
        return await self._client.call(method, QueueUrl=self._url, **values)
