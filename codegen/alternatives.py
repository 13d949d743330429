"""Ordered tables of the kernels that can compute a group. Each row offers kernels or declines with a reason.

On a CPU the order of the rows decides (``lowering/alternatives.py``). On CUDA, estimates of times choose among the
kernels of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from polydyn.codegen.kernel import Kernel
from polydyn.schedules.errors import Declined

T = TypeVar("T")
Kernels = TypeVar("Kernels")


@dataclass(frozen=True)
class Alternative(Generic[T, Kernels]):
    """A row of a table: a name, and the function that offers kernels for a group, or declines."""

    name: str
    offer: Callable[[T], Kernels | Declined]


def gather(
    table: Sequence[Alternative[T, tuple[Kernel, ...]]], group: T
) -> tuple[tuple[Kernel, ...], tuple[tuple[str, str], ...]]:
    """Return the kernels of all rows, and the names and reasons of rows that decline."""
    kernels: list[Kernel] = []
    declined: list[tuple[str, str]] = []
    for row in table:
        found = row.offer(group)
        if isinstance(found, Declined):
            declined.append((row.name, found.reason))
        else:
            kernels += found
    return tuple(kernels), tuple(declined)
