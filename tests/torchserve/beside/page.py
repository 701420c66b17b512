"""The pages of docs/torchserve/ that tests generate from measurements, or compare with the existing page."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import unified_diff

from tests.markdown import ROOT, read
from tests.torchserve.beside.case import Case
from tests.torchserve.beside.reply import Reply

_WRITE = "WRITE_TORCHSERVE_PAGES"
_LONGEST = 200  # characters of a body that a cell shows
# Headers that every reply of TorchServe has; a cell shows them where the two have different ones.
_USUAL = frozenset({"pragma", "cache-control", "expires", "x-request-id"})
_OF_THE_BODY = frozenset({"content-length", "transfer-encoding"})

Measured = tuple[Case, Sequence[Reply], Sequence[Reply]]


def hold(page: str, text: str) -> None:
    """Fails if the page has another text. If the variable WRITE_TORCHSERVE_PAGES is set, writes the page instead."""
    path = ROOT / page
    if os.environ.get(_WRITE):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    said = read(page) if path.exists() else ""
    changed = "\n".join(unified_diff(said.splitlines(), text.splitlines(), page, "measured", n=0, lineterm=""))
    assert said == text, f"{page} is not what was measured; {_WRITE}=1 writes it anew\n{changed}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines]


def sections(measured: Mapping[str, Sequence[Measured]]) -> list[str]:
    """Returns a table of the differing cases under each heading, and the names of the others."""
    lines = []
    for heading, rows in measured.items():
        same = [case.name for case, theirs, ours in rows if are_the_same(theirs, ours)]
        differing = [_row(*each) for each in rows if each[0].name not in same]
        lines += ["", f"## {heading}", ""]
        lines += table(("case", "request", "TorchServe 0.12", "here", "why"), differing) if differing else []
        lines += ["", f"The same ({len(same)} of {len(rows)}): {'; '.join(same)}."] if same else []
    return lines


def are_the_same(theirs: Sequence[Reply], ours: Sequence[Reply]) -> bool:
    return len(theirs) == len(ours) and not any(each.differs(other) for each, other in zip(theirs, ours, strict=True))


def _row(case: Case, theirs: Sequence[Reply], ours: Sequence[Reply]) -> list[str]:
    asked = ["<br>".join(f"`{line}`" for line in case.requests), " (at once)" if case.together else ""]
    pairs = list(zip(theirs, ours, strict=True))
    cells = ["<br>".join(_shown(*pair) for pair in pairs), "<br>".join(_shown(*pair[::-1]) for pair in pairs)]
    return [case.name, "".join(asked), *cells, case.why]


def _shown(reply: Reply, other: Reply) -> str:
    """Returns a table cell for a reply: its status, the relevant headers, and its body."""
    usual = {name for name in _USUAL if reply.headers.get(name) == other.headers.get(name, reply.headers.get(name))}
    parts = [str(reply.status)] if reply.status else []
    parts += [code(f"{name}: {reply.headers[name]}") for name in sorted({*reply.headers} - usual - _OF_THE_BODY)]
    parts += [counted(len(reply.pieces), "chunk")] if "transfer-encoding" in reply.headers else []
    parts += [code(text_of(piece)) for piece in reply.pieces if piece]
    parts += [code(text_of(reply.details.encode()))] if reply.details else []
    return ", ".join([*parts, *([reply.fault] if reply.fault else [])])


def text_of(piece: bytes) -> str:
    """Returns a body as one line."""
    try:
        text = piece.decode()
    except UnicodeDecodeError:
        text = repr(piece)
    if not text.isprintable():
        text = re.sub(r"\s+", " ", text).strip()
    if not text.isprintable():
        text = repr(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} … ({len(piece)} bytes)"


def counted(number: int, name: str) -> str:
    """Returns the number with the name, in the plural unless the number is 1."""
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def code(text: str) -> str:
    """Returns the text as a code span."""
    if not text:
        return "nothing"
    return f"`{text}`" if "`" not in text else f"`` {text} ``"
