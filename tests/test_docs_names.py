"""The files, folders and classes that the pages name exist.

Does not check what the pages say about them. ``benchmarks/LOG.md`` is left out, as it names files as they were then.
"""

from __future__ import annotations

import ast
import re

import pytest

from tests import markdown
from tests.markdown import ROOT

_PAGES = [*markdown.pages(), "CONTRIBUTING.md", "benchmarks/README.md"]
_FILES = [str(path.relative_to(ROOT)) for top in ("mlserver_torch_stream", "tests", "benchmarks", "docs", "deploy")
          for path in sorted((ROOT / top).rglob("*"))]  # fmt: skip
_TOP = [path.name for path in ROOT.iterdir()]
_SOURCE = re.compile(r"[\w.-]+(?:/[\w.-]+)*(?:\.(?:py|h|cpp)|/)")  # a source file, or a folder
_IN_THE_REPOSITORY = re.compile(r"(?:mlserver_torch_stream|tests|benchmarks|docs|deploy)/[\w./-]+")
_CLASS = re.compile(r"[A-Z][a-z]+(?:[A-Z][a-z0-9]+)+")
# Files of other projects, and examples of a user's.
_OF_OTHERS = {
    "docs/cloud-python.md": {"ml/inference/base.py", "transforms/util.py", "execution_options.py"},
    "docs/compatibility.md": {"ts_scripts/torchserve_grpc_client.py"},
    "docs/moving-from-torchserve.md": {"model-store/"},
    "docs/torchserve.md": {"assistant/"},
    "benchmarks/README.md": {"llama.cpp"},
}


def _named(page: str) -> list[str]:
    text = re.sub(r"^( *)```.*?^\1```", "", markdown.read(page), flags=re.MULTILINE | re.DOTALL)
    return markdown.code_spans(text)


def _is_there(path: str) -> bool:
    return any(f"/{file}/".endswith(f"/{path.rstrip('/')}/") for file in [*_FILES, *_TOP])


@pytest.mark.parametrize("page", _PAGES)
def test_the_files_and_folders_that_a_page_names_exist(page: str) -> None:
    others = _OF_OTHERS.get(page, set())
    named = {span for span in _named(page) if _SOURCE.fullmatch(span) or _IN_THE_REPOSITORY.fullmatch(span)}
    assert others <= named, "an exception that the page does not need any more"
    assert {path for path in named - others if not _is_there(path)} == set()


def test_the_classes_that_the_architecture_names_exist() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "mlserver_torch_stream").rglob("*.py")]
    classes = {name for source in sources for name in re.findall(r"^ *class (\w+)[(:]", source, re.MULTILINE)}
    pages = _named("docs/architecture.md") + _named("docs/engine.md")
    named = {span for span in pages if _CLASS.fullmatch(span)}
    assert len(named) > 15 and named - classes == set()


def test_the_glossary_is_a_page_of_one_look() -> None:
    assert 10 < len(markdown.table("docs/architecture.md", "Glossary")) <= 30


def _defined(file: str) -> set[str]:
    (path,) = [path for path in _FILES if path.startswith("mlserver_torch_stream/") and f"/{path}".endswith(f"/{file}")]
    tree = ast.parse(markdown.read(path))
    named = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    defined = {node.name for node in ast.walk(tree) if isinstance(node, named)}
    tables = [node.target for node in tree.body if isinstance(node, ast.AnnAssign)]
    tables += [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    return defined | {each.id for each in tables if isinstance(each, ast.Name)}


def _check_places(cell: str) -> None:
    """Checks that each place of the cell is a file and names that it defines."""
    places = [markdown.code_spans(place) for place in cell.split("; ") if "`" in place]
    assert places, cell
    for file, *names in places:
        assert names and set(names) <= _defined(file), cell


def test_the_likely_changes_touch_what_is_there() -> None:
    rows = markdown.table("docs/architecture.md", "Likely changes")
    assert len(rows) >= 6
    for _, _, edited in rows:
        _check_places(edited)


def test_the_places_to_look_at_are_there() -> None:
    for _, place in markdown.table("docs/architecture.md", "Where to look"):
        if "`" in place:
            _check_places(place)


def test_the_hops_of_a_request_are_there() -> None:
    rows = markdown.table("docs/architecture.md", "One request, hop by hop")
    assert [int(number) for number, _, _ in rows] == list(range(1, len(rows) + 1))
    for _, place, _ in rows:
        _check_places(place)


def test_the_lines_of_a_step_are_those_of_the_code() -> None:
    section = markdown.read("docs/engine.md").partition("## One step\n")[2].partition("\n## ")[0]
    lines = section.partition("```text\n")[2].partition("```")[0].splitlines()
    engine = ROOT / "mlserver_torch_stream/engine"
    code = "".join((engine / file).read_text() for file in ("core.py", "step/continuous.py", "scheduler/scheduler.py"))
    names = {name for line in lines for name in re.findall(r"(\w+)\(", line.partition("#")[0])}
    assert 10 <= len(lines) <= 15 and len(names) > 5
    assert {name for name in names if not re.search(rf"\b_?{name}[(,]", code)} == set()
