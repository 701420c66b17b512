"""A pytest plugin, ``-p tests.resuming``: a run skips the tests that an earlier run has passed.

The variable PASSED_TESTS names the file with their names; without it, every test runs.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_PASSED = "PASSED_TESTS"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    file = Path(os.environ.get(_PASSED, ""))
    passed = set(file.read_text().splitlines()) if file.is_file() else set()
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if _PASSED in os.environ and report.when == "call" and report.passed:
        with Path(os.environ[_PASSED]).open("a") as file:
            file.write(f"{report.nodeid}\n")
