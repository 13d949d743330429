"""Schedules made once for all groups with the same skeleton.

A model with hundreds of constant shapes has few skeletons. Where a skeleton has no schedule (it may need a
relation between constants) the group is scheduled as it is: what decides is a proof that covers the group.
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
from polydyn.schedules.solution.schedule import NestSchedule, schedule_contract, schedule_nest
from polydyn.schedules.tiling import Roles

_T = TypeVar("_T")
Facts = tuple[Condition, ...]


class Solver:
    """The schedule of one group. ``reused``: how often a skeleton's answer was valid."""

    def __init__(self, group: Group, reuse: bool = True) -> None:
        """``reuse``: False takes the group as it is, without its skeleton."""
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


def attempt(f: Callable[[], _T]) -> _T | None:
    """What ``f`` gives, None where the skeleton is too general."""
    try:
        return f()
    except (LegalityError, ScheduleError):
        return None


def dependences_of(form: Form, facts: Facts) -> Dependences:
    """Of a skeleton, under its facts, for sizes >= 0."""
    return analyse(form.group(), facts, positive=False)


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
