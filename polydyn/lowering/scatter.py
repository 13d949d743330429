"""Lowering of scatters: an initialiser over the elements, and an update for every term."""

from __future__ import annotations

from dataclasses import dataclass, replace

from polydyn.codegen.ir import Compare
from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.fusion.scatter import Finished, Scatter, finished, scatter_of
from polydyn.graph.ir import Compute
from polydyn.lowering.collapse import Axis, collapse_reduction, collapse_shared
from polydyn.lowering.flatten import FlatNode, flatten
from polydyn.lowering.group import Canonical, LoweredGroup
from polydyn.lowering.output import output_array
from polydyn.schedules.expr import Value, neutral
from polydyn.schedules.index import ONE
from polydyn.schedules.model import Statement

FEWEST = 4
"""Columns that are worth a vector."""


@dataclass(frozen=True)
class ScatterGroup:
    """A lowered scatter: ``band``: the iterators that both statements share, ``tiled``: vectors run along the last.
    ``conditions``: where there is an update.
    """

    lowered: LoweredGroup
    band: tuple[str, ...]
    tiled: bool
    conditions: tuple[Compare, ...]


def lower_scatter(plan: FusionPlan, group: FusedGroup) -> ScatterGroup:
    """The statements of a group of kind scatter."""
    node, *last = group.nodes
    own = finished(node, last[0]) if last else Finished(_neutral(node), node, False)
    assert own is not None, "checked when the group was made"
    flat = _flat(plan, group, own.terms)
    start = _flat(plan, group, Compute(own.terms.output, own.start))
    found = _scatter(flat, flat.inner)
    moving = tuple(x for x in flat.inner if x[0] in found.places)
    shared = tuple(x for x in flat.inner if x not in moving)
    start, flat = collapse_shared(tuple(replace(n, shared=shared, inner=moving) for n in (start, flat)))
    flat = collapse_reduction(flat)
    found = _scatter(flat, (*flat.shared, *flat.inner))  # over merged axes
    return _statements(plan, start, replace(flat, reduce=None if own.overwrites else flat.reduce), found)


def _neutral(n: Compute) -> Value:
    return neutral(n.reduce or "", n.body.dtype)


def _flat(plan: FusionPlan, group: FusedGroup, n: Compute) -> FlatNode:
    return flatten(plan, replace(group, nodes=(n,), outputs=(n.output,), rows={n.output: ()}), n)


def _scatter(n: FlatNode, outer: tuple[Axis, ...]) -> Scatter:
    found = scatter_of(n.body, n.reduce, dict(outer), dict(n.reduction))
    assert found is not None, "it was a scatter when the group was made"
    return found


def _statements(plan: FusionPlan, start: FlatNode, n: FlatNode, found: Scatter) -> ScatterGroup:
    names = Canonical({t: x.dtype for t, x in plan.graph.tensors.items()})
    band = sorted(n.shared, key=lambda a: n.address.split(a[0])[0] == ONE)

    def extents(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple((x, names.extent(e)) for x, e in axes)

    elements, updates = extents((*band, *n.inner)), extents((*band, *n.reduction))
    array, index = output_array(names, n, elements)
    initial = names.value(start.body, frozenset(x for x, _ in elements), {})
    own = frozenset(x for x, _ in updates)
    places = {x: names.index(i, own) for x, i in found.places.items()}
    moved = tuple(places.get(str(i), i) for i in index)
    statements = (
        Statement("S0", elements, array, index, initial, role="init"),
        Statement("S1", updates, array, moved, names.value(found.update, own, {}), n.reduce),
    )
    conditions = tuple(Compare(r, names.index(a, own), names.index(b, own)) for r, a, b in found.conditions)
    last = band[-1] if band else ("", ONE)
    tiled = bool(band) and n.address.split(last[0])[0] == ONE and (last[1].constant or FEWEST) >= FEWEST
    lowered = LoweredGroup(names.group(statements), names.buffers, names.params)
    return ScatterGroup(lowered, tuple(x for x, _ in band), tiled, conditions)
