"""Says why a key may not be used: known elsewhere but not implemented here, or known nowhere.

Knows nothing of how implemented keys are read; it is told their names to point at the nearest.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from mlserver_torch_stream.did_you_mean import did_you_mean
from mlserver_torch_stream.errors import InvalidInput

# Each with the values that ask for nothing, so that a client which always sends its defaults is served.
_UNIMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "details": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "lora_name": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "triton_enable_empty_final_response": (),
    "web_search_options": (),
}
_UNIMPLEMENTED_PREFIXES = ("guided_", "sequence_", "structured_outputs", "shared_memory_")


def refuse(key: str, value: Any, known: Collection[str], what: str = "parameter") -> None:
    """Raises InvalidInput for a key that is none of ``known``, unless its value asks for nothing."""
    if key in _UNIMPLEMENTED or key.startswith(_UNIMPLEMENTED_PREFIXES):
        harmless = value is None or any(
            type(value) is type(default) and value == default for default in _UNIMPLEMENTED.get(key, ())
        )
        if not harmless:
            raise InvalidInput(_printable(key), "is not implemented by this runtime")
        return
    name = _printable(key)
    raise InvalidInput(name, f"unknown {what}{did_you_mean(name, known, str)}")


def _printable(key: str) -> str:
    """The start of a key that a client made up, fit for any reply: lone surrogates cannot be sent."""
    return key[:100].encode("utf-8", "backslashreplace").decode()
