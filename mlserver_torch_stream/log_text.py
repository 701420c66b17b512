"""Escapes a text that a handler, an error or a client supplies, so that it fits into one line of the log.

Without escapes, such a text could forge a log line, move a terminal's cursor, or fail to be encoded.
"""

from __future__ import annotations

import re

# Control characters (except the tab), directional marks, line separators, and lone surrogates.
_UNFIT = re.compile("[\0-\x08\n-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def log_text(text: object) -> str:
    """Returns the text with escapes, such as ``\\x1b``, for characters that control a terminal or end a line."""
    return _UNFIT.sub(lambda match: match.group().encode("unicode_escape").decode(), str(text))
