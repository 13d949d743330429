"""Legality errors with a witness: statements, array, the violated set, one sample point."""

from __future__ import annotations

from collections.abc import Iterable

import islpy as isl

from polydyn.schedules.errors import LegalityError
from polydyn.schedules.group.polyhedra import read_accesses
from polydyn.schedules.isl_util import pair, sample, sample_pair
from polydyn.schedules.model import Group


def dependence_error(message: str, bad: isl.Map, group: Group, context: isl.Set) -> LegalityError:
    """Return the error for dependences ``bad`` (source instance -> sink instance, not empty)."""
    s, t = pair(bad)
    source, sink, params = sample_pair(bad)
    arrays = ", ".join(_shared_arrays(group, s, t)) or None
    e = LegalityError(
        f"{message}: {s} -> {t}\n  violated: {bad.gist_params(context).coalesce()}\n"
        f"  for example {s}{source} before {t}{sink} at {params}",
        node=f"{s} -> {t}",
        tensor=arrays,
        remedy="this is a bug in polydyn; please report the group and the schedule",
    )
    e.violated = bad
    return e


def set_error(message: str, bad: isl.Set, statement: str, context: isl.Set, tensor: str | None = None) -> LegalityError:
    """Return the error for a non-empty set of instances or elements."""
    e = LegalityError(
        f"{message}: {statement}\n  violated: {bad.gist_params(context).coalesce()}\n  for example {sample(bad)}",
        node=statement,
        tensor=tensor,
        remedy="this is a bug in polydyn; please report the group and the schedule",
    )
    e.violated = bad
    return e


def flow_error(message: str, bad: isl.Map, node: str, tensor: str, context: isl.Set) -> LegalityError:
    """Return the error for a read in tile space that gets a wrong element.

    ``bad`` is not empty and relates two tuples.
    """
    (s, t), (source, sink, params) = pair(bad), sample_pair(bad)
    e = LegalityError(
        f"{message}\n  violated: {bad.gist_params(context).coalesce()}\n"
        f"  for example {s}{source} and {t}{sink} at {params}",
        node=node,
        tensor=tensor,
        rule="tile-space data flow",
    )
    e.violated = bad
    return e


def _shared_arrays(group: Group, s: str, t: str) -> Iterable[str]:
    touched = []
    for name in (s, t):
        x = next((x for x in group.statements if x.name == name), None)
        touched.append({a.array for a in (x.write, *read_accesses(x))} if x else set())
    written = {x.array for x in group.statements if x.name in (s, t)}
    return sorted(touched[0] & touched[1] & written)
