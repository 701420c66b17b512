"""The full names of units."""

from __future__ import annotations


class Units:
    """``units``: the full name by each short name."""

    def __init__(self) -> None:
        self.units: dict[str | None, str] = {
            "ms": "Milliseconds",
            "s": "Seconds",
            "percent": "Percent",
            "count": "Count",
            "MB": "Megabytes",
            "GB": "Gigabytes",
            "kB": "Kilobytes",
            "B": "Bytes",
            "": "unit",
            None: "unit",
        }
