"""Translates a Lark grammar into one regular expression, which is possible if no rule refers to itself.

It is needed because the input of a custom tool is a JSON string, which a JSON schema can constrain by a regular
expression but not by a grammar.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping

if sys.version_info >= (3, 11):
    from re import _parser  # type: ignore[attr-defined]
else:
    import sre_parse as _parser

_MAX_CHARACTERS = 1 << 16  # characters of the expression; each use of a rule adds the whole rule
_MAX_DEPTH = 100
_COMMON: Mapping[str, str] = {
    "CR": r"\r",
    "DIGIT": "[0-9]",
    "INT": "[0-9]+",
    "LETTER": "[A-Za-z]",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "WORD": "[A-Za-z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
_RULE = re.compile(r"[?!]?(\w+)(?:\.-?\d+)?\s*:")
_IMPORT = re.compile(r"%import\s+common\.(\w+)(?:\s*->\s*(\w+))?\s*")
_TOKEN = re.compile(
    r"""\s*(?:(?P<text>"(?:\\.|[^"\\])*")(?P<text_flags>i?)"""
    r"""|/(?P<regex>(?:\\.|[^/\\])+)/(?P<flags>[imsux]*)"""
    r"""|(?P<name>\w+)|(?P<repeat>~\s*\d+(?:\s*\.\.\s*\d+)?)|->\s*\w+|(?P<mark>[()\[\]|?*+]))"""
)


def regex_of_lark(definition: str) -> str:
    """Returns the expression of the rule ``start``.

    Raises ValueError. The error's message has no subject; the caller puts the grammar's name before it.
    """
    if len(definition) > _MAX_CHARACTERS:
        raise ValueError(f"has more than {_MAX_CHARACTERS} characters")
    expression = _Grammar(definition).rule("start")
    try:
        _parser.parse(expression)  # parsed only: compiling one large class takes 20 ms
    except (re.error, OverflowError, RecursionError):
        raise ValueError("cannot be read") from None
    return expression


class _Grammar:
    def __init__(self, definition: str) -> None:
        self._known: dict[str, str] = {}
        self._bodies: dict[str, str] = {}
        self._within: list[str] = []
        name = ""
        for line in definition.splitlines():
            line = re.sub(r"^\s*(//|#).*", "", line)
            imported, rule = _IMPORT.fullmatch(line), _RULE.match(line)
            if imported is not None and imported[1] in _COMMON:
                self._known[imported[2] or imported[1]] = f"(?:{_COMMON[imported[1]]})"
            elif line.startswith("%"):
                raise ValueError(f"has {line.split()[0]}, which is not implemented here")
            elif rule is not None:
                name = rule[1]
                self._bodies[name] = line[rule.end() :]
            elif line.strip():
                self._bodies[name] = f"{self._bodies.get(name, '')} {line}"

    def rule(self, name: str) -> str:
        if name in self._bodies and name not in self._known:
            if name in self._within:
                raise ValueError(f"has the rule {name}, which refers to itself: that is not implemented here")
            if len(self._within) >= _MAX_DEPTH:
                raise ValueError(f"has more than {_MAX_DEPTH} rules within each other")
            self._within.append(name)
            self._known[name] = self._expression(self._bodies[name])
            self._within.pop()
        if name not in self._known:
            raise ValueError(f"has no rule {name}")
        return self._known[name]

    def _expression(self, body: str) -> str:
        """Translates the body of a rule token by token; operators such as ``|`` and ``*`` are the same in both."""
        parts: list[str] = ["(?:"]
        end = size = depth = 0
        body = body.rstrip()
        while end < len(body):
            token = _TOKEN.match(body, end)
            if token is None:
                raise ValueError(f"cannot be read at {body[end : end + 20].strip()!r}")
            parts.append(self._part(token))
            end, size = token.end(), size + len(parts[-1])
            depth += (token["mark"] in ("(", "[")) - (token["mark"] in (")", "]"))
            if size > _MAX_CHARACTERS:
                raise ValueError(f"has more than {_MAX_CHARACTERS} characters as a regular expression")
            if depth < 0:
                break
        if depth:
            raise ValueError("cannot be read: its brackets are not balanced")
        return "".join([*parts, ")"])

    def _part(self, token: re.Match[str]) -> str:
        if token["text"] is not None:
            literal = _literal(token["text"])
            return f"(?{token['text_flags']}:{literal})"
        if token["regex"] is not None:
            flags = "".join(sorted(set(token["flags"]) - {"u"}))
            return f"(?{flags}:{token['regex'].replace(chr(92) + '/', '/')})"
        if token["name"] is not None:
            return self.rule(token["name"])
        if token["repeat"] is not None:
            return "{" + re.sub(r"\s*\.\.\s*", ",", token["repeat"][1:].strip()) + "}"
        return {"(": "(?:", "[": "(?:", "]": ")?", None: ""}.get(token["mark"], token["mark"] or "")


def _literal(quoted: str) -> str:
    """Unquotes a string literal of Lark, which has JSON's escapes, and escapes it for a regular expression."""
    try:
        text: str = json.loads(quoted, strict=False)
    except ValueError:
        raise ValueError(f"has the string {quoted[:40]}, which cannot be read") from None
    return re.sub(r"[^\w\s]", lambda match: f"\\{match[0]}" if match[0].isascii() else match[0], text)
