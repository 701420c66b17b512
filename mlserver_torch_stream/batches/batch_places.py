"""The places of files, batches and runs in one folder or bucket.

Knows nothing of what is done there.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlserver_torch_stream.batches.batch_store import BatchStore
from mlserver_torch_stream.batches.file_store import FileStore
from mlserver_torch_stream.batches.object_ids import IdMaker
from mlserver_torch_stream.batches.store_errors import BatchesOff
from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.cloud_errors import CloudError, RunRefused, StoreUnavailable
from mlserver_torch_stream.cloud.store import Store


@dataclass(frozen=True, slots=True)
class BatchPlaces:
    """``url``: of the folder or bucket. ``runs/<batch>`` holds the parts of a batch that has not ended."""

    url: str
    files: FileStore
    batches: BatchStore
    retry: Retry

    @classmethod
    def open(cls, url: str, ids: IdMaker) -> BatchPlaces:
        """Raises BatchesOff, also where the library of stores is not installed."""
        if url.startswith(("http://", "https://")):
            raise BatchesOff("an HTTP server is for reading; files and batches need s3, gs, az or a folder")
        retry = Retry()
        try:
            url = Store.open(url).url
            files = FileStore(Store.open(f"{url}/files"), Store.open(f"{url}/contents"), retry, ids)
            return cls(url, files, BatchStore(Store.open(f"{url}/batches"), retry), retry)
        except CloudError as error:
            raise BatchesOff(error.message) from None

    @property
    def contents(self) -> str:
        return f"{self.url}/contents"

    def run(self, batch_id: str) -> str:
        return f"{self.url}/runs/{batch_id}"

    def open_run(self, batch_id: str) -> Store:
        """Raises StoreUnavailable, never RunRefused: the store was opened before, so it may well be again."""
        try:
            return Store.open(self.run(batch_id))
        except RunRefused as error:
            raise StoreUnavailable(error.message) from None
