"""Kinds of faults that the interpreter of a host plan reports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from polydyn.errors import PolydynError

KINDS = {
    "unwritten": "it reads bytes that were never written",
    "overwritten": "it reads what another launch has overwritten, or overwrites what another launch has written",
    "bounds": "it leaves the memory of a buffer",
    "place": "a buffer has no memory, or a launch writes a buffer that it must not write",
    "twice": "it writes an element more than once",
    "in-place": "it reads bytes that it writes, in an order that is not defined",
    "conflict": "two launches that may run side by side touch the same bytes, and one of them writes",
    "order": "it reads other values in another order of launches that the plan allows",
    "value": "its result for a tensor of the graph is wrong",
    "incomplete": "it does not write all of a tensor",
    "output": "the caller gets a wrong output",
    "tables": "the C text of the host program differs from the plan",
    "choice": "no candidate may run, or the selected number does not exist",
    "tasks": "two tasks of a kernel touch the same bytes, and one of them writes",
    "loops": "the loops of a kernel touch other bytes than its statements",
    "scratch": "a thread has less scratch than the kernel uses, or reads what it did not write there",
    "frame": "between the parts of a program a tensor is lost",
}
"""Meaning of each kind of fault; *it* is the launch."""


@dataclass(frozen=True)
class Fault:
    """A fault. ``kind`` is a key of ``KINDS``, ``launch`` the label of the launch or host step, ``tensor`` a buffer."""

    kind: str
    launch: str
    tensor: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: launch '{self.launch}', tensor '{self.tensor}': {self.text}"


class PlanError(PolydynError):
    """The interpreter of plans found a fault in a plan."""


class Faults:
    """Collects faults, at most one of each kind per launch and tensor. ``launch``: label of the running launch."""

    def __init__(self) -> None:
        self.launch = "caller"
        self._found: dict[tuple[str, str, str], Fault] = {}

    def add(self, kind: str, tensor: str, text: str) -> None:
        """Add a fault of the running launch."""
        assert kind in KINDS
        self._found.setdefault((kind, self.launch, tensor), Fault(kind, self.launch, tensor, text))

    def __iter__(self) -> Iterator[Fault]:
        return iter(self._found.values())
