"""Find how far an asynchronous product may overlap the next tile's statements."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from polydyn.schedules.errors import LegalityError
from polydyn.schedules.tree.names import Meets
from polydyn.schedules.tree.scheduled import Scheduled


def first_conflict(t: Scheduled, late: str, nodes: Sequence[Collection[str]]) -> int:
    """Return the position of the first of ``nodes`` that must wait for ``late``, or their number if none must.

    ``nodes`` lists the statements of each node in order. The tree has all of them after ``late``, and the first one
    runs in parallel with it. A node must wait if it writes storage that ``late`` accesses, or accesses storage that
    ``late`` writes. (Arrays without storage are inputs.) LegalityError: the first node must wait.
    """
    reads, writes = _places(t, [late])
    for n, statements in enumerate(nodes):
        other_reads, other_writes = _places(t, statements)
        both = writes & (other_reads | other_writes) | reads & other_writes
        if both and n == 0:
            what = f"{late} of a tile is not over when {sorted(statements)} of the next one access {sorted(both)}"
            raise LegalityError(what, node=late, rule="products in flight")
        if both:
            return n
    return len(nodes)


def _places(t: Scheduled, statements: Collection[str]) -> tuple[set[str], set[str]]:
    """Return the storage that statements read, and the storage that they write."""
    met = [(f.meets, t.buffer(f.buffer).place) for f in t.flow if f.statement in statements]
    return {x for how, x in met if how is not Meets.WRITES}, {x for how, x in met if how is not Meets.READS}
