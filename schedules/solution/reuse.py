"""Reuse schedules for all groups with the same skeleton.

A model with hundreds of constant shapes has few skeletons. If a skeleton has no schedule (it may need a relation
between constants), the group itself is scheduled. In both cases a proof covers the group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import TypeVar

from polydyn.clock import timed
from polydyn.schedules.errors import LegalityError, ScheduleError
from polydyn.schedules.group.dependence import Dependences, analyse
from polydyn.schedules.group.polyhedra import context
from polydyn.schedules.group.skeleton import Form, Skeleton, accesses, check_instance, skeleton
from polydyn.schedules.isl_util import Condition
from polydyn.schedules.model import Group
from polydyn.schedules.solution.schedule import NestSchedule, schedule_contract, schedule_nest
from polydyn.schedules.tiling import Roles

_T = TypeVar("_T")
Facts = tuple[Condition, ...]


class Solver:
    """The schedule of one group. ``reused`` counts how often a skeleton's answer was valid."""

    def __init__(self, group: Group, reuse: bool = True) -> None:
        """Analyse a group. With ``reuse`` False, its skeleton is not used."""
        self.group, self.reused = group, 0
        self.skeleton: Skeleton | None = skeleton(group) if reuse else None
        if self.skeleton is not None:
            check_instance(self.skeleton, group)

    @cached_property
    def dependences(self) -> Dependences:
        """The dependences of the group itself, for sizes >= 0."""
        return analyse(self.group, positive=False)

    @timed("solving")
    def contract(self, roles: Roles) -> Roles:
        """Return ``schedule_contract``: the roles with the steps of the sunk statements."""
        s = self.skeleton
        solved = s and _contract(s.form, s.facts, roles)
        if solved:
            self.reused += 1
            return solved
        return schedule_contract(self.group, roles, self.dependences.under(context(self.group)))[0]

    @timed("solving")
    def nest(self) -> NestSchedule:
        """Return ``schedule_nest``; a group that no pattern fuses is scheduled without its skeleton."""
        s = self.skeleton
        solved = s and _nest(s.form, s.facts)
        if solved and not solved.notes:
            self.reused += 1
            return solved
        return schedule_nest(self.group, self.dependences.under(context(self.group)))


def attempt(f: Callable[[], _T]) -> _T | None:
    """Return the result of ``f``, or None if the skeleton is too general."""
    try:
        return f()
    except (LegalityError, ScheduleError):
        return None


def dependences_of(form: Form, facts: Facts) -> Dependences:
    """Return the dependences of a skeleton, under its facts, for sizes >= 0."""
    return analyse(accesses(form).group(), facts, positive=False)


@lru_cache(maxsize=512)
def _contract(form: Form, facts: Facts, roles: Roles) -> Roles | None:
    def f() -> Roles:
        group = form.group()
        return schedule_contract(group, roles, dependences_of(form, facts).under(context(group)))[0]

    return attempt(f)


@lru_cache(maxsize=512)
def _nest(form: Form, facts: Facts) -> NestSchedule | None:
    group = form.group()
    return attempt(lambda: schedule_nest(group, dependences_of(form, facts).under(context(group))))
