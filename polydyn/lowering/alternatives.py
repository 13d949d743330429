"""Kernels of a CPU group from an ordered table (``codegen/alternatives.py``).

Rows are tried from top to bottom, until one serves every size. A launch takes the first row that serves its sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from polydyn.codegen.alternatives import Alternative
from polydyn.codegen.kernel import Kernel
from polydyn.lowering.place import PlacedGroup
from polydyn.schedules.decision import ONLY, Decision, Leaf, Split
from polydyn.schedules.errors import Declined
from polydyn.schedules.index import Index

T = TypeVar("T")


@dataclass(frozen=True)
class Serves:
    """The sizes that a row serves: those at which ``measure`` is at most ``limit``, or with ``above`` more than it."""

    measure: Index
    limit: int = 0
    above: bool = False


@dataclass(frozen=True)
class Offer:
    """The kernels of a row.

    ``build``: builds them. ``where``: the sizes that they serve, None for all. ``decision``: over several kernels.
    ``reasons``: lines for ``explain``.
    """

    build: Callable[[], tuple[Kernel, ...]]
    where: Serves | None = None
    decision: Decision = ONLY
    reasons: tuple[str, ...] = ()


def place(table: Sequence[Alternative[T, Offer]], group: T, empty: PlacedGroup) -> PlacedGroup:
    """Return ``empty`` with the kernels of a table's rows, and the reasons of rows that decline.

    The last row that is tried must serve every size.
    """
    offers: list[Offer] = []
    declined: list[tuple[str, str]] = []
    for row in table:
        found = row.offer(group)
        if isinstance(found, Declined):
            declined.append((row.name, found.reason))
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
