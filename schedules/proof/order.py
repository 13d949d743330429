"""Proofs of schedules. Every check raises LegalityError with a witness and changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

import islpy as isl

from polydyn.schedules.errors import LegalityError, ScheduleError
from polydyn.schedules.group.dependence import Dependences
from polydyn.schedules.group.polyhedra import iteration_domain, rows_to_map
from polydyn.schedules.group.witness import dependence_error, set_error
from polydyn.schedules.index import Index, IndexLike
from polydyn.schedules.isl_util import maps, pair, sets, split_rows
from polydyn.schedules.model import Group

Rows: TypeAlias = Mapping[str, Sequence[IndexLike]]
"""Statement -> affine schedule rows, outermost first."""


Timeline: TypeAlias = dict[str, list[isl.Map]]
"""Statement -> one map per time dimension."""


def check_parallel(group: Group, deps: Dependences, schedule: Rows, parallel: Collection[int]) -> None:
    """Check that no parallel row carries a dependence. LegalityError names row, statements and instances."""
    timeline = _timeline(group, rows_to_map(group, _indices(schedule)))
    for m in deps.pairs:
        for d, live, s, t in _walk(m, timeline):
            if d in parallel:
                bad = live.subtract(s.apply_range(t.reverse())).intersect_params(deps.context)
                if not bad.is_empty():
                    raise dependence_error(f"parallel row {d} carries a dependence", bad, group, deps.context)


def band_properties(group: Group, deps: Dependences, prefix: Rows, rows: Rows) -> tuple[tuple[bool, ...], bool]:
    """Return isl's band flags for ``rows`` below ``prefix``: coincidence of each member, permutability of the band.

    A member is coincident if no dependence that the prefix leaves open moves along it. The band is permutable if none
    moves backwards along any member: then every rectangular tiling of it is legal.
    """
    outer = next(iter(prefix.values()), ())
    inner = next(iter(rows.values()), ())
    whole = {n: (*(prefix.get(n) or ()), *r) for n, r in rows.items()}
    timeline = _timeline(group, rows_to_map(group, _indices(whole)))
    coincident, permutable = [True] * len(inner), True
    for m in deps.pairs:
        live = m.intersect_params(deps.context)
        s, t = (timeline[n] for n in pair(m))
        for d in range(len(outer)):
            live = live.intersect(s[d].apply_range(t[d].reverse()))
        for i in range(len(inner)):
            back = s[len(outer) + i].lex_gt_map(t[len(outer) + i])
            forth = s[len(outer) + i].lex_lt_map(t[len(outer) + i])
            backwards = not live.intersect(back).is_empty()
            permutable = permutable and not backwards
            coincident[i] = coincident[i] and not backwards and bool(live.intersect(forth).is_empty())
    return tuple(coincident), permutable


# -- tile space ------------------------------------------------------------------------------------------------------


def check_tree(
    group: Group, deps: Dependences, expansion: isl.UnionMap, schedule: isl.Schedule, context: isl.Set
) -> None:
    """Prove that a tile-space schedule computes the group, for the tile sizes of ``expansion``.

    Proven under ``context`` (which relates tile counts and tile sizes to the parameters) and ``deps.context``: the
    expansion is injective and maps every original instance into the schedule's domain; every original dependence runs
    strictly forwards. LegalityError with a witness otherwise. Statements of the tree that are not in the group are
    ignored, and so are tile-space instances that are not images (``check_tails`` has them).
    """
    ctx = deps.context.intersect(context)
    inside = schedule.get_domain().intersect_params(ctx)
    images = {pair(m)[0]: m.intersect_params(ctx) for m in maps(expansion)}
    present = {s.get_tuple_name(): s for s in sets(inside)}
    for s in group.statements:
        whole = iteration_domain(group, s).intersect_params(ctx)
        m = images.get(s.name)
        if m is None or s.name not in present:
            if whole.is_empty():  # an extent of 0: nothing to run
                continue
            raise set_error("a statement is missing in tile space", whole, s.name, ctx)
        if not m.is_injective():
            raise _collision(m, s.name, ctx)
        _must_be_empty(whole.subtract(m.domain()), "instances have no tile-space image", s.name, ctx)
        lost = m.subtract_range(present[s.name]).domain()
        _must_be_empty(lost, "instances are not covered by the tiles", s.name, ctx)
    _check_order(group, deps.pairs, _times(group, images, schedule), ctx)


def _times(group: Group, images: Mapping[str, isl.Map], schedule: isl.Schedule) -> Timeline:
    """Return the times of the original instances: their images, then the tile-space schedule, row by row.

    Each row is composed separately, because isl recovers the function from the full composition only with much work.
    """
    rows = {pair(m)[0]: split_rows(m) for m in maps(schedule.get_map()) if pair(m)[0] in images}
    return _complete(group, {name: [images[name].apply_range(row) for row in own] for name, own in rows.items()})


def _must_be_empty(bad: isl.Set, what: str, statement: str, ctx: isl.Set) -> None:
    if not bad.is_empty():
        raise set_error(what, bad, statement, ctx)


def _collision(m: isl.Map, name: str, ctx: isl.Set) -> LegalityError:
    same = m.apply_range(m.reverse())
    bad = same.subtract(isl.Map.identity(same.get_space()))
    return set_error("two instances share one tile-space instance", bad.domain(), name, ctx)


# -- the order check -------------------------------------------------------------------------------------------------


def _indices(schedule: Rows) -> dict[str, tuple[Index, ...]]:
    return {n: tuple(map(Index.of, r)) for n, r in schedule.items()}


def _timeline(group: Group, schedule: isl.UnionMap) -> Timeline:
    return _complete(group, {pair(m)[0]: split_rows(m) for m in maps(schedule)})


def _complete(group: Group, timeline: Timeline) -> Timeline:
    missing = [s.name for s in group.statements if s.name not in timeline and not iteration_domain(group, s).is_empty()]
    if missing:
        raise ScheduleError(f"the schedule has no rows for {missing}")
    if len({len(rows) for rows in timeline.values()}) > 1:
        raise ScheduleError(f"schedule rows differ in number: { {n: len(r) for n, r in timeline.items()} }")
    return timeline


def _walk(m: isl.Map, timeline: Timeline) -> Iterator[tuple[int, isl.Map, isl.Map, isl.Map]]:
    """Yield, row by row: its number, the dependences that earlier rows leave open, the rows of both statements."""
    source, sink = (timeline[n] for n in pair(m))
    for d, (s, t) in enumerate(zip(source, sink, strict=True)):
        yield d, m, s, t
        m = m.intersect(s.apply_range(t.reverse()))
        if m.is_empty():
            return


def _check_order(group: Group, pairs: Sequence[isl.Map], timeline: Timeline, ctx: isl.Set) -> None:
    for m in pairs:
        m = m.intersect_params(ctx)
        live = m
        for d, live, s, t in _walk(m, timeline):
            bad = live.intersect(s.lex_gt_map(t))
            if not bad.is_empty():
                raise dependence_error(f"row {d} runs a dependence backwards", bad, group, ctx)
        left = live.intersect(s.apply_range(t.reverse()))
        if not left.is_empty():
            raise dependence_error("two dependent instances run at the same time", left, group, ctx)
