"""Schedules and proofs of CPU kernels, made once for all groups with the same skeleton.

A model with hundreds of constant shapes has few skeletons. Where a skeleton's schedule or proof fails (it may need a
relation between constants) the group is scheduled and proven as it is: what decides is always a proof that covers
the group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TypeVar

from polydyn.schedules.dependence import Dependences, analyse
from polydyn.schedules.errors import LegalityError, ScheduleError
from polydyn.schedules.index import Index
from polydyn.schedules.isl_util import Condition
from polydyn.schedules.model import Group
from polydyn.schedules.polyhedra import context
from polydyn.schedules.proof import prove_nest
from polydyn.schedules.prove import prove
from polydyn.schedules.schedule import NestSchedule, schedule_contract, schedule_nest
from polydyn.schedules.skeleton import Form, Skeleton, check_instance, skeleton
from polydyn.schedules.tile_flow import ContractTiles, check_fill_box, check_panel_box
from polydyn.schedules.tiling import Roles, TiledGroup
from polydyn.schedules.tree.scheduled import Scheduled

_T = TypeVar("_T")
Facts = tuple[Condition, ...]
Tiled = tuple[TiledGroup, tuple[tuple[str, Index], ...]]


class Proofs:
    """The schedule of one group and the proof of its tree. ``reused``: how often a skeleton's answer was valid."""

    def __init__(self, group: Group, reuse: bool = True) -> None:
        """``reuse``: False proves the group as it is, without its skeleton."""
        self.group, self.reused = group, 0
        self.skeleton: Skeleton | None = skeleton(group) if reuse else None
        if self.skeleton is not None:
            check_instance(self.skeleton, group)

    @cached_property
    def dependences(self) -> Dependences:
        """Of the group as it is, for sizes >= 0."""
        return analyse(self.group, positive=False)

    def contract(self, roles: Roles) -> Roles:
        """``schedule_contract``: the roles with the places of the sunk statements."""
        s = self.skeleton
        found = s and _contract(s.form, s.facts, roles)
        if found:
            self.reused += 1
            return found
        return schedule_contract(self.group, roles, self.dependences.under(context(self.group)))[0]

    def nest(self) -> NestSchedule:
        """``schedule_nest``; a group that no pattern fuses is scheduled as it is."""
        s = self.skeleton
        found = s and _nest(s.form, s.facts)
        if found and not found.notes:
            self.reused += 1
            return found
        return schedule_nest(self.group, self.dependences.under(context(self.group)))

    def prove_contract(self, t: Scheduled, tiles: ContractTiles) -> None:
        """The schedule of a product computes it (``prove.prove``), and its buffers are large enough."""
        prove(t)
        if tiles.promote:
            check_panel_box(tiles)
        if tiles.fill:
            check_fill_box(tiles)

    def prove_nest(
        self, tiled: TiledGroup, band: tuple[str, ...], phases: dict[str, int], across: str | None = None
    ) -> None:
        """``proof.prove_nest``."""
        s, lifted = self.skeleton, self._lift(tiled)
        if s and lifted and _nest_holds(s.form, s.facts, _Frozen(lifted), band, tuple(phases.items()), across):
            self.reused += 1
            return
        prove_nest(self.group, tiled, band, phases, self.dependences, across)

    def _lift(self, tiled: TiledGroup) -> TiledGroup | None:
        """The tree over the skeleton's parameters; None unless replacing them gives this tree."""
        s = self.skeleton
        if s is None:
            return None
        extents = {n: s.lift(e) for n, e in tiled.extents.items()}
        same = {n: s.lower(e) for n, e in extents.items()} == tiled.extents
        own = all(c.expr.symbols() <= {*x.coords, *tiled.params} for x in tiled.statements for c in x.conditions)
        return replace(tiled, extents=extents) if same and own else None


class _Frozen:
    """A tiled group as a key: equal when all its parts are."""

    def __init__(self, tiled: TiledGroup) -> None:
        self.tiled = tiled
        self.key = (tiled.tree, tiled.statements, tiled.params, tiled.coincident, tuple(tiled.extents.items()))
        self.hash = hash(self.key)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Frozen) and self.key == other.key


def _attempt(f: Callable[[], _T]) -> _T | None:
    """What ``f`` gives, None where the skeleton is too general."""
    try:
        return f()
    except (LegalityError, ScheduleError):
        return None


def _dependences(form: Form, facts: Facts) -> Dependences:
    return analyse(form.group(), facts, positive=False)


@lru_cache(maxsize=512)
def _contract(form: Form, facts: Facts, roles: Roles) -> Roles | None:
    def f() -> Roles:
        group = form.group()
        return schedule_contract(group, roles, _dependences(form, facts).under(context(group)))[0]

    return _attempt(f)


@lru_cache(maxsize=512)
def _nest(form: Form, facts: Facts) -> NestSchedule | None:
    group = form.group()
    return _attempt(lambda: schedule_nest(group, _dependences(form, facts).under(context(group))))


@lru_cache(maxsize=512)
def _nest_holds(
    form: Form,
    facts: Facts,
    tiled: _Frozen,
    band: tuple[str, ...],
    phases: tuple[tuple[str, int], ...],
    across: str | None,
) -> bool:
    def f() -> bool:
        prove_nest(form.group(), tiled.tiled, band, dict(phases), _dependences(form, facts), across)
        return True

    return bool(_attempt(f))
