"""What a product may be late for: statements of a tile that run while the product of the tile before still does."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from polydyn.schedules.errors import LegalityError
from polydyn.schedules.tree.names import Meets
from polydyn.schedules.tree.scheduled import Scheduled


def first_conflict(t: Scheduled, late: str, nodes: Sequence[Collection[str]]) -> int:
    """The position of the first of ``nodes`` that must wait for ``late``; their number when none must.

    ``nodes``: the statements of each, in their order, all of which the tree has behind ``late``, the first of which
    runs beside it. One must wait when it writes storage that ``late`` meets, or meets storage that ``late`` writes.
    (Arrays without storage are inputs.) LegalityError: the first one must.
    """
    reads, writes = _places(t, [late])
    for n, statements in enumerate(nodes):
        other_reads, other_writes = _places(t, statements)
        both = writes & (other_reads | other_writes) | reads & other_writes
        if both and n == 0:
            what = f"{late} of a tile is not over when {sorted(statements)} of the next one meet {sorted(both)}"
            raise LegalityError(what, node=late, rule="products in flight")
        if both:
            return n
    return len(nodes)


def _places(t: Scheduled, statements: Collection[str]) -> tuple[set[str], set[str]]:
    """The storage that statements read, and that they write."""
    met = [(f.meets, t.buffer(f.buffer).place) for f in t.flow if f.statement in statements]
    return {x for how, x in met if how is not Meets.WRITES}, {x for how, x in met if how is not Meets.READS}
