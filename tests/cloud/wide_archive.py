"""A tar.gz with tables whose rows of 20 KB compress to a fifth, written as a stream."""

from __future__ import annotations

import base64
import gzip
import random
import tarfile
import zlib
from array import array
from pathlib import Path

_MEMBER_ROWS = 1_000


def wide_row(number: int) -> bytes:
    """Returns record ``number``: the number and a text, 20,480 bytes including the line ending."""
    head = b"%d," % number
    text = base64.b64encode(random.Random(number).randbytes(3840)) * 4
    return head + text[: 20_479 - len(head)] + b"\n"


def write_wide_archive(path: Path, rows: int) -> array[int]:
    """Writes members from ``t/000000.csv`` on, with 1,000 rows each. Returns the checksums of the rows' texts."""
    checksums = array("I")
    with gzip.open(path, "wb", compresslevel=1) as out:
        for first in range(0, rows, _MEMBER_ROWS):
            records = [wide_row(number) for number in range(first, min(first + _MEMBER_ROWS, rows))]
            checksums.extend(zlib.crc32(record[record.index(b",") + 1 : -1]) for record in records)
            info = tarfile.TarInfo(f"t/{first:06}.csv")
            info.size = sum(map(len, records))
            out.write(info.tobuf())
            out.writelines(records)
            out.write(bytes(-info.size % tarfile.BLOCKSIZE))
        out.write(bytes(2 * tarfile.BLOCKSIZE))
    return checksums
