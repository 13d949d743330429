"""Choose the roles of a product's iterators: row, column, batch and reduction."""

from __future__ import annotations

from polydyn.lowering.flatten import FlatNode
from polydyn.schedules.errors import Declined
from polydyn.schedules.expr import Op, indices
from polydyn.schedules.index import ONE, Index
from polydyn.schedules.tiling import Roles

MAX_WEIGHT = 1000
"""Weight of a symbolic extent when iterators are ranked."""


def choose_roles(n: FlatNode) -> Roles | Declined:
    """Choose the vector iterator (column) and the broadcast iterator (row); TSCompiler 5.1: the instruction's loops.

    The column is in one operand only, preferably with unit stride in the output. The row is in the other operand only.
    Declined if there is no column.
    """
    assert isinstance(n.body, Op)
    extents = dict(n.shared)
    operands = [frozenset(s for i in indices(v) for s in i.symbols()) for v in n.body.args]
    best: tuple[tuple[int, ...], str, str] | None = None
    for x in extents:
        inside = [x in s for s in operands]
        if sum(inside) != 1:
            continue
        own, other = (operands[0], operands[1]) if inside[0] else (operands[1], operands[0])
        rows = [y for y in extents if y in other and y not in own]
        row = max(rows, key=lambda y: (_weight(extents[y]), list(extents).index(y)), default="one")
        score = (n.address.split(x)[0] == ONE, row != "one", _weight(extents[x]))
        if best is None or tuple(map(int, score)) > best[0]:
            best = tuple(map(int, score)), x, row
    if best is None:
        return Declined("no axis belongs to one operand only: it has no columns")
    _, col, row = best
    batch = tuple(x for x in extents if x not in (col, row))
    block, *inner = (x for x, _ in n.reduction)
    return Roles(batch, row, col, block, tuple(inner))


def _weight(e: Index) -> int:
    return MAX_WEIGHT if e.constant is None else min(e.constant, MAX_WEIGHT)
