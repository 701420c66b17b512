"""Declares how Qwen3-Coder and GLM write calls with XML tags, as ``response_template`` declares it.

Knows nothing of how such a declaration is used. The values get the types that the functions' schemas name.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from mlserver_torch_stream.engine.text.response_template import AnswerTemplate

QWEN3_CODER_PARSER, GLM_PARSER = "qwen3_coder", "glm45"
_PATTERNS = {
    QWEN3_CODER_PARSER: (
        r"<tool_call>\s*<function=(?P<name>[^>\s]+)>",
        r"<parameter=(?P<key>[^>]+)>\n?(?P<value>.*?)\n?</parameter>",
    ),
    GLM_PARSER: (
        r"<tool_call>\s*(?P<name>[^\s<]+)",
        r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
    ),
}
_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


@cache
def xml_calls(parser: str) -> AnswerTemplate:
    begin, tags = _PATTERNS[parser]
    calls: Mapping[str, Any] = {
        "open_pattern": begin,
        "close": "</tool_call>",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {"tag_pattern": tags},
        "transform": _CALL,
    }
    return AnswerTemplate({"start_anchor": "<tool_response>", "fields": {"tool_calls": calls, "content": {}}})
