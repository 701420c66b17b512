"""Says why a key may not be used: known elsewhere but not implemented here, or known nowhere.

Knows nothing of how implemented keys are read; it is told their names to point at the nearest.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from mlserver_torch_stream.did_you_mean import did_you_mean
from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.values import printable

# Each with the values that ask for nothing, so that a client which always sends its defaults is served.
_UNIMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "details": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "lora_name": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "service_tier": ("auto", "default"),
    "suffix": ("",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_UNIMPLEMENTED_PREFIXES = ("guided_", "sequence_", "shared_memory_")


def harmless_values(key: str) -> tuple[Any, ...]:
    """The values, besides null, with which a key that is not implemented asks for nothing."""
    return _UNIMPLEMENTED.get(key, ())


def refuse_unless_harmless(key: str, value: Any, harmless: Collection[Any]) -> None:
    """Refuses a key that is not implemented, unless its value asks for nothing. Raises InvalidInput."""
    if value is not None and not any(_same(value, each) for each in harmless):
        raise InvalidInput(printable(key), "is not implemented by this runtime")


def _same(one: Any, other: Any) -> bool:
    """As JSON has it, where 1 is 1.0 but not true."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def refuse(key: str, value: Any, known: Collection[str], what: str = "parameter") -> None:
    """Raises InvalidInput for a key that is none of ``known``, unless its value asks for nothing, as null does."""
    if value is None:
        return
    if key in _UNIMPLEMENTED or key.startswith(_UNIMPLEMENTED_PREFIXES):
        refuse_unless_harmless(key, value, harmless_values(key))
        return
    name = printable(key)
    raise InvalidInput(name, f"unknown {what}{did_you_mean(name, known, str)}")
