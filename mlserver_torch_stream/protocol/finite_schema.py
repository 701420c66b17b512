"""Refuses a JSON schema with a part that has no finite instance, such as an object that must hold another of its kind.

Knows nothing of what else a schema can get wrong. A part that it cannot read counts as finite.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from mlserver_torch_stream.errors import InvalidInput

_MOST_VISITS = 20_000  # of parts of a schema: some 20 ms
_MOST_DEPTH = 150  # of nested parts; each takes up to three nested Python calls
_SCALARS = frozenset({"string", "number", "integer", "boolean", "null"})


def check_finite(field: str, schema: Mapping[str, Any]) -> None:
    """Raises InvalidInput. Only references can make a part infinite, so the targets of all of them are looked at."""
    search = _Search(field, schema)
    for reference in dict.fromkeys(_references(schema)):
        if not search.is_finite({"$ref": reference}):
            raise InvalidInput(field, f"no finite answer matches {reference}: it must hold another of its kind")


def _references(schema: Any) -> Iterator[str]:
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            if isinstance(part.get("$ref"), str):
                yield part["$ref"]
            left += part.values()
        elif isinstance(part, list):
            left += part


class _Search:
    """Looks for a finite instance of a part. A reference from within its own target counts as infinite."""

    def __init__(self, field: str, root: Mapping[str, Any]) -> None:
        self._field = field
        self._root = root
        self._within: list[str] = []
        self._finite: set[str] = set()
        self._visits = self._depth = 0

    def is_finite(self, part: Any) -> bool:
        self._visits += 1
        self._depth += 1
        if self._visits > _MOST_VISITS or self._depth > _MOST_DEPTH:
            raise InvalidInput(self._field, "refers to itself in too many ways to tell whether an answer can end")
        finite = not isinstance(part, dict) or self._of_object(part)
        self._depth -= 1
        return finite

    def _of_object(self, part: Mapping[str, Any]) -> bool:
        if isinstance(part.get("$ref"), str) and not self._of_reference(part["$ref"]):
            return False
        if not all(self.is_finite(each) for each in _list(part.get("allOf"))):
            return False
        for choices in (part.get("anyOf"), part.get("oneOf")):
            if isinstance(choices, list) and choices and not any(self.is_finite(each) for each in choices):
                return False
        said = part.get("type")
        types = {said} if isinstance(said, str) else {each for each in _list(said) if isinstance(each, str)}
        if not types or types & _SCALARS or "enum" in part or "const" in part:
            return True
        return ("array" in types and self._of_items(part)) or ("object" in types and self._of_properties(part))

    def _of_reference(self, reference: str) -> bool:
        if reference in self._finite:
            return True
        if reference in self._within:
            return False
        self._within.append(reference)
        finite = self.is_finite(_target(self._root, reference))
        self._within.pop()
        if finite:
            self._finite.add(reference)
        return finite

    def _of_items(self, part: Mapping[str, Any]) -> bool:
        least = part.get("minItems", 0)
        if not isinstance(least, (int, float)) or least < 1:
            return True
        prefix = _list(part.get("prefixItems"))
        needed = [*prefix[: int(least)], *([part.get("items")] if least > len(prefix) else [])]
        return all(self.is_finite(each) for each in needed)

    def _of_properties(self, part: Mapping[str, Any]) -> bool:
        said = part.get("properties")
        properties = said if isinstance(said, dict) else {}
        required = _list(part.get("required"))
        additional = part.get("additionalProperties")
        if required:
            return all(self.is_finite(properties.get(str(name), additional)) for name in required)
        least = part.get("minProperties", 0)
        if not isinstance(least, (int, float)) or least < 1 or "patternProperties" in part:
            return True
        return any(self.is_finite(each) for each in (*properties.values(), additional))


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _target(root: Any, reference: str) -> Any:
    """The part that a JSON pointer within the schema names; None for other references."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    part = root
    for step in reference[1:].split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(part, dict):
            part = part.get(key)
        elif isinstance(part, list) and key.isdecimal() and int(key) < len(part):
            part = part[int(key)]
        else:
            return None
    return part
