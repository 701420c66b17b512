"""Reads and writes the manifest of an output, which says which run the output belongs to and when that run began.

Knows nothing of what a configuration holds: a configuration with another value is another run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mlserver_torch_stream.cloud.backoff import Retry
from mlserver_torch_stream.cloud.cloud_errors import ObjectExists, RunRefused
from mlserver_torch_stream.cloud.naming import MANIFEST, differences, digest
from mlserver_torch_stream.cloud.rows import RunIdentity
from mlserver_torch_stream.cloud.store import Store, get_or_none

FORMAT = 2  # of manifests and output rows
_MOST_DIFFERENCES = 4
_OWN = ("format", "run", "created")  # keys of a manifest that are not part of the configuration


async def read_claim(output: Store, config: Mapping[str, Any], retry: Retry) -> RunIdentity | None:
    """The run that the output belongs to, if that is the run of ``config``; None if the output belongs to no run yet.

    Raises RunRefused where the output belongs to another run.
    """
    found = await get_or_none(output, MANIFEST, retry)
    if found is None:
        return None
    try:
        was = json.loads(found)
        form, run = was["format"], RunIdentity(str(was["run"]), int(was["created"]) if was["format"] == FORMAT else 0)
    except (ValueError, KeyError, TypeError):
        raise RunRefused(f"--output: the manifest in {output.url} was not written by this program") from None
    if form != FORMAT:
        raise RunRefused(
            f"--output: {output.url} was written in format {form}, by another version of this program, whose rows look "
            f"different from those of format {FORMAT}; choose an empty place"
        )
    differing = differences({key: value for key, value in was.items() if key not in _OWN}, config)
    if differing:
        raise RunRefused(f"--output: {output.url} belongs to another run: {'; '.join(differing[:_MOST_DIFFERENCES])}")
    return run


async def claim(output: Store, config: Mapping[str, Any], created: int, retry: Retry) -> RunIdentity:
    """Makes the output this run's if it belongs to no run yet. Raises RunRefused where it belongs to another run."""
    run = identify(config, created)
    manifest = {"format": FORMAT, "run": run.id, "created": created, **config}
    text = json.dumps(manifest, indent=2, sort_keys=True).encode() + b"\n"
    try:
        await retry.run(output.create, MANIFEST, text)
    except ObjectExists:
        found = await read_claim(output, config, retry)
        assert found is not None, "the manifest has gone"
        return found
    return run


def identify(config: Mapping[str, Any], created: int) -> RunIdentity:
    return RunIdentity(digest(config), created)
