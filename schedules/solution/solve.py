"""The ``?`` solver: unknown shifts of a schedule matrix from the dependences (TSCompiler 5.2, without an ILP).

Row by row, the shifts satisfy a difference-constraint system: for every dependence from s to t that no earlier row
carries, ``x_t - x_s >= w(s, t)`` with ``w`` the parametric maximum of ``row_s - row_t`` over its instances. The
smallest solution is a longest path (Bellman-Ford over piecewise affine functions of the parameters).
"""

from __future__ import annotations

from dataclasses import dataclass

import islpy as isl

from polydyn.schedules.errors import ScheduleError
from polydyn.schedules.group.dependence import Dependences
from polydyn.schedules.group.polyhedra import statement_frame
from polydyn.schedules.group.witness import dependence_error
from polydyn.schedules.index import ZERO, Index
from polydyn.schedules.isl_util import (
    constant_on_params,
    dim_maximum,
    lift,
    pair,
    pw_aff_to_index,
    tidy,
)
from polydyn.schedules.model import Group
from polydyn.schedules.solution.matrix import ScheduleMatrix, Shift, Unknown, verify_matrix

_KNOWN = ""  # the node of the constraint graph for all known shifts


@dataclass(frozen=True, eq=False)
class SolvedMatrix:
    """A matrix without unknowns, proven legal.

    ``shifts``: unknown -> its value (piecewise affine over the parameters). ``rows``: statement -> one PwAff per row
    and, last, the position in the leaf's sequence.
    """

    matrix: ScheduleMatrix
    shifts: dict[str, isl.PwAff]
    rows: dict[str, tuple[isl.PwAff, ...]]

    def shift(self, name: str) -> Index:
        """Return the value of an unknown. ScheduleError: it is piecewise."""
        return pw_aff_to_index(self.shifts[name])

    def exprs(self, statement: str) -> tuple[Index, ...]:
        """Return the rows of a statement (without the last, textual one). ScheduleError: a shift is piecewise."""
        return tuple(
            r.expr + (self.shift(r.shift.name) if isinstance(r.shift, Unknown) else r.shift)
            for r in self.matrix[statement]
        )


@dataclass(frozen=True)
class _Edge:
    """``x[target] - x[source] >= weight``; ``pair`` names the statements."""

    source: str
    target: str
    weight: isl.PwAff
    pair: tuple[str, str]


def solve(matrix: ScheduleMatrix, group: Group, deps: Dependences) -> SolvedMatrix:
    """Solve every unknown, smallest values first, and prove the result.

    ScheduleError: a cycle of unknowns that no values satisfy (names the cycle), or an unbounded shift (names row and
    pair). LegalityError with a witness: rows without unknowns violate a dependence, or textual order does.
    """
    verify_matrix(matrix, group)
    ctx = deps.context
    live = list(deps.pairs)
    shifts: dict[str, isl.PwAff] = {}
    rows: dict[str, list[isl.PwAff]] = {s.name: [] for s in group.statements}
    for d in range(matrix.depth):
        base = _base_rows(matrix, group, d, shifts)
        open_ = {s.name: _open(matrix[s.name][d].shift, shifts) for s in group.statements}
        edges = [e for m in live if (e := _edge(m, base, open_, d, ctx))]
        known = {e.pair for e in edges if e.source == e.target == _KNOWN}
        for m in live:
            if pair(m) in known:
                _check_forward(m, base, d, group, ctx)
        shifts |= _smallest_shifts(sorted({u for u in open_.values() if u}), edges, d, group.params, ctx)
        for s in group.statements:
            name = open_[s.name]
            value = base[s.name]
            if name:
                value = value.add(lift(shifts[name], statement_frame(group, s)))
            rows[s.name].append(value)
        live = _still_equal(live, {n: r[d] for n, r in rows.items()}, d, group, ctx)
    _check_textual(live, group, ctx)
    for i, s in enumerate(group.statements):
        rows[s.name].append(isl.PwAff.from_aff(statement_frame(group, s).aff(i)))
    return SolvedMatrix(matrix, shifts, {n: tuple(r) for n, r in rows.items()})


def _open(shift: Shift, solved: dict[str, isl.PwAff]) -> str:
    """Return the name of the unknown if it is not solved yet, else the known node."""
    return shift.name if isinstance(shift, Unknown) and shift.name not in solved else _KNOWN


def _base_rows(matrix: ScheduleMatrix, group: Group, d: int, solved: dict[str, isl.PwAff]) -> dict[str, isl.PwAff]:
    """Return row ``d`` of every statement without unsolved shifts."""
    out = {}
    for s in group.statements:
        f, r = statement_frame(group, s), matrix[s.name][d]
        value = isl.PwAff.from_aff(f.aff(r.expr + (r.shift if isinstance(r.shift, Index) else ZERO)))
        if isinstance(r.shift, Unknown) and r.shift.name in solved:
            value = value.add(lift(solved[r.shift.name], f))
        out[s.name] = value
    return out


def _edge(m: isl.Map, base: dict[str, isl.PwAff], open_: dict[str, str], d: int, ctx: isl.Set) -> _Edge | None:
    s, t = pair(m)
    distance = m.apply_domain(isl.Map.from_pw_aff(base[s])).apply_range(isl.Map.from_pw_aff(base[t]))
    reversed_ = distance.reverse().deltas().intersect_params(ctx)
    if reversed_.is_empty():
        return None
    weight = dim_maximum(reversed_)
    if weight is None:
        raise ScheduleError(
            f"row {d}: the shift between {s} and {t} is unbounded",
            node=f"{s} -> {t}",
            rule="bounded dependence distances",
            remedy="give the statements different phases",
        )
    return _Edge(open_[s], open_[t], tidy(weight, ctx), (s, t))


def _check_forward(m: isl.Map, rows: dict[str, isl.PwAff], d: int, group: Group, ctx: isl.Set) -> None:
    """Raise LegalityError if row ``d`` runs a dependence of ``m`` backwards."""
    s, t = (isl.Map.from_pw_aff(rows[n]) for n in pair(m))
    bad = m.intersect(s.lex_gt_map(t)).intersect_params(ctx)
    if not bad.is_empty():
        raise dependence_error(f"row {d} runs a dependence backwards", bad, group, ctx)


def _smallest_shifts(
    unknowns: list[str], edges: list[_Edge], d: int, params: tuple[str, ...], ctx: isl.Set
) -> dict[str, isl.PwAff]:
    """Return the smallest solution above the known shifts.

    Unknowns with only upper bounds get the largest, free ones 0.
    """
    value = {_KNOWN: constant_on_params(0, params)}
    todo = list(unknowns)
    while True:
        _relax(value, edges, ctx, d, up=True)
        _relax(value, edges, ctx, d, up=False)
        todo = [u for u in todo if u not in value]
        if not todo:
            break
        value[todo[0]] = value[_KNOWN]
    return {u: value[u] for u in unknowns}


def _relax(value: dict[str, isl.PwAff], edges: list[_Edge], ctx: isl.Set, d: int, up: bool) -> None:
    """Run Bellman-Ford from the nodes that have values, along the edges (``up``: lower bounds) or against them."""
    fixed = set(value)
    nodes = {n for e in edges for n in (e.source, e.target)}
    came: dict[str, _Edge] = {}
    for _ in range(len(nodes) + 1):
        changed = ""
        for e in edges:
            start, end = (e.source, e.target) if up else (e.target, e.source)
            if start not in value:
                continue
            bound = value[start].add(e.weight) if up else value[start].sub(e.weight)
            if end not in value:
                value[end] = tidy(bound, ctx)
            elif _satisfied(bound, value[end], up, ctx):
                continue
            elif end in fixed:
                raise _cycle(e, came, d, up)
            else:
                value[end] = tidy(value[end].max(bound) if up else value[end].min(bound), ctx)
            came[end], changed = e, end
        if not changed:
            return
    raise _cycle(came[changed], came, d, up)


def _satisfied(bound: isl.PwAff, value: isl.PwAff, up: bool, ctx: isl.Set) -> bool:
    broken = bound.gt_set(value) if up else bound.lt_set(value)
    return bool(broken.intersect(ctx).is_empty())


def _cycle(last: _Edge, came: dict[str, _Edge], d: int, up: bool) -> ScheduleError:
    """Return the error that names the edges of a positive cycle."""
    path, seen, e = [last], set(), last
    while True:
        at = e.source if up else e.target
        if at in seen or at not in came:
            break
        seen.add(at)
        e = came[at]
        path.append(e)
    steps = [f"{e.pair[0]} -> {e.pair[1]} needs {e.weight}" for e in (reversed(path) if up else path)]
    return ScheduleError(
        f"row {d}: no shifts satisfy the cycle\n  " + "\n  ".join(steps),
        node=" -> ".join(dict.fromkeys(n for e in path for n in e.pair)),
        rule="no positive cycle of dependence distances",
        remedy="give the statements different phases",
    )


def _still_equal(live: list[isl.Map], rows: dict[str, isl.PwAff], d: int, group: Group, ctx: isl.Set) -> list[isl.Map]:
    """Return the instances that row ``d`` does not carry, after proving that it runs none backwards."""
    out = []
    for m in live:
        _check_forward(m, rows, d, group, ctx)
        s, t = (isl.Map.from_pw_aff(rows[n]) for n in pair(m))
        equal = m.intersect(s.apply_range(t.reverse())).intersect_params(ctx)
        if not equal.is_empty():
            out.append(equal.coalesce())
    return out


def _check_textual(live: list[isl.Map], group: Group, ctx: isl.Set) -> None:
    position = {s.name: i for i, s in enumerate(group.statements)}
    for m in live:
        s, t = pair(m)
        if position[s] >= position[t]:
            raise dependence_error("no row carries a dependence, and textual order does not", m, group, ctx)
