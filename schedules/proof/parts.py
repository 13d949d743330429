"""Parts of proofs besides that of a schedule (``prove``): bands, rows, vector loops; sizes of trees that are not yet
schedules (``proof_gpu_rows``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import islpy as isl

from polydyn.schedules.errors import LegalityError
from polydyn.schedules.group.dependence import Dependences
from polydyn.schedules.group.polyhedra import read_accesses, statement_frame
from polydyn.schedules.index import Atom, Index
from polydyn.schedules.isl_util import Condition, at_least, equals, frame, maps, pair, param_set
from polydyn.schedules.model import Group, Statement
from polydyn.schedules.proof.order import band_properties, check_parallel
from polydyn.schedules.proof.witness import dependence_error
from polydyn.schedules.tiling import TiledGroup, inner_iterators, stages
from polydyn.schedules.tree import TileStatement, bind_statement

# -- the parts of a proof --------------------------------------------------------------------------------------------


def check_band(group: Group, deps: Dependences, band: Sequence[str]) -> None:
    """No dependence moves along any iterator of the band: every partition of it into tasks and tiles is legal."""
    rows = {s.name: [Index.of(x) for x in band] for s in group.statements}
    coincident, _ = band_properties(group, deps, {}, rows)
    if not all(coincident):
        check_parallel(group, deps, rows, range(len(band)))  # names the witness
        raise LegalityError(f"the band {tuple(band)} is not coincident: {coincident}", node=group.name)


def bind_tiles(
    group: Group,
    tiled: TiledGroup,
    statements: Sequence[TileStatement],
    bound: Mapping[str, Index],
    cover: Sequence[Condition],
) -> tuple[list[TileStatement], tuple[str, ...], isl.Set]:
    """The statements with what is constant put in, the parameters that are left, what is known of them."""
    fixed = {n: v for n, v in bound.items() if v.is_polynomial}
    params = (*dict.fromkeys((*group.params, *(p for p in tiled.params if p not in fixed))),)
    ctx = param_set(params, [*cover, *(at_least(p, 0) for p in params)], positive=False)
    for name in bound.keys() - fixed.keys():
        if name in params:
            ctx = ctx.intersect(_binding(name, bound[name], params))
    return [bind_statement(s, fixed) for s in statements], params, ctx


def _binding(name: str, value: Index, params: tuple[str, ...]) -> isl.Set:
    """The parameters for which ``name`` has the value: quasi-affine, or the minimum or maximum of such."""
    atoms = [a for a in value.atoms() if isinstance(a, Atom) and a.kind in ("min", "max")]
    if not atoms:
        return param_set(params, [equals(name, value)], positive=False)
    (a,) = atoms
    out = isl.Set.empty(frame("", (), params).space.params())
    for x in a.args:
        beyond = [at_least(x, y) if a.kind == "max" else at_least(y, x) for y in a.args if y is not x]
        chosen = value.map_atoms(lambda b, x=x: x if b == a else Index({(b,): 1}))  # type: ignore[misc]
        out = out.union(param_set(params, [equals(name, chosen), *beyond], positive=False))
    return out


def check_rows(group: Group, band: tuple[str, ...]) -> None:
    """A local's storage is one row, reused by the next: every access stays in the row of its own instance."""
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
    """Innermost loops of a stage run as vectors: they carry nothing but accumulation, which may be reassociated."""
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
    """Instances that agree in the named iterators."""
    rows = [statement_frame(group, x).map_to("", [Index.of(n) for n in names]) for x in (s, t)]
    return rows[0].apply_range(rows[1].reverse())
