"""Exact dependences of a group in its original order, by isl's data-flow analysis."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import islpy as isl

from polydyn.schedules.group.polyhedra import (
    context,
    original_order,
    read_accesses,
    read_relation,
    write_relation,
)
from polydyn.schedules.group.witness import set_error
from polydyn.schedules.isl_util import Condition, maps, pair, union_maps
from polydyn.schedules.model import Array, Group, Statement


@dataclass(frozen=True, eq=False)
class Dependences:
    """Relations from source instances to sink instances, under the context (parameters >= 1).

    ``flow`` (read after write), ``anti`` (write after read) and ``output`` (write after write) hold no dependence of a
    reduction on itself; ``reduction`` has those.
    """

    context: isl.Set
    flow: isl.UnionMap
    anti: isl.UnionMap
    output: isl.UnionMap
    reduction: isl.UnionMap

    def under(self, ctx: isl.Set) -> Dependences:
        """Return the dependences for fewer parameters."""
        parts = (self.flow, self.anti, self.output, self.reduction)
        return Dependences(self.context.intersect(ctx), *(u.intersect_params(ctx).coalesce() for u in parts))

    @cached_property
    def strict(self) -> isl.UnionMap:
        """All dependences, with accumulations in their original order."""
        return self.flow.union(self.anti).union(self.output).union(self.reduction).coalesce()

    @cached_property
    def pairs(self) -> tuple[isl.Map, ...]:
        """``strict``, one map per pair of statements: the maps that a schedule must respect."""
        return tuple(maps(self.strict))


def analyse(group: Group, facts: Iterable[Condition] = (), positive: bool = True) -> Dependences:
    """Return all dependences of the group, under facts about its parameters (``H2 == H + 2``).

    ``positive``: all parameters are >= 1; otherwise they may be 0 too (empty extents).

    LegalityError: a local or an output is read before it is written.
    """
    return _analyse(
        group.name, group.params, tuple(group.arrays.items()), group.statements, group.around, tuple(facts), positive
    )


@lru_cache(maxsize=64)
def _analyse(
    name: str, params: tuple[str, ...], arrays: tuple[tuple[str, Array], ...], statements: tuple[Statement, ...],
    around: str | None, facts: tuple[Condition, ...], positive: bool,
) -> Dependences:  # fmt: skip
    group = Group(name, params, dict(arrays), statements, around)
    ctx = context(group, facts, positive)
    flow, anti, output, missing = _flows(name, params, arrays, statements, around)
    if missing is not None:
        _check_sources(group, missing, ctx)
    return _split(group, ctx, flow, anti, output)


@lru_cache(maxsize=64)
def _flows(
    name: str, params: tuple[str, ...], arrays: tuple[tuple[str, Array], ...], statements: tuple[Statement, ...],
    around: str | None,
) -> tuple[isl.UnionMap, isl.UnionMap, isl.UnionMap, isl.UnionMap | None]:  # fmt: skip
    """Return the flow, anti and output dependences for all parameters, and the reads without a source.

    None instead of the reads if a write is not exact: it may fill anything, so nothing can be proven.
    """
    group = Group(name, params, dict(arrays), statements, around)
    order = original_order(group)
    reads, writes, may = read_relation(group), write_relation(group), write_relation(group, exact=False)
    raw = isl.UnionAccessInfo.from_sink(reads).set_must_source(writes).set_may_source(may)
    found = raw.set_schedule_map(order).compute_flow()
    flow = found.get_may_dependence()
    everything = writes.union(may)
    waw = isl.UnionAccessInfo.from_sink(everything).set_must_source(writes).set_may_source(may)
    output = waw.set_schedule_map(order).compute_flow().get_may_dependence()
    war = isl.UnionAccessInfo.from_sink(everything).set_may_source(reads).set_kill(writes)
    anti = war.set_schedule_map(order).compute_flow().get_may_dependence()
    return flow, anti, output, found.get_must_no_source() if may.is_empty() else None


def _split(group: Group, ctx: isl.Set, flow: isl.UnionMap, anti: isl.UnionMap, output: isl.UnionMap) -> Dependences:
    reductions = {s.name for s in group.statements if is_accumulation(s)}

    def own(m: isl.Map) -> bool:
        s, t = pair(m)
        return s == t and s in reductions

    def select(u: isl.UnionMap, keep: Callable[[isl.Map], bool]) -> isl.UnionMap:
        return union_maps((m for m in maps(u) if keep(m)), group.params)

    flow, anti, output = (u.intersect_params(ctx).coalesce() for u in (flow, anti, output))
    inside = select(flow.union(anti).union(output), own).coalesce()
    flow, anti, output = (select(u, lambda m: not own(m)) for u in (flow, anti, output))
    return Dependences(ctx, flow, anti, output, reduction=inside)


def is_accumulation(s: Statement) -> bool:
    """Whether a reduction does not read its accumulator in its value: its instances may be combined in any order."""
    return s.reduce is not None and all(a.array != s.array for a in read_accesses(s)[1:])


def _check_sources(group: Group, no_source: isl.UnionMap, ctx: isl.Set) -> None:
    for m in maps(no_source.intersect_params(ctx)):
        statement, array = pair(m)
        if group.arrays[array].role in ("local", "output") and not m.is_empty():
            raise set_error(f"{array} is read before anything is written there", m.domain(), statement, ctx, array)
