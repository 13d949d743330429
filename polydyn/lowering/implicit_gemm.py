"""Convolutions as matrix products (implicit GEMM, TSCompiler 5.4): pixels are rows, taps and channels one reduction.

The row operand of a convolution is not a matrix: its address is not affine in one iterator over all pixels, and a
padding guards it. The promotion statement FILL copies it to scratch, so only that statement needs the subscripts
``row // W`` and ``row % W`` that merged iterators introduce. All other accesses must be affine in the merged
iterator.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from polydyn.fusion.plan import FusionPlan
from polydyn.lowering.collapse import Axis, in_order, mergeable, split_divided
from polydyn.lowering.flatten import FlatNode, map_addresses
from polydyn.schedules.errors import Declined
from polydyn.schedules.expr import Load, Op, Value, indices, loads, map_index, read_of, substitute, symbols_of
from polydyn.schedules.group.words import stored_parts
from polydyn.schedules.index import ONE, ZERO, Index
from polydyn.schedules.ranges import simplify
from polydyn.schedules.tiling import Roles

NOT_IN_PLACE = Declined("its rows are more than loads at affine addresses")


@dataclass(frozen=True)
class Operands:
    """The operands of a product by the role of their iterators. ``column`` is the position of the column operand."""

    column: int
    cols: tuple[str, ...]
    rows: tuple[str, ...]


def as_matrix_product(
    plan: FusionPlan, nodes: tuple[FlatNode, ...], longest: bool = False
) -> tuple[tuple[FlatNode, ...], Roles] | Declined:
    """Return the nodes of a convolution and its epilogue over (batch.., row, column), and the roles.

    The innermost reduction is the one that the row operand walks fastest. With ``longest`` it is the longest one,
    usually channels: a tile of steps then belongs to one tap, and values that depend on the tap are computed once per
    tile. Declined if no operand is an element of memory with a column of its own, or if the other one reads no
    memory (a padded tensor without elements). The row is ``one`` if there is no pixel.
    """
    nodes = split_divided(nodes)
    product_operands = operands(plan, nodes[0])
    if isinstance(product_operands, Declined):
        return product_operands
    body = nodes[0].body
    if not isinstance(body, Op) or not loads(body.args[1 - product_operands.column]):
        return Declined("one of its operands reads no memory")
    nodes, roles = merge_pixels(nodes, product_operands)
    core = _merge_reductions(nodes[0], product_operands.column, longest)
    block, *inner = (x for x, _ in core.reduction)
    return (core, *nodes[1:]), replace(roles, block=block, inner=tuple(inner))


def merge_pixels(
    nodes: tuple[FlatNode, ...], product_operands: Operands, copied: bool = True
) -> tuple[tuple[FlatNode, ...], Roles]:
    """Merge the row iterators as far as all expressions allow. Return the nodes and the roles.

    A ``copied`` row operand imposes no condition.
    """
    col = max(product_operands.cols, key=lambda x: (_size(dict(nodes[0].shared)[x]), x))
    batch = [x for x, _ in nodes[0].shared if x not in product_operands.rows and x != col]
    order = [*batch, *product_operands.rows, col]
    nodes = tuple(replace(n, shared=tuple((x, dict(n.shared)[x]) for x in order)) for n in nodes)
    first, last = len(batch), len(batch) + len(product_operands.rows)
    while last - first > 1 and _rows_mergeable(nodes, product_operands.column, last - 2, copied):
        nodes = tuple(_merge_rows(n, k == 0, product_operands.column, last - 2) for k, n in enumerate(nodes))
        last -= 1
    shared = [x for x, _ in nodes[0].shared]
    row = shared[last - 1] if product_operands.rows else "one"
    block, *inner = (x for x, _ in nodes[0].reduction)
    return nodes, Roles(tuple(x for x in shared if x not in (row, col)), row, col, block, tuple(inner))


def in_place(
    plan: FusionPlan, nodes: tuple[FlatNode, ...]
) -> tuple[tuple[FlatNode, ...], Roles] | Declined:  # fmt: skip
    """Like ``as_matrix_product``, but merge rows and reductions only as far as the row operand is affine in them.

    Nothing is copied then: rows are the pixels of an image row. Declined if the operand is more than a load at such
    an address.
    """
    nodes = split_divided(nodes)
    product_operands = operands(plan, nodes[0])
    if isinstance(product_operands, Declined):
        return product_operands
    nodes, roles = merge_pixels(nodes, product_operands, copied=False)
    core, row = nodes[0], _row(nodes[0], product_operands.column)
    if not isinstance(row, Load) or not product_operands.rows:
        return NOT_IN_PLACE
    core = replace(core, reduction=in_order(core.reduction, row.index[0]))
    block, *inner = (x for x, _ in core.reduction)
    roles = replace(roles, block=block, inner=tuple(inner))
    return NOT_IN_PLACE if needs_promotion(core, roles) else ((core, *nodes[1:]), roles)


def _row(n: FlatNode, column: int) -> Value:
    assert isinstance(n.body, Op)
    return n.body.args[1 - column]


def needs_promotion(n: FlatNode, roles: Roles) -> bool:
    """Check whether the row operand is more than a load at an address that is affine in the row and the reductions.

    A packed word whose parts are contiguous in memory counts as one load.
    """
    assert isinstance(n.body, Op)
    (row,) = (v for v in n.body.args if roles.col not in symbols_of(v))
    row = stored_parts(row) or row
    names = (roles.row, roles.block, *roles.inner)
    return not isinstance(row, Load) or any(
        i.symbols() & set(names) and any(x in i.split(x)[1].symbols() for x in names) for i in row.index
    )


# -- operands --------------------------------------------------------------------------------------------------------


def operands(plan: FusionPlan, n: FlatNode) -> Operands | Declined:
    """Return the operands of a product; declined if it has none.

    The column operand is an element of memory, preferably a constant.
    """
    assert isinstance(n.body, Op)
    if not n.reduction:
        return Declined("it reduces nothing")
    best: tuple[tuple[bool, int, bool], Operands] | None = None
    for k, v in enumerate(n.body.args):
        own, other = symbols_of(v), symbols_of(n.body.args[1 - k])
        cols = tuple(x for x, _ in n.shared if x in own and x not in other)
        rows = tuple(x for x, _ in n.shared if x in other and x not in own)
        read = read_of(v)
        if read is None or not cols:
            continue
        unit = any(n.address.split(x)[0] == ONE for x in cols)
        score = (read.buffer in plan.graph.constants, -len(cols), unit)
        if best is None or score > best[0]:
            best = score, Operands(k, cols, rows)
    return best[1] if best else Declined("no operand is an element of memory with columns of its own")


def _size(e: Index) -> int:
    return 1000 if e.constant is None else min(e.constant, 1000)


# -- merging ---------------------------------------------------------------------------------------------------------


def _rows_mergeable(nodes: tuple[FlatNode, ...], column: int, at: int, copied: bool) -> bool:
    """Check whether two neighbouring iterators can merge in all expressions, except in a ``copied`` row operand."""
    x, y = nodes[0].shared[at : at + 2]
    rest = [p for n in nodes[1:] for p in (n.address, *indices(n.body))]
    assert isinstance(nodes[0].body, Op)
    rest += [nodes[0].address, *indices(nodes[0].body.args[column] if copied else nodes[0].body)]
    return all(mergeable(p, x, y) for p in rest)


def _merge_rows(n: FlatNode, core: bool, column: int, at: int) -> FlatNode:
    x, y = n.shared[at : at + 2]
    shared = (*n.shared[:at], (y[0], x[1] * y[1]), *n.shared[at + 2 :])
    if not core:
        return map_addresses(replace(n, shared=shared), {x[0]: ZERO})
    assert isinstance(n.body, Op)
    ranges = dict([*shared, *n.reduction])
    args = tuple(
        substitute(v, {x[0]: ZERO}) if k == column else merged(v, x, y, ranges) for k, v in enumerate(n.body.args)
    )
    return replace(n, shared=shared, body=replace(n.body, args=args), address=n.address.subs({x[0]: ZERO}))


def _merge_reductions(n: FlatNode, column: int, longest: bool) -> FlatNode:
    """Merge into at most two reductions.

    The inner one merges the axes that the row operand walks fastest, as far as they can merge; the outer one all
    others. With ``longest`` the last reduction is the longest one.
    """
    assert isinstance(n.body, Op)
    row = n.body.args[1 - column]
    wide = max(loads(row), key=lambda x: len(x.index[0].symbols()))
    n = replace(n, reduction=in_order(n.reduction, wide.index[0]))
    if longest:
        n = replace(n, reduction=tuple(sorted(n.reduction, key=lambda x: _size(x[1]))))
    at = len(n.reduction) - 2
    while at >= 0:
        x, y = n.reduction[at : at + 2]
        assert isinstance(n.body, Op)
        if at + 2 < len(n.reduction) or all(mergeable(p, x, y) for p in indices(n.body.args[1 - column])):
            reduced = (*n.reduction[:at], (y[0], x[1] * y[1]), *n.reduction[at + 2 :])
            ranges = dict([*n.shared, *reduced])
            args = tuple(merged(v, x, y, ranges) for v in n.body.args)
            n = replace(n, reduction=reduced, body=replace(n.body, args=args))
        at -= 1
    return n


def merged(v: Value, x: Axis, y: Axis, ranges: dict[str, Index]) -> Value:
    """Rewrite an expression over one iterator, named as ``y``, for both: affine if they can merge, else by division."""
    if all(mergeable(p, x, y) for p in indices(v)):
        return substitute(v, {x[0]: ZERO})
    whole = Index.of(y[0])
    outer = whole // y[1]
    moved = substitute(v, {x[0]: outer, y[0]: whole - outer * y[1]})
    return map_index(moved, lambda i: simplify(i, ranges))
