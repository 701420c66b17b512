"""The parts of a Markdown page that can be checked: its fenced blocks, its tables and its links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_FENCE = re.compile(r"^( *)```(\S*) *\n(.*?)^\1``` *$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)")  # with or without a title


@dataclass(frozen=True)
class Block:
    """One fenced block, its place, and the ``text`` block that shows its output."""

    page: str
    line: int
    language: str
    code: str
    output: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}:{self.language}"


def pages() -> list[str]:
    """Returns README.md, the pages of docs/ and the recipes."""
    docs = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/recipes").glob("*.md")]
    return ["README.md", *sorted(str(path.relative_to(ROOT)) for path in docs)]


def pages_of_reference() -> list[str]:
    """Returns the pages that `make docs-reference` writes completely."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs/reference").glob("*.md"))


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    """Returns the page's blocks in order; a ``text`` block belongs to the block before it."""
    text = read(page)
    found: list[Block] = []
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        language, code = match[2], match[3]
        if language == "text" and found and found[-1].output is None:
            before = found.pop()
            found.append(Block(page, before.line, before.language, before.code, code))
        else:
            found.append(Block(page, line, language, code))
    return found


def table(page: str, heading: str) -> list[list[str]]:
    """Returns the rows and cells of the first table under a heading, without its head."""
    text = read(page)
    section = text.partition(f"# {heading}\n")[2]
    assert section, f"{page} has no heading {heading!r}"
    section = _HEADING.split(section)[0]
    rows = [line.strip().strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    assert len(rows) > 2, f"{page} has no table under {heading!r}"
    return [[cell.strip() for cell in row] for row in rows[2:]]


def code_spans(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def compare(shown: str, output: str) -> None:
    """Checks that the output has every line of ``shown``, in this order; … matches anything."""
    lines = iter(output.splitlines())
    for expected in shown.splitlines():
        pattern = ".*".join(re.escape(part) for part in expected.strip().split("…"))
        assert any(re.fullmatch(pattern, line.strip()) for line in lines), f"no line is {expected!r} in:\n{output}"


@dataclass(frozen=True)
class Link:
    """A link to a file of this repository, and to a heading in it if ``anchor`` is not empty."""

    target: Path
    anchor: str

    def leads_somewhere(self) -> bool:
        if not self.target.exists():
            return False
        headings = _HEADING.findall(self.target.read_text(encoding="utf-8")) if self.anchor else []
        return not self.anchor or self.anchor in {
            re.sub(r"[^\w-]", "", each.lower().replace(" ", "-")) for each in headings
        }


def local_links(page: str) -> list[Link]:
    """Returns the links to files of this repository."""
    found = []
    for target in _LINK.findall(read(page)):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            found.append(Link((ROOT / page).parent / path if path else ROOT / page, anchor))
    return found
