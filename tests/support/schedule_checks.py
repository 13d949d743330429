"""Checks schedule matrices against dependences, without a tree: for tests of solving and recognition."""

from __future__ import annotations

from collections.abc import Mapping

import islpy as isl

from polydyn.schedules.group.dependence import Dependences
from polydyn.schedules.group.polyhedra import iteration_domain, rows_to_map
from polydyn.schedules.isl_util import union_maps
from polydyn.schedules.model import Group
from polydyn.schedules.proof.order import Rows, _check_order, _indices, _timeline
from polydyn.schedules.solution.matrix import Unknown
from polydyn.schedules.solution.solve import SolvedMatrix


def check_legal(group: Group, deps: Dependences, schedule: Rows | isl.UnionMap) -> None:
    """Check by the proof for trees that every dependence runs strictly forwards. LegalityError otherwise."""
    union = rows_to_map(group, _indices(schedule)) if isinstance(schedule, Mapping) else schedule
    _check_order(group, deps.pairs, _timeline(group, union), deps.context)


def schedule_map(solved: SolvedMatrix, group: Group) -> isl.UnionMap:
    """Return the schedule map of all statements."""
    parts = []
    for s in group.statements:
        first, *rest = map(isl.Map.from_pw_aff, solved.rows[s.name])
        for row in rest:
            first = first.flat_range_product(row)
        parts.append(first.intersect_domain(iteration_domain(group, s)))
    return union_maps(parts, group.params)


def time_of(solved: SolvedMatrix, statement: str, env: Mapping[str, int]) -> tuple[int, ...]:
    """Return when an instance runs, for given parameters and iterators (without the textual position)."""
    return tuple(
        r.expr.evaluate(env)
        + (_value(solved.shifts[r.shift.name], env) if isinstance(r.shift, Unknown) else r.shift.evaluate(env))
        for r in solved.matrix[statement]
    )


def _value(f: isl.PwAff, env: Mapping[str, int]) -> int:
    """Return the value of a function of the parameters."""
    point = isl.Point.zero(f.domain().get_space())
    for i in range(f.dim(isl.dim_type.param)):
        value = isl.Val(env[f.get_dim_name(isl.dim_type.param, i)])
        point = point.set_coordinate_val(isl.dim_type.param, i, value)
    return int(f.eval(point).to_python())
