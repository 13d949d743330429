"""The root of all errors, and the errors of schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from polydyn.schedules.names import given_back

_E = TypeVar("_E", bound="PolydynError")


class PolydynError(Exception):
    """Root of all errors that polydyn raises on purpose.

    ``message`` says what is wrong. The keyword arguments name the place and the remedy. Each is printed on a line of
    its own, so that a log shows them even if the message is long. ``origins`` names the model's nodes whose plan
    failed; it is empty if they are unknown.
    """

    origins: tuple[str, ...] = ()

    def __new__(cls: type[_E], *args: object, **places: object) -> _E:
        """Make an error of a class that is also one of Python's: those do not make each other's instances."""
        base: Any = cls
        while base.__module__ != "builtins":
            base = base.__base__
        made: _E = base.__new__(cls, *args)
        return made

    def __init__(
        self,
        message: str,
        *,
        node: str | None = None,
        tensor: str | None = None,
        dim: str | None = None,
        rule: str | None = None,
        remedy: str | None = None,
    ) -> None:
        said = {"node": node, "tensor": tensor, "dim": dim, "rule": rule, "remedy": remedy}
        places = {k: None if v is None else given_back(str(v)) for k, v in said.items()}  # bytes: text that is damaged
        self.node, self.tensor, self.dim, self.rule, self.remedy = places.values()
        self.message = given_back(message)
        text = "\n".join([self.message, *(f"  {k}: {v}" for k, v in places.items() if v is not None)])
        super().__init__(text)
        self.args = (text,)  # OSError keeps what ``__new__`` got

    def __str__(self) -> str:  # errors that are KeyErrors too would put the message in quotes
        return str(self.args[0]) if self.args else ""


class LegalityError(PolydynError, ValueError):
    """A schedule or promotion violates a dependence; the message has a witness. Always a bug in polydyn.

    ``violated`` is the isl set or map that the witness is an element of, or None.
    """

    violated: Any = None


class ScheduleError(PolydynError, ValueError):
    """A schedule matrix has no solution, or a pattern was applied where it does not fit."""


class ScheduleNameError(ScheduleError, KeyError):
    """A statement, axis, loop or tensor that the schedule does not have."""


class CodegenError(PolydynError, RuntimeError):
    """A pass was applied although its conditions do not hold, or the loop IR broke an invariant. A bug in polydyn."""


@dataclass(frozen=True)
class Declined:
    """The reason why a form does not fit. It is a value, so that the caller can take another form; bugs are errors."""

    reason: str

    def __str__(self) -> str:
        return self.reason


def first_refusal(*cases: tuple[bool, str]) -> Declined | None:
    """Return the reason of the first case that holds; None if a form fits."""
    return next((Declined(reason) for holds, reason in cases if holds), None)
