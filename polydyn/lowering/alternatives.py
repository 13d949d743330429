"""Kernels of a CPU group from an ordered table (``codegen/alternatives.py``).

Rows are tried from top to bottom, until one serves every size. A launch takes the first row that serves its sizes. A
search (``search/tasks``) may choose another row: ``rows_of`` lists what it may choose, and ``place`` takes its choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from polydyn.codegen.alternatives import Alternative
from polydyn.codegen.cpu.choices import Choices
from polydyn.codegen.kernel import Kernel
from polydyn.lowering.place import PlacedGroup
from polydyn.schedules.decision import ONLY, Decision, Leaf, Split
from polydyn.schedules.errors import Declined
from polydyn.schedules.index import Index
from polydyn.schedules.model import Group

T = TypeVar("T")


@dataclass(frozen=True)
class Serves:
    """The sizes that a row serves: those at which ``measure`` is at most ``limit``, or with ``above`` more than it."""

    measure: Index
    limit: int = 0
    above: bool = False

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether the row serves the given values of the group's parameters."""
        return (self.measure.evaluate(sizes) > self.limit) == self.above


@dataclass(frozen=True)
class RowChoice:
    """A row of a table that a search may choose at any size, beside the row that every size has.

    ``group``: the computation of its kernels. ``prefix``: prefix of kernel names. ``choices``: the sizes to choose.
    ``builder``: maps a kernel name and build-time sizes to the code generator. ``launch``: maps a code generator and
    launch-time sizes to the values of the launch-time symbols. Without sizes both use the defaults of the row.
    """

    group: Group
    prefix: str
    choices: Choices
    builder: Callable[[str, Mapping[str, int]], Any]
    launch: Callable[[Any, Mapping[str, int]], dict[str, Index]]


@dataclass(frozen=True)
class Offer:
    """The kernels of a row.

    ``build``: builds them. ``where``: the sizes that they serve, None for all. ``decision``: over several kernels.
    ``reasons``: lines for ``explain``. ``choice``: returns what a search may choose of the row. ``against``: the
    reason why only a search chooses it; without a search the row counts as declined.
    """

    build: Callable[[], tuple[Kernel, ...]]
    where: Serves | None = None
    decision: Decision = ONLY
    reasons: tuple[str, ...] = ()
    choice: Callable[[], RowChoice | Declined] | None = None
    against: str = ""


@dataclass(frozen=True)
class Rows:
    """The rows of a table beside its row ``main``, as the space of a search. All maps are by row, in the table's order.

    ``choices``: what a search may choose. ``declined``: the reasons of rows that decline. ``serves``: the rows that a
    group has without a search, before ``main``, with the sizes that they serve (None: all).
    """

    main: str = ""
    choices: Mapping[str, RowChoice] = field(default_factory=dict)
    declined: Mapping[str, str] = field(default_factory=dict)
    serves: Mapping[str, Serves | None] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The rows that a search compares; none if ``main`` has no alternative."""
        return (*self.choices, self.main) if self.choices else ()

    def default(self, sizes: Mapping[str, int]) -> str:
        """Return the row that a group has without a search at the given values of its parameters."""
        return next((row for row, where in self.serves.items() if where is None or where.holds(sizes)), self.main)


def rows_of(table: Sequence[Alternative[T, Offer]], group: T, main: str) -> Rows:
    """Return the rows of a table beside ``main``. There are none if a row before it cannot be searched."""
    choices: dict[str, RowChoice] = {}
    declined: dict[str, str] = {}
    serves: dict[str, Serves | None] = {}
    above = True
    for row in table:
        if row.name == main:
            above = False
            continue
        found = row.offer(group)
        if isinstance(found, Declined):
            declined[row.name] = found.reason
            continue
        if above and not found.against:
            serves[row.name] = found.where
        choice = found.choice() if found.choice else Declined("a search cannot choose it")
        if isinstance(choice, RowChoice):
            choices[row.name] = choice
        elif row.name in serves:
            return Rows(main)
        else:
            declined[row.name] = choice.reason
    return Rows(main, choices, declined, serves)


def place(
    table: Sequence[Alternative[T, Offer]], group: T, empty: PlacedGroup, searched: Offer | None = None
) -> PlacedGroup:
    """Return ``empty`` with the kernels of a table's rows, and the reasons of rows that decline.

    The last row that is tried must serve every size. ``searched``: the offer of a search of the rows, which replaces
    them.
    """
    if searched is not None:
        return replace(empty, kernels=searched.build(), decision=searched.decision, reasons=searched.reasons)
    offers: list[Offer] = []
    declined: list[tuple[str, str]] = []
    for row in table:
        found = row.offer(group)
        if isinstance(found, Declined):
            declined.append((row.name, found.reason))
            continue
        if found.against:
            declined.append((row.name, found.against))
            continue
        offers.append(found)
        if found.where is None:
            break
    *others, last = offers
    assert last.where is None, "the last row serves every size"
    out = replace(
        empty, kernels=last.build(), decision=last.decision, reasons=last.reasons, declined=tuple(declined)
    )  # fmt: skip
    for offer in reversed(others):
        out = _with(out, offer)
    return out


def _with(placed: PlacedGroup, offer: Offer) -> PlacedGroup:
    """Add the kernel of a row to ``placed``. It comes before the kernels of the rows below."""
    assert offer.where is not None, "rows above the last one serve some sizes"
    (kernel,), where = offer.build(), offer.where
    own, other = Leaf(len(placed.kernels)), placed.decision
    low, high = (other, own) if where.above else (own, other)
    decision = Split(where.measure, where.limit, low, high)
    return replace(
        placed, kernels=(*placed.kernels, kernel), decision=decision, reasons=(*placed.reasons, *offer.reasons)
    )
