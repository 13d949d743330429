"""What the interpreter of a host plan finds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from polydyn.errors import PolydynError

KINDS = {
    "unwritten": "it reads what nobody has written",
    "overwritten": "it reads what another launch has overwritten, or overwrites what another launch has written",
    "bounds": "it leaves the memory of a buffer",
    "place": "a buffer has no memory, or is none that a launch may write",
    "twice": "it writes an element more than once",
    "in-place": "it reads bytes that it writes, in an order that nothing says",
    "conflict": "two launches that may run side by side touch the same bytes, and one of them writes",
    "order": "in an order of the launches that the plan allows it reads something else",
    "value": "what it leaves for a tensor of the graph is not that tensor",
    "incomplete": "it does not write all of a tensor",
    "output": "the caller gets something else than the graph says",
    "tables": "the C text of the host program says something else than the plan",
    "choice": "no candidate may run, or there is none of that number",
    "tasks": "two tasks of a kernel touch the same bytes, and one of them writes",
    "loops": "the loops of a kernel touch other bytes than its statements",
    "scratch": "a thread has less scratch than the kernel uses, or reads what it did not write there",
    "frame": "between the parts of a program a tensor is lost",
}
"""Kind of a fault -> what it says of the launch."""


@dataclass(frozen=True)
class Fault:
    """``kind``: a key of ``KINDS``. ``launch``: its label, or what else touched ``tensor``, a buffer of the plan."""

    kind: str
    launch: str
    tensor: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: launch '{self.launch}', tensor '{self.tensor}': {self.text}"


class PlanError(PolydynError):
    """A plan that the interpreter of plans finds faulty."""


class Faults:
    """The faults found so far, one of a kind for each launch and tensor; ``launch``: the label of what runs now."""

    def __init__(self) -> None:
        self.launch = "caller"
        self._found: dict[tuple[str, str, str], Fault] = {}

    def add(self, kind: str, tensor: str, text: str) -> None:
        """Notes a fault of what runs now."""
        assert kind in KINDS
        self._found.setdefault((kind, self.launch, tensor), Fault(kind, self.launch, tensor, text))

    def __iter__(self) -> Iterator[Fault]:
        return iter(self._found.values())
