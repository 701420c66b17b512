"""Makes archives and tables in memory, in the formats that other tools write."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable


def tar(members: Iterable[tuple[str, bytes]], mode: str = "w:gz", form: int = tarfile.PAX_FORMAT) -> bytes:
    """Returns a tar archive; names that end with a slash are folders."""
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode=mode, format=form) as archive:  # type: ignore[call-overload]
        for name, data in members:
            info = tarfile.TarInfo(name.rstrip("/"))
            info.size, info.type = len(data), tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            archive.addfile(info, io.BytesIO(data))
    return found.getvalue()


def reviews(count: int) -> bytes:
    """Returns a CSV table whose third column has a comma, a quote and, in each tenth record, a line break."""
    lines = [
        f'"{i % 2 + 1}","title {i}","text {i}, ""quoted""{chr(10) if i % 10 == 0 else " "}end"' for i in range(count)
    ]
    return ("\n".join(lines) + "\n").encode()
