"""The table of docs/compatibility.md, client by feature, as the tests read it.

Knows nothing of how a client is run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests import markdown
from tests.clients.environments import PACKAGES

PAGE = "docs/compatibility.md"
YES, REFUSED = "yes", "refused"
_HERE = Path(__file__).parent
_FEATURE = re.compile(r'^@feature\("(.+)"\)$', re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """One client: its version, the script that tests it, and its cells by column name."""

    client: str
    version: str
    script: Path
    cells: tuple[tuple[str, str], ...]

    @property
    def key(self) -> str:
        return self.script.stem.removeprefix("with_").replace("_", "-")

    @property
    def environment(self) -> str | None:
        """Returns the client's environment; None means the interpreter of the tests."""
        return next((name for name in PACKAGES if self.key == name or self.key.startswith(f"{name}-")), None)

    @property
    def tried(self) -> list[str]:
        return [feature for feature, cell in self.cells if cell in (YES, REFUSED)]

    @property
    def features(self) -> set[str]:
        """Returns the features that the script tests."""
        return set(_FEATURE.findall(self.script.read_text()))


def scripts() -> set[Path]:
    return set(_HERE.glob("with_*.py"))


def _columns() -> list[str]:
    line = next(line for line in markdown.read(PAGE).splitlines() if line.startswith("| client | version |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def _rows() -> list[Row]:
    columns = _columns()[2:]
    rows = []
    for client, version, *cells in markdown.table(PAGE, "Client by feature"):
        (name,) = re.findall(r"\]\(\.\./tests/clients/(\w+\.py)\)", client)
        rows.append(Row(client, version, _HERE / name, tuple(zip(columns, cells, strict=True))))
    return rows


ROWS = _rows()
