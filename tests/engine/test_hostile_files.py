"""Malicious model files: every load ends within seconds with an error of this package, and the process goes on."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine import hostile_files
from tests.engine.tiny_gguf import write_tiny_gguf


@pytest.mark.parametrize(
    "examples",
    [pytest.param(1, id="some", marks=pytest.mark.long), pytest.param(300, id="many", marks=pytest.mark.slow)],
)
def test_hostile_files_end_in_errors_of_ours(examples: int, tiny_model: Path, tmp_path: Path) -> None:
    """Loads ``examples`` each of GGUF headers, safetensors headers, configs and tokenizers."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    gguf_file = write_tiny_gguf(tmp_path / "tiny.gguf")
    command = [sys.executable, "-m", hostile_files.__name__, str(folder), str(gguf_file), str(examples)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60 + 30 * examples)
    assert ended.returncode == 0, f"{ended.returncode}: {ended.stderr[-4000:]}"
