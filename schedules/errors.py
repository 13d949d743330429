"""The root of all errors, and the errors of schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polydyn.schedules.names import given_back


class PolydynError(Exception):
    """Root of all errors that polydyn raises on purpose.

    ``message`` says what is wrong; the keyword arguments name the place and the remedy and are printed on
    lines of their own, so that a log shows them even when the message is long.
    ``origins``: names of the model's nodes whose plan failed; empty if unknown.
    """

    origins: tuple[str, ...] = ()

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
        super().__init__("\n".join([self.message, *(f"  {k}: {v}" for k, v in places.items() if v is not None)]))


class LegalityError(PolydynError):
    """A schedule or promotion violates a dependence; carries a witness. Always a bug in polydyn.

    ``violated``: the isl set or map of which the witness is an example, None where there is none.
    """

    violated: Any = None


class ScheduleError(PolydynError):
    """A schedule matrix has no solution, or a pattern was applied where it does not fit."""


class CodegenError(PolydynError):
    """A pass was applied where its conditions do not hold, or the loop IR broke an invariant. A bug in polydyn."""


@dataclass(frozen=True)
class Declined:
    """A form that does not fit, and why: a value, for whoever asked to take another form. A bug is an error instead."""

    reason: str

    def __str__(self) -> str:
        return self.reason
