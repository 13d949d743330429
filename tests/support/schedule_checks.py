"""Checks schedule matrices against dependences, without a tree: for tests of solving and recognition."""

from __future__ import annotations

from collections.abc import Mapping

import islpy as isl

from polydyn.schedules.group.dependence import Dependences
from polydyn.schedules.group.polyhedra import rows_to_map
from polydyn.schedules.model import Group
from polydyn.schedules.proof.order import Rows, _check_order, _indices, _timeline


def check_legal(group: Group, deps: Dependences, schedule: Rows | isl.UnionMap) -> None:
    """Check by the proof for trees that every dependence runs strictly forwards. LegalityError otherwise."""
    union = rows_to_map(group, _indices(schedule)) if isinstance(schedule, Mapping) else schedule
    _check_order(group, deps.pairs, _timeline(group, union), deps.context)
