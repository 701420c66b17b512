"""Defines the base class of the pydantic models of request bodies. It turns pydantic's errors into InvalidInput errors
that name the field.

A field that is null counts as absent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, MinLen
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from mlserver_torch_stream.did_you_mean import did_you_mean
from mlserver_torch_stream.errors import InvalidInput
from mlserver_torch_stream.protocol.values import ignores, printable, refuse, refuse_unless_harmless, shown

MAX_ENTRIES = 4096  # entries of an object whose keys the client chooses
_SUBJECT = re.compile("^[A-Z][a-z]+ should ")  # the beginning of a message of pydantic
_OBJECT = "must be a JSON object"
OBJECT_OR_TEXT = f"{_OBJECT} or a string that is not empty"
_OWN_WORDS = {"dict_type": _OBJECT, "model_type": _OBJECT, "bool_type": "must be true or false"}


class ElementBudget:
    """Bounds how many list elements of one value are validated, since each takes microseconds."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._left = most

    def spend(self, count: int) -> bool:
        """Counts elements. Returns False if the budget is exceeded."""
        self._left -= count
        return self._left >= 0

    def take(self, place: str, count: int) -> None:
        """Counts elements. Raises InvalidInput, which names ``place``, if the budget is exceeded."""
        if not self.spend(count):
            raise InvalidInput(place, f"has too many elements; at most {self.most} are allowed")


class Body(BaseModel):
    """An object of a request's body. A field that is null counts as absent, even if its name is unknown."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        said = {key: each for key, each in value.items() if each is not None}
        if cls.model_config.get("extra") == "forbid":
            known = fields(cls)
            for key in said:
                if key not in known and ignores(printable(key)):
                    del value[key]
                elif key not in known:
                    raise wrong(f"unknown key{did_you_mean(printable(key), known, str)}", key)
            said = {key: each for key, each in said.items() if key in known}
        return said


@cache
def fields(model: type[Body]) -> Mapping[str, Any]:
    """Returns the fields of a model by the names that clients use."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


class Ignored:
    """Marks a parameter that is accepted and has no effect."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "description": "Ignored: no answer depends on it."}


@dataclass(frozen=True, eq=False)
class Because:
    """Replaces pydantic's message for a wrong value of a field with ``reason``."""

    reason: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.custom_error_schema(handler(source), "wrong", custom_error_message=self.reason)


@dataclass(frozen=True, eq=False)
class Refused:
    """Marks a parameter that is not implemented. Values in ``harmless``, such as its default, are accepted."""

    harmless: tuple[Any, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        said = [_exactly(each) for each in self.harmless]
        return {
            "anyOf": [*said, {"type": "null"}],
            "description": "Not implemented: only values that have no effect are accepted.",
        }

    def _check(self, value: Any) -> Any:
        try:
            refuse_unless_harmless("", value, self.harmless)
        except InvalidInput as error:
            raise wrong(error.reason) from None
        return value


def _exactly(value: Any) -> dict[str, Any]:
    """Returns a JSON schema that only this value matches. A list may have at most one element."""
    if isinstance(value, list):
        items = _exactly(value[0]) if value else {}
        return {"type": "array", "minItems": len(value), "maxItems": len(value), "items": items}
    if isinstance(value, dict):
        properties = {name: _exactly(each) for name, each in value.items()}
        return {"type": "object", "required": list(value), "properties": properties, "additionalProperties": False}
    return {"const": value}


def wrong(message: str, key: str | None = None) -> PydanticCustomError:
    """Returns an error for the value that is being validated, or for its field ``key``."""
    return PydanticCustomError("wrong", "{message}", {"message": message, "key": key})


def _whole(value: Any) -> Any:
    """Turns a whole float into an int. An int below -(2**63) stays a float, because the JSON parser has already rounded
    it.
    """
    return int(value) if type(value) is float and value.is_integer() and value > -(2**63) else value


def _whole_numbers(value: Any) -> Any:
    """Turns whole floats in a list, such as a prompt's ids, into ints. Millions are checked in 0.1 s."""
    if not isinstance(value, list) or float not in set(map(type, value)):
        return value
    return [int(each) if type(each) is float and each.is_integer() else each for each in value]


def _spend(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, list) and info.context is not None and not info.context.spend(len(value)):
        raise wrong(f"has too many elements; at most {info.context.most} are allowed")
    return value


def _few(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_ENTRIES:
        raise wrong(f"must have at most {MAX_ENTRIES} entries, got {len(value)}")
    return value


def _text_or_list(value: Any) -> str | None:
    return "a text" if isinstance(value, str) else "a list" if isinstance(value, list) else None


class _FailFast(FailFast):
    __hash__ = object.__hash__  # a union of annotated types must be hashable


FAIL_FAST = _FailFast()  # ends the validation of a list at its first error
WHOLE = BeforeValidator(_whole)  # an integer, which may be written 1.0
SPENDS = BeforeValidator(_spend)  # counts the elements of a list whose elements are validated in Python
M = TypeVar("M", bound=Body)
S = TypeVar("S")
T = TypeVar("T")
# Any constraint, even MinLen(0), makes pydantic refuse lone surrogates, which UTF-8 cannot encode.
Text = Annotated[str, MinLen(0), WithJsonSchema({"type": "string"})]
NonEmpty = Annotated[str, MinLen(1)]
JsonObject = dict[str, Any]
TokenIds = Annotated[list[Annotated[int, Ge(0)]], FAIL_FAST, BeforeValidator(_whole_numbers)]
Entries = Annotated[dict[str, T], BeforeValidator(_few)]
OrList = Annotated[
    Annotated[S, Tag("a text")] | Annotated[T, Tag("a list")],
    Discriminator(_text_or_list, custom_error_type="wrong", custom_error_message="must be a string or a list"),
]


def validate(place: str, kind: TypeAdapter[T], value: Any, most: int | None = None) -> T:
    """Returns the value, validated as ``kind``. Raises InvalidInput, whose field begins with ``place``.

    ``most`` is the largest number of list elements that are validated.
    """
    try:
        return kind.validate_python(value, context=None if most is None else ElementBudget(most))
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        raise InvalidInput(_field(place, value, found), _reason(found)) from None


def read(body: Mapping[str, Any], model: type[M]) -> M:
    """Validates a small body as ``model``. Raises InvalidInput, which names the field."""
    found: M = validate("", _adapter(model), dict(body))
    return found


def taken_values(body: Mapping[str, Any], model: type[Body], most: int) -> dict[str, Any]:
    """Validates a body with the pydantic model ``model``, and returns the parameters that have an effect.

    ``most`` is the largest number of list elements that are validated. Raises InvalidInput, which names the parameter
    that is missing, wrong, unknown or not implemented.
    """
    known, said = fields(model), dict[str, Any]()
    for key, value in body.items():
        if key in known:
            said[key] = value
        else:
            refuse(key, value, [name for name, field in known.items() if treatment(field) == "taken"])
    validate("", _adapter(model), said, most)
    return {key: value for key, value in said.items() if value is not None and treatment(known[key]) == "taken"}


@cache
def _adapter(model: type[M]) -> TypeAdapter[M]:
    return TypeAdapter(model)


def treatment(field: Any) -> str:
    """Returns how a model's field is treated: ``taken``, ``ignored`` or ``refused``."""
    kinds = [type(each) for each in field.metadata]
    return "ignored" if Ignored in kinds else "refused" if Refused in kinds else "taken"


def _field(place: str, value: Any, found: ErrorDetails) -> str:
    """Returns the path of a wrong field, without the names of union members that pydantic inserts."""
    missing = found["type"] == "missing"
    for step in found["loc"][:-1] if missing else found["loc"]:
        if isinstance(step, int) and isinstance(value, list):
            place, value = f"{place}[{step}]", value[step]
        elif isinstance(value, dict) and step in value:
            place, value = _joined(place, step), value[step]
    if missing:
        return _joined(place, found["loc"][-1])
    key = "type" if found["type"] == "type" else found.get("ctx", {}).get("key")
    return place if key is None else _joined(place, key)


def _joined(place: str, key: Any) -> str:
    return f"{place}.{printable(str(key))}" if place else printable(str(key))


def _reason(found: ErrorDetails) -> str:
    if found["type"] == "missing":
        return "is needed"
    if "key" in found.get("ctx", {}):
        return found["msg"]
    said = _OWN_WORDS.get(found["type"]) or _SUBJECT.sub("must ", found["msg"].partition(" after validation")[0])
    value = found["input"]
    return f"{said}, got {shown(value.get('type') if found['type'] == 'type' and isinstance(value, dict) else value)}"
