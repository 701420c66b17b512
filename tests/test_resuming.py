"""`make test-clients` and `make test-vllm` go on where an earlier run stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_THREE = """
import os
def test_first(): pass
def test_second(): assert "STOP" not in os.environ
def test_third(): "STOP" not in os.environ or os._exit(1)
"""


@pytest.mark.long
def test_the_next_run_leaves_out_what_has_passed(tmp_path: Path) -> None:
    (tmp_path / "test_three.py").write_text(_THREE)
    _run(tmp_path, STOP="1")  # the second test fails, and the process ends amid the third
    assert "2 passed, 1 deselected" in _run(tmp_path)


def _run(folder: Path, **environment: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.resuming", "test_three.py"]
    checkout = str(Path(__file__).parents[1])
    variables = {
        **os.environ,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": checkout,
        "PASSED_TESTS": str(folder / "passed"),
        **environment,
    }
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300, check=False)
    return done.stdout
