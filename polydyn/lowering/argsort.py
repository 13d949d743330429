"""Lower an argsort: one statement that reads a line and writes positions at an address that data decide."""

from __future__ import annotations

from dataclasses import dataclass, replace

from polydyn.fusion.argsort import TERM, match_argsort
from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.graph.ir import Compute
from polydyn.lowering.collapse import collapse_shared
from polydyn.lowering.flatten import flatten
from polydyn.lowering.group import Canonical, LoweredGroup
from polydyn.lowering.output import output_array
from polydyn.schedules.expr import Load, Value, substitute
from polydyn.schedules.index import ONE, ZERO, Index, fetch
from polydyn.schedules.model import Statement


@dataclass(frozen=True)
class ArgSortGroup:
    """A lowered argsort.

    ``band``: the iterators over lines. ``count``: elements of a line, ``stride`` apart. ``positions``: number of
    positions, ``step`` apart. All are over the group's parameters.
    """

    lowered: LoweredGroup
    band: tuple[str, ...]
    count: Index
    stride: Index
    positions: Index
    step: Index
    largest: bool


def lower_argsort(plan: FusionPlan, group: FusedGroup) -> ArgSortGroup:
    """Lower a group of kind order to its statement."""
    rank, place = group.nodes
    match = match_argsort(plan, rank, place)
    assert match is not None, "it was an order when the group was made"
    written = plan.graph.tensors[place.output].shape[match.axis]
    alone = replace(group, nodes=(place,), outputs=(place.output,), rows={place.output: ()})
    n, second = (flatten(plan, alone, Compute(place.output, substitute(match.element, {TERM: k}))) for k in (ZERO, ONE))
    stride = _address(second.body) - _address(n.body)
    along = tuple(x for x in n.inner if x[0] == _axis_name(plan, place, match.axis))
    (n,) = collapse_shared((replace(n, shared=tuple(x for x in n.inner if x not in along), inner=along),))
    names = Canonical(plan.graph)
    rows, places = (tuple((x, names.extent(e)) for x, e in axes) for axes in (n.shared, along))
    array, index = output_array(names, n, (*rows, *places))
    output = names.arrays[array]
    if not along:  # a line with one position
        names.arrays[array] = output = replace(output, shape=(*output.shape, ONE), strides=(*output.strides, ONE))
    value = names.value(n.body, frozenset(x for x, _ in rows), {})
    assert isinstance(value, Load)
    anywhere = fetch(value.buffer, value.index)
    statement = Statement("S0", rows, array, (*index[: len(rows)], anywhere), value)
    count, apart, first = (names.index(i, frozenset()) for i in (match.count, stride, written))
    lowered = names.group((statement,))
    return ArgSortGroup(lowered, tuple(x for x, _ in rows), count, apart, first, output.strides[-1], match.largest)


def _address(v: Value) -> Index:
    """Return the address of a load."""
    assert isinstance(v, Load)
    return v.index[0]


def _axis_name(plan: FusionPlan, place: Compute, axis: int) -> str:
    """Return the iterator of an axis in a flat node without shared axes, or "" for an axis of one element."""
    shape = plan.graph.tensors[place.output].shape
    axes = [a for a, e in enumerate(shape) if e != ONE]
    return f"j{axes.index(axis)}" if axis in axes else ""
