"""Lower groups whose steps run in order, scatters and running sums: an initialiser and the steps after it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from polydyn.codegen.ir import Compare
from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.fusion.scan import Scan, scan_of
from polydyn.fusion.scatter import Finished, Scatter, finished, scatter_of
from polydyn.graph.ir import Compute
from polydyn.lowering.collapse import Axis, collapse_reduction, collapse_shared
from polydyn.lowering.flatten import FlatNode, flatten
from polydyn.lowering.group import Canonical, LoweredGroup
from polydyn.lowering.output import output_array
from polydyn.schedules.expr import REDUCTIONS, Load, Op, Value, neutral, substitute
from polydyn.schedules.index import ONE, ZERO, Index
from polydyn.schedules.model import Statement

MIN_COLUMNS = 4
"""Minimum number of columns for a vector."""


@dataclass(frozen=True)
class SerialGroup:
    """A lowered group whose steps keep their order.

    ``band``: the iterators that both statements share. ``tiled``: vectors run along the last of them. ``conditions``: a
    step runs only if they hold.
    """

    lowered: LoweredGroup
    band: tuple[str, ...]
    tiled: bool
    conditions: tuple[Compare, ...] = ()


def lower_serial(plan: FusionPlan, group: FusedGroup) -> SerialGroup:
    """Lower a group of kind scatter or scan to its statements."""
    return (_scatter if group.kind == "scatter" else _scan)(plan, group)


def _flat(plan: FusionPlan, group: FusedGroup, n: Compute) -> FlatNode:
    return flatten(plan, replace(group, nodes=(n,), outputs=(n.output,), rows={n.output: ()}), n)


def _columns_last(n: FlatNode) -> tuple[tuple[Axis, ...], bool]:
    """Return the shared axes with the dense one last, and whether it is worth vectors."""
    band = tuple(sorted(n.shared, key=lambda a: n.address.split(a[0])[0] == ONE))
    dense = bool(band) and n.address.split(band[-1][0])[0] == ONE
    return band, dense and (band[-1][1].constant or MIN_COLUMNS) >= MIN_COLUMNS


def _extents(names: Canonical, axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    return tuple((x, names.extent(e)) for x, e in axes)


def _lowered(
    names: Canonical, band: tuple[Axis, ...], tiled: bool, *statements: Statement, conditions: tuple[Compare, ...] = ()
) -> SerialGroup:
    lowered = names.group(statements)
    return SerialGroup(lowered, tuple(x for x, _ in band), tiled, conditions)


# -- scatters --------------------------------------------------------------------------------------------------------


def _scatter(plan: FusionPlan, group: FusedGroup) -> SerialGroup:
    node, *last = group.nodes
    own = finished(node, last[0]) if last else Finished(neutral(node.reduce or "", node.body.dtype), node, False)
    assert own is not None, "checked when the group was made"
    flat = _flat(plan, group, own.terms)
    start = _flat(plan, group, Compute(own.terms.output, own.start))
    match = _updates(flat, flat.inner)
    moving = tuple(x for x in flat.inner if x[0] in match.places)
    shared = tuple(x for x in flat.inner if x not in moving)
    start, flat = collapse_shared(tuple(replace(n, shared=shared, inner=moving) for n in (start, flat)))
    flat = collapse_reduction(flat)
    match = _updates(flat, (*flat.shared, *flat.inner))  # over merged axes
    return _scattered(plan, start, replace(flat, reduce=None if own.overwrites else flat.reduce), match)


def _updates(n: FlatNode, outer: tuple[Axis, ...]) -> Scatter:
    match = scatter_of(n.body, n.reduce, dict(outer), dict(n.reduction))
    assert match is not None, "it was a scatter when the group was made"
    return match


def _scattered(plan: FusionPlan, start: FlatNode, n: FlatNode, match: Scatter) -> SerialGroup:
    names = Canonical(plan.graph)
    band, tiled = _columns_last(n)
    elements, updates = _extents(names, (*band, *n.inner)), _extents(names, (*band, *n.reduction))
    array, index = output_array(names, n, elements)
    initial = names.value(start.body, frozenset(x for x, _ in elements), {})
    iterators = frozenset(x for x, _ in updates)
    places = {x: names.index(i, iterators) for x, i in match.places.items()}
    moved = tuple(places.get(str(i), i) for i in index)
    conditions = tuple(Compare(r, names.index(a, iterators), names.index(b, iterators)) for r, a, b in match.conditions)
    return _lowered(
        names, band, tiled, Statement("S0", elements, array, index, initial, role="init"),
        Statement("S1", updates, array, moved, names.value(match.update, iterators, {}), n.reduce),
        conditions=conditions,
    )  # fmt: skip


# -- running sums ----------------------------------------------------------------------------------------------------


def _scan(plan: FusionPlan, group: FusedGroup) -> SerialGroup:
    flat = _flat(plan, group, group.nodes[0])
    match = scan_of(flat.body, flat.reduce, dict(flat.inner), dict(flat.reduction))
    assert match is not None and flat.reduce is not None, "it was a running sum when the group was made"
    along = tuple(x for x in flat.inner if x[0] == match.axis)
    shared = tuple(x for x in flat.inner if x not in along)
    (n,) = collapse_shared((replace(flat, shared=shared, inner=along),))
    assert isinstance(n.body, Op)
    term = n.body.args[1]
    names = Canonical(plan.graph)
    band, tiled = _columns_last(n)
    array, index = output_array(names, n, _extents(names, (*band, *along)))
    rows, steps = _extents(names, band), _extents(names, ((match.number, along[0][1] - 1),))
    iterators = frozenset(x for x, _ in (*rows, *steps))
    first, before, here = _walk(match, names.extent(along[0][1]))
    begin: Value = neutral(n.reduce or "", n.dtype)
    first_term, before_term, here_term = (substitute(term, {match.number: i}) for i in _walk(match, along[0][1]))
    if not match.exclusive:
        begin = names.value(first_term, iterators, {})
    more = names.value(before_term if match.exclusive else here_term, iterators, {})

    def at(place: Index) -> tuple[Index, ...]:
        return (*index[:-1], place)

    total = Op(n.dtype, REDUCTIONS[n.reduce or ""], (Load(n.dtype, array, at(before)), more))
    return _lowered(
        names, band, tiled, Statement("S0", rows, array, at(first), begin, role="init"),
        Statement("S1", (*rows, *steps), array, at(here), total),
    )  # fmt: skip


def _walk(scan: Scan, count: Index) -> tuple[Index, Index, Index]:
    """Return the first position, and for each step the previous and the current position."""
    step = Index.of(scan.number)
    return (count - 1, count - 1 - step, count - 2 - step) if scan.backwards else (ZERO, step, step + 1)
