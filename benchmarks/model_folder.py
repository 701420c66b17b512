"""Finds, or makes by conversion, the folder with the model's weights and tokenizer, which peers and prompts use.

A separate process imports torch, so that the measuring process stays small.
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
from mlserver_torch_stream.engine.loading.locate import locate
from mlserver_torch_stream.settings import parse_settings
print(locate(parse_settings(sys.argv[1], json.loads(sys.argv[2]))).location)
"""
_FIND = """
import sys
from mlserver_torch_stream.engine.loading.embedded import find_embedded
from mlserver_torch_stream.settings import parse_settings
source = parse_settings(sys.argv[1], {}).source
print(find_embedded(source.location) if source.kind == "embedded" else source.location)
"""
_CONVERT_S = 1800.0


class NoFolder(Exception):
    """Raised if this machine has no folder or file with the model."""


def model_folder(uri: str, extra: Mapping[str, Any]) -> Path:
    """Returns the model's folder, which may be a converted copy. Raises NoFolder if there is none."""
    folder = _told(_LOCATE, uri, json.dumps({**extra}))
    if not (folder / "tokenizer.json").is_file():
        raise NoFolder(f"no tokenizer.json in {folder}, the folder of {uri!r}")
    return folder


def gguf_file(uri: str) -> Path:
    """Returns the model's own GGUF file. Raises NoFolder if the model is not a GGUF file."""
    file = _told(_FIND, uri)
    if file.suffix != ".gguf" or not file.is_file():
        raise NoFolder(f"{uri!r} is not a GGUF file")
    return file


def _told(program: str, *arguments: str) -> Path:
    """Runs a program, and returns the path that it prints last."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_CONVERT_S, stdin=subprocess.DEVNULL)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        raise NoFolder(f"no files found for {arguments[0]!r}: {(done.stderr.strip().splitlines() or [''])[-1]}")
    return Path(lines[-1])
