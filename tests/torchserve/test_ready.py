"""A worker says that it is ready when its first request needs no more preparation than any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlserver_torch_stream.errors import LoadFailed
from tests.torchserve.workshop import ask, run, running, write_handler

# The first request is answered with the modules that were imported after the worker had said that it is ready.
_LATE_IMPORTS = """
import json, sys

at_ready = set()

def note(context):
    send = context.metrics._channel.send

    def noted(kind, **fields):
        if kind == "ready":
            at_ready.update(sys.modules)
        send(kind, **fields)

    context.metrics._channel.send = noted

class Handler:
    def initialize(self, context):
        note(context)

    DEF handle(self, data, context):
        return [json.dumps([sorted(set(sys.modules) - at_ready), "torch" in at_ready])] * len(data)
"""


@pytest.mark.parametrize(
    ("which", "config"),
    [
        ("package", {}),
        ("shim", {}),
        ("shim", {"continuousBatching": True}),
        ("shim", {"asyncCommunication": True}),
    ],
)
def test_a_worker_that_is_ready_imports_nothing_for_its_first_request(
    tmp_path: Path, which: str, config: dict[str, Any]
) -> None:
    source = _LATE_IMPORTS.replace("DEF", "async def" if "asyncCommunication" in config else "def")

    async def scenario() -> None:
        async with running(write_handler(tmp_path, source, config), which) as pool:
            late, with_torch = json.loads("".join(await ask(pool)))
        assert late == []
        assert with_torch == (which == "package")

    run(scenario())


def test_a_package_of_torchserve_that_cannot_be_used_fails_the_load_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libtorch_cpu.so: no such file')")

    async def scenario() -> None:
        with pytest.raises(LoadFailed, match="package cannot be used: OSError: libtorch_cpu"):
            async with running(write_handler(tmp_path, "def handle(data, context): return data"), "package"):
                pass

    run(scenario())
