"""The model store that both servers get: archives with small handlers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.torchserve.beside import handlers
from tests.torchserve.workshop import write_mar


@dataclass(frozen=True)
class Stored:
    """One archive of the store."""

    name: str
    source: str
    config: Mapping[str, Any] = field(default_factory=dict)
    version: str = "1.0"
    envelope: str | None = None

    @property
    def file(self) -> str:
        return f"{self.name}-{self.version}.mar"

    def write(self, folder: Path) -> None:
        """Writes the archive into ``model-store``, as KServe mounts it."""
        config = {"minWorkers": 1, "maxWorkers": 1, "deviceType": "cpu", **self.config}
        model = {"modelName": self.name, "modelVersion": self.version, "handler": "handler.py"}
        model["configFile"] = "model-config.yaml"
        if self.envelope is not None:
            model["envelope"] = self.envelope
        files = {"handler.py": self.source, "model-config.yaml": json.dumps(config)}  # JSON is YAML
        (folder / "model-store").mkdir(parents=True, exist_ok=True)
        write_mar(folder / "model-store" / self.file, files, model)


_BATCH = {"batchSize": 2, "maxBatchDelay": 5000}
SEQUENCES = {"sequenceBatching": True, "batchSize": 1, "maxNumSequence": 2, "sequenceMaxIdleMSec": 120_000}
STORE = (
    Stored("echo", handlers.ECHO),
    Stored("two", handlers.ECHO),
    Stored("two", handlers.ECHO, version="2.0"),
    Stored("do", handlers.DO),
    Stored("short", handlers.DO, {"responseTimeout": 2}),
    Stored("impatient", handlers.DO, {"clientTimeoutInMills": 1000}),
    Stored("ticket", handlers.DO, {"useJobTicket": True}),
    Stored("batch", handlers.BATCH, _BATCH),
    Stored("class", handlers.CLASS),
    Stored("stateful", handlers.STATEFUL, SEQUENCES),
)
ENVELOPES = {name: Stored("enveloped", handlers.ENVELOPED, envelope=name) for name in ("body", "json", "kserve")}
