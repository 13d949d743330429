"""Translate witnesses of proofs to elements: read off the tile map what the digits of an example stand for."""

from __future__ import annotations

from collections.abc import Mapping

import islpy as isl

from polydyn.schedules.errors import LegalityError
from polydyn.schedules.index import ONE, ZERO
from polydyn.schedules.isl_util import pair, sample, sample_pair
from polydyn.schedules.tree.scheduled import Scheduled

_DIM = isl.dim_type
Point = tuple[str, Mapping[str, int]]
"""A statement and the digits of one of its instances."""


def in_elements(error: LegalityError, t: Scheduled) -> LegalityError:
    """Return the error with its example as elements too, at the schedule's own tile sizes if it occurs there.

    An error without instances of the schedule's digits is returned unchanged.
    """
    bad = error.violated
    if bad is None:
        return error
    own = _at_sizes(bad, t)
    points, sizes = _example(bad if own.is_empty() else own)
    known = [p for p in points if p[0] in t.map.views]
    if not known:
        return error
    said = "; ".join(f"{n} at {_place(t, n, values, sizes)}" for n, values in known)
    written = {f"w{k}": n for k, n in enumerate(dict.fromkeys(s.array for s in t.group.statements))}
    tensor = written.get(error.tensor or "", error.tensor)
    what = f"{error.message}\n  in elements: {said}"
    return LegalityError(
        what, node=error.node, tensor=tensor, dim=error.dim, rule=error.rule, remedy=error.remedy
    )  # fmt: skip


def _at_sizes(bad: isl.Map | isl.Set, t: Scheduled) -> isl.Map | isl.Set:
    """Restrict a violation to the tile sizes that are numbers."""
    for digits in t.map.axes.values():
        for d in digits:
            n = bad.find_dim_by_name(_DIM.param, f"size_{d.name}")
            if d.size.constant is not None and n >= 0:
                bad = bad.fix_val(_DIM.param, n, isl.Val(d.size.constant))
    return bad


def _example(bad: isl.Map | isl.Set) -> tuple[list[Point], Mapping[str, int]]:
    """Return the instances and sizes of one violation."""
    if isinstance(bad, isl.Set):
        values = sample(bad)
        return [(bad.get_tuple_name() or "", values)], values
    source, sink, sizes = sample_pair(bad)
    names = [[bad.get_dim_name(kind, n) or "" for n in range(bad.dim(kind))] for kind in (_DIM.in_, _DIM.out)]
    both = zip(pair(bad), names, (source, sink), strict=True)
    return [(s, dict(zip(ns, vs, strict=True))) for s, ns, vs in both], sizes


def _place(t: Scheduled, statement: str, values: Mapping[str, int], sizes: Mapping[str, int]) -> str:
    """Return the elements of the axes that the digits make up. Digits stand alone if an axis is only partly run."""
    elements: dict[str, int] = {}
    rest: dict[str, int] = {}
    for axis, digits in t.map.axes.items():
        run = [d for d in digits if d.name in values]
        if len(run) < len(digits):
            rest |= {d.name: values[d.name] for d in run}
            continue
        number, weight = ZERO, ONE
        for d in reversed(digits):
            number, weight = number + weight * values[d.name], weight * sizes.get(f"size_{d.name}", 1)
        elements[axis] = int(number)
    for axis, number in t.map.joined.items():
        parts = t.map.parts(axis)
        if elements.keys() >= set(parts):
            elements[axis] = number.evaluate(elements)
            elements = {n: x for n, x in elements.items() if n not in parts}
    of = {axis: name for (s, name), axis in t.map.iterators.items() if s == statement}
    named = {of.get(axis, axis): x for axis, x in elements.items()}
    return ", ".join(f"{n} = {x}" for n, x in (named | rest).items()) or "its only instance"
