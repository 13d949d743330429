"""Schedules and proofs of CPU kernels, made once for all groups with the same skeleton.

A model with hundreds of constant shapes has few skeletons. Where a skeleton's schedule or proof fails (it may need a
relation between constants) the group is scheduled and proven as it is: what decides is always a proof that covers
the group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import TypeVar

from polydyn.schedules.errors import LegalityError, ScheduleError
from polydyn.schedules.group.dependence import Dependences, analyse
from polydyn.schedules.group.polyhedra import context
from polydyn.schedules.group.skeleton import Form, Skeleton, check_instance, skeleton
from polydyn.schedules.isl_util import Condition
from polydyn.schedules.model import Group
from polydyn.schedules.proof.boxes import ContractTiles, check_fill_box, check_panel_box
from polydyn.schedules.proof.footprints import check_strip
from polydyn.schedules.proof.parts import check_lanes
from polydyn.schedules.proof.prove import prove
from polydyn.schedules.solution.schedule import NestSchedule, schedule_contract, schedule_nest
from polydyn.schedules.tiling import Roles
from polydyn.schedules.tree.scheduled import Scheduled

_T = TypeVar("_T")
Facts = tuple[Condition, ...]


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
        if tiles.strip:
            check_strip(t, tiles.strip)
        elif tiles.fill:
            check_fill_box(tiles)

    def prove_nest(self, t: Scheduled, band: tuple[str, ...], phases: dict[str, int]) -> None:
        """The schedule of an element-wise or stitch group computes it, and its vector loops carry nothing."""
        prove(t)
        s = self.skeleton
        if t.map.origins:  # vectors run along the tile, whose points are at once
            return
        if s and _lanes_hold(s.form, s.facts, band, tuple(phases.items())):
            self.reused += 1
        else:
            check_lanes(self.group, self.dependences, band, phases)


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
def _lanes_hold(form: Form, facts: Facts, band: tuple[str, ...], phases: tuple[tuple[str, int], ...]) -> bool:
    def f() -> bool:
        check_lanes(form.group(), _dependences(form, facts), band, dict(phases))
        return True

    return bool(_attempt(f))
