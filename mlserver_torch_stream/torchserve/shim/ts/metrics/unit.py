"""Names of units in full."""

from __future__ import annotations


class Units:
    """``units``: the name of each unit that a metric is given."""

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
