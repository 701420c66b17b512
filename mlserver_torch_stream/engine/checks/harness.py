"""Runs the checks at load: a candidate is used if its check accepts it; otherwise the reason is recorded."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from typing import ClassVar, Generic, TypeVar

from mlserver_torch_stream.engine.failures import in_a_line
from mlserver_torch_stream.engine.stage_log import stage
from mlserver_torch_stream.errors import LoadFailed

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Check(ABC, Generic[T]):
    """Proves one property of a candidate.

    The outcome depends only on the check's name and inputs, the model's files, the code and the machine. A subclass is
    a dataclass; those of its fields that have plain values are its inputs.
    """

    name: ClassVar[str]

    @abstractmethod
    def problem(self, candidate: T) -> str | None:
        """Returns the candidate's fault in one line, or None if it passes. May raise any error."""

    def inputs(self) -> dict[str, str | int | bool | None]:
        """Returns the inputs of the check: the outcome depends on them, the model's files, the code and the machine.

        The values can be written as JSON.
        """
        values = {each.name: getattr(self, each.name, ...) for each in fields(self)}  # type: ignore[arg-type]
        plain = {name: value.value if isinstance(value, Enum) else value for name, value in values.items()}
        return {name: value for name, value in plain.items() if value is None or isinstance(value, str | int | bool)}

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.inputs().items())})"


@dataclass(frozen=True, slots=True)
class Verdict(Generic[T]):
    """The outcome of a check: the ``candidate`` if it was accepted; otherwise None, and ``reason`` says why.

    ``judged`` says whether the check itself refused the candidate. If an error ended the check, such as a lack of
    memory or of a compiler, the same check may accept the same candidate at another time.
    """

    candidate: T | None
    reason: str = ""
    judged: bool = False


def accepted(
    name: str,
    candidate: Callable[[], T],
    check: Check[T],
    otherwise: str = "",
    level: int = logging.WARNING,
) -> Verdict[T]:
    """Makes a candidate and checks it. ``name`` ends the sentence "Checking …" of the log.

    If the candidate is refused, the text ``otherwise`` is logged at this level, unless it is empty; it says what runs
    instead. An error that the candidate raises becomes the reason, except LoadFailed, which is raised again.
    """
    judged = False
    try:
        with stage(logger, f"Checking {name}"):
            made = candidate()
            reason = check.problem(made)
        judged = True
    except LoadFailed:
        raise
    except Exception as error:  # a model's code, a kernel or a compiler can raise any error
        reason = in_a_line(error)
    if reason is None:
        logger.debug("%s: accepted by %s", name, check)
        return Verdict(made)
    if otherwise:
        logger.log(level, "%s: %s", otherwise, reason)
    return Verdict(None, reason, judged)
