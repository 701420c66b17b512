"""Counts the files and lines of each part of the package: code, docstrings, comments and blank lines separately.

``python -m benchmarks.package_size [FOLDER]`` counts a checkout, this one by default. It also counts the modules that
have one importer and fewer than 80 lines.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter, defaultdict
from pathlib import Path

_PACKAGE = "mlserver_torch_stream"
_SMALL = 80
_NATIVE = (".h", ".cpp")
_COLUMNS = ("files", "code", "docstrings", "comments", "blank")


def _python_lines(source: str) -> Counter[str]:
    """Counts each line once: as blank, docstring, comment or code."""
    tree = ast.parse(source)
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docstrings = {
        line
        for node in ast.walk(tree)
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    comments = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
    }
    counts: Counter[str] = Counter()
    for number, line in enumerate(source.splitlines(), 1):
        if number in docstrings:
            counts["docstrings"] += 1
        elif number in comments:
            counts["comments"] += 1
        else:
            counts["code" if line.strip() else "blank"] += 1
    return counts


def _native_lines(source: str) -> Counter[str]:
    lines = [line.strip() for line in source.splitlines()]
    comments = sum(line.startswith("//") for line in lines)
    blank = sum(not line for line in lines)
    return Counter({"comments": comments, "blank": blank, "code": len(lines) - comments - blank})


def _importers(sources: dict[str, str]) -> dict[str, set[str]]:
    """Returns for each module the other modules of the package that import it or one of its names."""
    importers: dict[str, set[str]] = defaultdict(set)
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
            else:
                continue
            for name in names & sources.keys() - {module}:
                importers[name].add(module)
    return importers


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    rooms: dict[str, Counter[str]] = defaultdict(Counter)
    sources: dict[str, str] = {}
    for path in sorted((root / _PACKAGE).rglob("*")):
        if path.suffix not in (".py", *_NATIVE):
            continue
        parts = path.relative_to(root / _PACKAGE).parts
        room = parts[0] if len(parts) > 1 else "(root)"
        source = path.read_text(encoding="utf-8")
        rooms[room] += Counter({"files": 1}) + (_python_lines if path.suffix == ".py" else _native_lines)(source)
        if path.suffix == ".py":
            module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            sources[module] = source
    print(f"{'room':12}" + "".join(f"{name:>12}" for name in _COLUMNS))
    for room, counts in rooms.items():
        print(f"{room:12}" + "".join(f"{counts[name]:12}" for name in _COLUMNS))
    total: Counter[str] = sum(rooms.values(), Counter())
    print(f"{'all':12}" + "".join(f"{total[name]:12}" for name in _COLUMNS))
    importers = _importers(sources)
    small = sorted(
        f"{module} ({len(source.splitlines())})"
        for module, source in sources.items()
        if ".shim" not in module and len(importers[module]) == 1 and len(source.splitlines()) < _SMALL
    )
    print(f"{len(small)} modules with one importer and fewer than {_SMALL} lines: {', '.join(small)}")


if __name__ == "__main__":
    main()
