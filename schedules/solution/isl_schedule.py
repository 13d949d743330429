"""isl's own scheduler as a pattern, for groups that no specific pattern fuses (docs/adr/0004-proofs.md).

isl looks for loops that all statements share without a dependence between their iterations. Of its result only the
outermost loops are used, as far as they are coincident and each runs one iterator of every statement, forwards or
backwards. Below them the statements run one after another in the original order. Skewed rows are dropped: trees have no
form for them, and isl tends to pipeline producers inside the band, at the price of its coincidence (docs/polyhedral.md
6). The work is bounded by a number of operations, not by time, so the result is deterministic. The matrix is proven
like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import islpy as isl

from polydyn.schedules.errors import ScheduleError
from polydyn.schedules.group.dependence import Dependences
from polydyn.schedules.group.polyhedra import domain
from polydyn.schedules.index import Index
from polydyn.schedules.isl_util import affine_pieces, child, limits, pair, split_rows
from polydyn.schedules.isl_util import maps as maps_of
from polydyn.schedules.model import Group, Statement

MAX_OPERATIONS = 500_000
"""Maximum number of isl operations for one group (about 0.2 s). A padded convolution takes a fifth to a tenth of it."""


def shared_loops(group: Group, deps: Dependences) -> dict[str, list[Index]]:
    """Return statement -> rows of the outermost coincident loops that isl finds.

    Each row is an iterator, or its mirror image, plus a constant or parameters. ScheduleError: isl needs more than
    ``MAX_OPERATIONS``, or there are no such loops.
    """
    constraints = (
        isl.ScheduleConstraints.on_domain(domain(group).intersect_params(deps.context))
        .set_context(deps.context)
        .set_validity(deps.strict)
        .set_coincidence(deps.strict)
        .set_proximity(deps.flow)
    )
    with _outer_coincidence(), limits(MAX_OPERATIONS):
        schedule = constraints.compute_schedule()
    band = child(schedule.get_root(), 0)
    if band.get_type() != isl.schedule_node_type.band:
        raise ScheduleError("isl's scheduler finds no loop that all statements share", node=group.name)
    rows = {pair(m)[0]: split_rows(m) for m in maps_of(band.band_get_partial_schedule_union_map())}
    out: dict[str, list[Index]] = {s.name: [] for s in group.statements}
    for d in range(band.band_n_member()):
        found = [_one_iterator(s, rows[s.name][d], out[s.name]) for s in group.statements if s.name in rows]
        loops = [e for e in found if e is not None]
        if not band.band_member_get_coincident(d) or len(loops) < len(out):
            break
        for s, e in zip(group.statements, loops, strict=True):
            out[s.name].append(e)
    if not any(out.values()):
        raise ScheduleError("isl's scheduler finds no parallel loop of single iterators", node=group.name)
    return out


def iterator_of(s: Statement, row: Index) -> str:
    """Return the iterator that a row runs."""
    (name,) = (x for x in s.iterators if x in row.symbols())
    return name


def _one_iterator(s: Statement, row: isl.Map, before: list[Index]) -> Index | None:
    """Return the row if it runs one iterator of the statement that no earlier row runs, else None."""
    pieces = affine_pieces(row, s.iterators)
    if len(pieces) != 1:
        return None
    (e,) = pieces
    used = [x for x in s.iterators if x in e.symbols()]
    if len(used) != 1 or abs(e.terms[(used[0],)]) != 1 or used[0] in {iterator_of(s, b) for b in before}:
        return None
    return e


@contextmanager
def _outer_coincidence() -> Iterator[None]:
    """Make isl prefer parallel outer loops inside the block."""
    c = isl.DEFAULT_CONTEXT
    before = c.get_schedule_outer_coincidence()
    c.set_schedule_outer_coincidence(1)
    try:
        yield
    finally:
        c.set_schedule_outer_coincidence(before)
