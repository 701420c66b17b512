"""The folder of a model's weights and tokenizer, converted if need be; what peers load and prompts are made with.

Knows nothing of servers. torch is imported in a process of its own: the measuring one stays small.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LOCATE = """
import json, sys
from mlserver_torch_stream.engine.loading.model_files import locate
from mlserver_torch_stream.settings import parse_settings
print(locate(parse_settings(sys.argv[1], json.loads(sys.argv[2]))).location)
"""
_CONVERT_S = 1800.0


class NoFolder(Exception):
    """A model whose files are in no folder of this machine."""


def model_folder(uri: str, extra: Mapping[str, Any]) -> Path:
    """Raises NoFolder."""
    command = [sys.executable, "-c", _LOCATE, uri, json.dumps({**extra})]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_CONVERT_S, stdin=subprocess.DEVNULL)
    lines = done.stdout.split()
    folder = Path(lines[-1]) if lines else Path()
    if done.returncode or not lines or not (folder / "tokenizer.json").is_file():
        raise NoFolder(f"no folder with a tokenizer.json for {uri!r}: {(done.stderr.strip().splitlines() or [''])[-1]}")
    return folder


def max_model_len(folder: Path) -> int:
    """Tokens, as the model's own config says."""
    return int(json.loads((folder / "config.json").read_text()).get("max_position_embeddings", 2048))
