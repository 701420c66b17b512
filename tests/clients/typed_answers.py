"""The class into which several clients' scripts parse answers and the arguments of calls."""

from __future__ import annotations

import enum

import pydantic


class Place(enum.Enum):
    HOME = "home"
    WORK = "work"


class Look(pydantic.BaseModel):
    """Looks at a place."""

    model_config = pydantic.ConfigDict(extra="forbid")

    place: Place
    far: bool
