"""The reference tables in docs/ are what the generator makes from the code.

The generator runs in a separate process, as it makes a REST server with all routes, which registers metrics.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Literal

import pytest
from pydantic import BaseModel

from docs import reference
from tests.markdown import ROOT


def test_the_pages_are_what_make_docs_reference_writes() -> None:
    command = [sys.executable, "-m", "docs.reference", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_field_of_settings_without_a_meaning_is_named() -> None:
    class Settings(BaseModel):
        told: int = 1
        """What it is."""
        untold: Literal["a"] = "a"

    with pytest.raises(ValueError, match=r"Settings\.untold"):
        list(reference._fields(Settings))


@pytest.mark.parametrize("groups", [{"a": "known"}, {"a": "known new gone"}])
def test_a_setting_without_a_group_and_a_group_without_its_setting_are_named(groups: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="new" if "gone" not in groups["a"] else "gone"):
        reference.chosen({"known": ("known",), "new": ("new",)}, groups, "a")
