"""Where a view's elements lie: at addresses that are affine in its reader's iterators, or scattered.

A product or window reads each element many times and in vectors. Behind a view such as Pad with reflections, a resize
to the nearest element or Tile, every read would compute a minimum or a quotient. A copy computes it once, and the
product runs as if its operand were stored that way (docs/notes/0009-fusion.md has the times).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polydyn.fusion.products import axes_of, is_axis, is_contraction, is_reduction
from polydyn.graph.ir import Compute, Graph, Node, dim_name, iterators
from polydyn.graph.rewriting import compose
from polydyn.schedules.expr import Const, Load, Op, Value, loads
from polydyn.schedules.index import ONE, Index
from polydyn.schedules.model import row_major
from polydyn.schedules.ranges import simplify


def is_better_copied(graph: Graph, view: Compute, consumers: Mapping[str, Sequence[Node]]) -> bool:
    """Check whether a product or window should read a copy of a view, because its places are scattered.

    Paddings in between are read through: they become guards of the product's reads.
    """
    for n in consumers[view.output]:
        if isinstance(n, Compute) and is_guarded_view(n):
            if is_better_copied(graph, compose(n, (view,)), consumers):
                return True
        elif isinstance(n, Compute) and _reads_scattered_steps(graph, view, n):
            return True
    return False


def _reads_scattered_steps(graph: Graph, view: Compute, reader: Compute) -> bool:
    """Check whether a product or window reads scattered places of a view, batches excepted.

    Axes that both operands of a product have are its batches: there a place is computed once for a whole product.
    """
    if reader.reduce is None:
        return False
    ranges = dict(iterators(graph, reader))
    operands = reader.body.args if is_contraction(reader) and isinstance(reader.body, Op) else (reader.body,)
    for a in operands:
        other = [axes_of(b) for b in operands if b is not a]
        batch = axes_of(a) & other[0] if other else frozenset()
        for x in loads(a):
            if x.buffer != view.output or not (other or _is_window(x)):
                continue
            if any(scattered(graph, y, ranges) - batch for y in loads(view.at(x.index))):
                return True
    return False


def scattered(graph: Graph, x: Load, ranges: Mapping[str, Index]) -> frozenset[str]:
    """Return the iterators that an address contains inside of a minimum, a maximum or a quotient."""
    strides = row_major(graph.tensors[x.buffer].shape)
    address = simplify(sum((i * s for i, s in zip(x.index, strides, strict=True)), Index.of(0)), ranges)
    atoms = (a for a in address.atoms() if not isinstance(a, str) and a.kind != "fetch")
    return frozenset(s for a in atoms for i in a.args for s in i.symbols() if s in ranges)


def reads_scattered(graph: Graph, n: Compute, taps: bool) -> bool:
    """Check whether a map that a product reads has scattered places, so that its result is better stored.

    Without ``taps`` the product copies each element once, and rows may lie anywhere if each is contiguous.
    """
    ranges, last = dict(iterators(graph, n)), dim_name(len(graph.tensors[n.output].shape) - 1)
    for x in dict.fromkeys(loads(n.body)):
        apart = scattered(graph, x, ranges)
        contiguous = bool(x.index) and x.index[-1].split(last)[0] == ONE and last not in apart
        if apart and (taps or not contiguous):
            return True
    return False


def _is_window(x: Load) -> bool:
    """Check whether a subscript moves with an output axis and with a reduction."""
    return any(any(map(is_axis, i.symbols())) and any(map(is_reduction, i.symbols())) for i in x.index)


def is_guarded_view(m: Compute) -> bool:
    """Match a padding: one load under a condition on subscripts, elsewhere a constant or one number (a zero point)."""
    b = m.body
    if m.reduce is not None or not (isinstance(b, Op) and b.name == "where"):
        return False
    return isinstance(b.args[1], Load) and _is_number(b.args[2]) and not loads(b.args[0])


def _is_number(v: Value) -> bool:
    return isinstance(v, Const) or (isinstance(v, Load) and not any(i.symbols() for i in v.index))
