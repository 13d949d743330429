"""Parts of proofs other than the schedule's (``prove``): bands, rows, vector loops."""

from __future__ import annotations

from collections.abc import Sequence

import islpy as isl

from polydyn.schedules.errors import LegalityError
from polydyn.schedules.group.dependence import Dependences
from polydyn.schedules.group.polyhedra import read_accesses, statement_frame
from polydyn.schedules.group.witness import dependence_error
from polydyn.schedules.index import Index
from polydyn.schedules.isl_util import maps, pair
from polydyn.schedules.model import Group, Statement
from polydyn.schedules.proof.order import band_properties, check_parallel
from polydyn.schedules.tiling import inner_iterators, stages

# -- the parts of a proof --------------------------------------------------------------------------------------------


def check_band(group: Group, deps: Dependences, band: Sequence[str]) -> None:
    """Check that no dependence moves along any iterator of the band: every partition into tasks and tiles is legal."""
    rows = {s.name: [Index.of(x) for x in band] for s in group.statements}
    coincident, _ = band_properties(group, deps, {}, rows)
    if not all(coincident):
        check_parallel(group, deps, rows, range(len(band)))  # names the witness
        raise LegalityError(f"the band {tuple(band)} is not coincident: {coincident}", node=group.name)


def check_rows(group: Group, band: tuple[str, ...]) -> None:
    """Check that every access to a local stays in the row of its instance: its storage is one row, reused by the next.
    """
    row = tuple(Index.of(x) for x in band)
    for s in group.statements:
        for a in (s.write, *read_accesses(s)):
            if group.arrays[a.array].role == "local" and a.index[: len(band)] != row:
                raise LegalityError(
                    f"{s.name} touches {a.array}{list(a.index)} outside its own row {list(band)}",
                    node=s.name,
                    tensor=a.array,
                    rule="locals live in one row",
                )


def check_lanes(group: Group, deps: Dependences, band: tuple[str, ...], phases: dict[str, int]) -> None:
    """Check that innermost loops of a stage may run as vectors: they carry nothing except accumulations."""
    stage_of = {s.name: n for n, stage in enumerate(stages(group, band, phases)) for s in stage}
    carried = deps.flow.union(deps.anti).union(deps.output)
    for m in maps(carried):
        s, t = (group.statement(n) for n in pair(m))
        loops = inner_iterators(s, band)
        if not loops or stage_of[s.name] != stage_of[t.name]:
            continue
        live = m.intersect(_equal(group, s, t, (*band, *loops[:-1])))
        bad = live.subtract(_equal(group, s, t, loops[-1:])).intersect_params(deps.context)
        if not bad.is_empty():
            raise dependence_error(f"vector loop {loops[-1]} carries a dependence", bad, group, deps.context)


def _equal(group: Group, s: Statement, t: Statement, names: Sequence[str]) -> isl.Map:
    """Return the instances that agree in the named iterators."""
    rows = [statement_frame(group, x).map_to("", [Index.of(n) for n in names]) for x in (s, t)]
    return rows[0].apply_range(rows[1].reverse())
