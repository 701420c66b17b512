"""TorchServe's recorded replies: a line of JSON for each case, with the bytes of its replies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.torchserve.beside.reply import Reply

_FILE = Path(__file__).with_name("torchserve-0.12.jsonl")


def write(recorded: Mapping[str, Sequence[Reply]]) -> None:
    lines = [json.dumps({"case": name, "replies": [_as_json(reply) for reply in recorded[name]]}) for name in recorded]
    _FILE.write_text("\n".join([*lines, ""]), encoding="utf-8")


def read() -> dict[str, list[Reply]]:
    """Returns the replies by the names of cases."""
    lines = map(json.loads, _FILE.read_text(encoding="utf-8").splitlines())
    return {line["case"]: [_from_json(reply) for reply in line["replies"]] for line in lines}


def _as_json(reply: Reply) -> dict[str, Any]:
    """Writes each byte as the character with its number."""
    said = {
        **vars(reply),
        "headers": dict(reply.headers),
        "pieces": [piece.decode("latin-1") for piece in reply.pieces],
    }
    return {name: value for name, value in said.items() if value}


def _from_json(said: Mapping[str, Any]) -> Reply:
    return Reply(**{**said, "pieces": [piece.encode("latin-1") for piece in said.get("pieces", ())]})
