"""The pages about objects in clouds name only options that exist."""

from __future__ import annotations

import re
import shlex

import pytest

from mlserver_torch_stream.cli.cloud_options import parser
from tests import markdown

_PAGES = [page for page in markdown.pages() if page.startswith("docs/cloud") or "bucket" in page]
_COMMANDS = [
    line
    for page in _PAGES
    for block in markdown.blocks(page)
    for line in block.code.splitlines()
    if line.startswith("mlserver-torch-stream cloud ")
]


@pytest.mark.parametrize("command", _COMMANDS)
def test_every_command_on_the_page_can_be_typed(command: str) -> None:
    words = shlex.split(command.partition(" > ")[0])
    parser().parse_args(words[2:])


def test_every_option_that_the_page_names_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    known = set()
    for command in ("run", "watch"):
        with pytest.raises(SystemExit):
            parser().parse_args([command, "--help"])
        known |= set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    lines = [line for page in _PAGES for line in markdown.read(page).splitlines() if not line.startswith("pip ")]
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", "\n".join(lines))) <= known


def test_the_install_lines_bring_the_embedded_model_as_the_makefile_does() -> None:
    version = re.search(r"^EMBEDDED := (\S+)$", markdown.read("Makefile"), re.MULTILINE)
    assert version is not None
    install = next(block.code for block in markdown.blocks("docs/cloud.md") if "pip install" in block.code)
    assert f"pip install --no-deps {version[1]} " in install and "mlserver-torch-stream[cloud]" in install
