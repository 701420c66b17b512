"""The table of docs/compatibility.md has a cell for each tested feature of a client, and a test for each cell."""

from __future__ import annotations

import re

import pytest

from tests import markdown
from tests.clients import open_webui_bodies
from tests.clients.environments import NODE_PACKAGES, PACKAGES
from tests.clients.page import PAGE, REFUSED, ROWS, YES, Row, scripts

_NOT_IMPLEMENTED = "tools, schemas, images"
_LOCKED = dict(re.findall(r"^([\w.-]+)==([\w.+]+)", markdown.read("constraints.txt"), re.MULTILINE))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.key)
def test_the_cells_of_a_client_are_the_features_that_its_script_tries(row: Row) -> None:
    assert set(row.tried) == row.features
    for feature, cell in row.cells:
        assert (cell == REFUSED) == (feature == _NOT_IMPLEMENTED and feature in row.features), feature


def test_every_script_has_a_row() -> None:
    assert sorted(row.script for row in ROWS) == sorted(scripts())


def test_a_cell_that_says_no_names_a_reason_that_the_page_explains() -> None:
    reasons = {key: text for key, text in re.findall(r"^- \*(\w)\*: (.+)$", markdown.read(PAGE), re.MULTILINE)}
    said = {cell for row in ROWS for _, cell in row.cells} - {YES, REFUSED}
    assert said and said == {f"- *{key}*" for key in reasons}, "each reason is used and each use has a reason"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.key)
def test_the_version_of_a_client_is_the_one_that_is_installed(row: Row) -> None:
    if row.environment is not None:
        pinned = PACKAGES[row.environment][0]
    else:
        name = next(name for name in _LOCKED if row.key == name or row.key.startswith(f"{name}-"))
        pinned = f"{name}=={_LOCKED[name]}"
    assert row.version == pinned.rpartition("==")[2]


def test_a_feature_that_this_package_has_links_to_its_test() -> None:
    """A cell consists only of links, each named after a test in the linked file."""
    rows = markdown.table(PAGE, "Features beside other servers")
    linked = 0
    for feature, ours, *_ in rows:
        if ours in ("no", "not run yet"):
            continue
        for link in ours.split(", ["):
            found = re.fullmatch(r'\[?yes[^]]*\]\(\.\./(tests/\w+/test_\w+\.py) "(test_\w+)"\)', link)
            assert found, f"{feature}: {link}"
            path, test = found.groups()
            assert len(re.findall(rf"^(?:async )?def {test}\(", markdown.read(path), re.MULTILINE)) == 1, feature
            linked += 1
    assert linked >= len(rows) / 2


def test_every_tool_was_tried_by_a_script_or_a_test_with_the_version_that_is_installed() -> None:
    pinned = [each for packages in (*PACKAGES.values(), *NODE_PACKAGES.values()) for each in packages]
    named = f"{pinned} {markdown.read('Makefile')} {open_webui_bodies.__doc__}"
    for tool, version, *cells, tried in markdown.table(PAGE, "More tools"):
        assert set(cells) <= {YES, "-"} and YES in cells, tool
        assert re.search(r"\]\(\.\./tests/clients/\w+\.py\)", tried), tool
        assert re.search(rf"(==|@| ){re.escape(version)}\W", named), tool


def test_every_other_test_of_a_client_is_named_on_the_page() -> None:
    patterns = ("tests/clients/test_*", "tests/server/test_*clients*", "tests/*/test_*_sdk*", "tests/*/test_*seldon*")
    files = {path for pattern in patterns for path in markdown.ROOT.glob(f"{pattern}.py")}
    named = set(re.findall(r"tests/[\w/]+\.py", markdown.read(PAGE)))
    assert {str(path.relative_to(markdown.ROOT)) for path in files} - named == set()
