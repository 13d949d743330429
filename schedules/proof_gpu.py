"""Proof of the GPU's tree of matmul-like groups, for the tile that a binary is built for (``gpu_tiling``).

For every size of every dim, 0 included: the grid carries no dependence; every instance runs exactly once, in an order
that respects every dependence; units (threads, or warps with their fragments) share no element of the sums; what a unit
reads from shared memory was copied there for the same tile of the reduction, and what it reads from registers was
loaded in the same step; a copied tile holds all that is read of it. Padded points (the GPU pads, DietCode's local
padding) accumulate into registers that nothing stores, and along the reduction they add a product of two zeros.

Several reductions are one linear reduction here, their mixed radix. Not proven: the ring of stages and its barriers
(the pass ``pipeline``), the shares of a split reduction (``balance``), swizzled addresses and the lanes' layout of
fragments (the emulation runs them).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import islpy as isl

from polydyn.schedules.dependence import Dependences, analyse
from polydyn.schedules.errors import LegalityError, ScheduleError
from polydyn.schedules.expr import Op
from polydyn.schedules.gpu_flow import Storage
from polydyn.schedules.index import ZERO, Index, IndexLike, product
from polydyn.schedules.isl_util import below, between, pair
from polydyn.schedules.model import Group
from polydyn.schedules.polyhedra import read_accesses, statement_frame
from polydyn.schedules.proof import bind_tiles, check_band
from polydyn.schedules.skeleton import Form, check_instance, skeleton
from polydyn.schedules.tiling import Roles, TiledGroup
from polydyn.schedules.tree import TileStatement, Tree, to_isl
from polydyn.schedules.verify import Coordinate, check_parallel, check_tree, expansion
from polydyn.schedules.witness import dependence_error

STEP = "step"
"""The linear reduction."""
SLAB, STAGED = 32, 16
"""Columns and rows of the sums that a warp has in shared memory at a time, on their way to the epilogues."""


def staged(row: IndexLike) -> Index:
    """Where a row of a fragment lies among the staged ones, so that neither writing nor reading meets in a bank: the
    last three bits reversed.
    """
    r = Index.of(row)
    return r // 8 * 8 + r % 2 * 4 + r % 4 // 2 * 2 + r % 8 // 4


def unstaged(place: IndexLike) -> Index:
    """The row of a fragment that lies there: reversed again."""
    return staged(place)


@dataclass(frozen=True)
class GpuTiles:
    """Sizes of one binary along rows (i), columns (j) and reduction steps (k).

    ``units``, ``fragments``, ``points``: extents of ``w_x``, ``f_x``, ``p_x`` for i and j; ``steps``: of ``f_k`` and
    ``p_k``; ``loads``: of ``g_i``, ``g_j``. ``copied``: rows, columns and steps of the tiles in shared memory.
    ``interleaved``: neighbouring units have neighbouring rows and columns (their points are single elements).
    """

    units: tuple[int, int]
    fragments: tuple[int, int]
    points: tuple[int, int]
    steps: tuple[int, int]
    loads: tuple[int, int]
    copied: tuple[int, int, int]
    interleaved: bool

    def block(self, axis: int) -> int:
        """Rows (0) or columns (1) of a block."""
        return self.units[axis] * self.fragments[axis] * self.points[axis]

    @property
    def block_steps(self) -> int:
        """Reduction steps of a tile."""
        return self.steps[0] * self.steps[1]

    def place(self, axis: int) -> Index:
        """The row or column of a point inside its block."""
        x = "ij"[axis]
        w, f, p = (Index.of(f"{c}_{x}") for c in "wfp")
        if self.interleaved:
            return f * self.units[axis] + w
        return (w * self.fragments[axis] + f) * self.points[axis] + p

    def extents(self) -> dict[str, Index]:
        """Tile-space parameters that are constants."""
        sizes: dict[str, int] = {"F_k": self.steps[0], "P_k": self.steps[1], "S_k": self.copied[2]}
        for a, x in enumerate("ij"):
            sizes |= {f"W_{x}": self.units[a], f"F_{x}": self.fragments[a], f"P_{x}": self.points[a]}
            sizes |= {f"G_{x}": self.loads[a], f"S_{x}": self.copied[a]}
        # staged rows; an access of several columns is so many points
        sizes |= {"E_s": self.fragments[1] * self.points[1] // SLAB, "E_f": SLAB // self.points[1]}
        sizes |= {"E_i": STAGED, "E_j": SLAB, "E_v": 1}
        return {n: Index.of(v) for n, v in sizes.items()}


def check_tile(tiles: GpuTiles) -> None:
    """The cheap test of one more tile of a tree whose form is proven: LegalityError when the tile is not whole.

    The grid carries no dependence along rows and columns, every accumulation of an element is one unit's, and the
    reduction is cut in order, so any sizes are legal that cover a block: units, fragments and points make up the tile
    in shared memory, and loads of fragments divide the fragments. Every tile that is emitted is proven besides.
    """
    for a, x in enumerate("ij"):
        if tiles.block(a) != tiles.copied[a]:
            raise LegalityError(
                f"a block has {tiles.block(a)} of {x}, {tiles.copied[a]} are copied", rule="whole tiles"
            )
        if tiles.fragments[a] % tiles.loads[a]:
            raise LegalityError(
                f"{tiles.loads[a]} loads do not divide {tiles.fragments[a]} fragments of {x}", rule="whole tiles"
            )
        if tiles.interleaved and (tiles.points[a] != 1 or tiles.loads[a] != tiles.fragments[a]):
            raise LegalityError(f"interleaved units have single points along {x}", rule="whole tiles")
    if tiles.block_steps != tiles.copied[2]:
        raise LegalityError(f"a tile has {tiles.block_steps} steps, {tiles.copied[2]} are copied", rule="whole tiles")
    if min(*tiles.units, *tiles.fragments, *tiles.points, *tiles.steps, *tiles.loads) < 1:
        raise LegalityError(f"sizes of {tiles} must be positive", rule="whole tiles")


def prove_gpu_contract(group: Group, roles: Roles, tiled: TiledGroup, tiles: GpuTiles) -> None:
    """The tree computes the group for these tiles; made once for all groups of one skeleton.

    LegalityError with a witness otherwise; ScheduleError: an epilogue reads the sums at another place.
    """
    check_neutral(group)
    s = skeleton(group)
    if s is None:
        raise ScheduleError(f"{group.name} writes at positions known only at run time", node=group.name)
    check_instance(s, group)
    extents = {n: s.lift(e) for n, e in tiled.extents.items()}
    if {n: s.lower(e) for n, e in extents.items()} != tiled.extents:
        raise ScheduleError(f"extents {tiled.extents} are not those of the group", node=group.name)
    names = tiled.coincident
    _prove(s.form, roles, tiled.tree, tiled.statements, tiled.params, names, tuple(extents.items()), tiles)


@lru_cache(maxsize=256)
def _prove(
    form: Form, roles: Roles, tree: Tree, statements: tuple[TileStatement, ...], params: tuple[str, ...],
    coincident: tuple[str, ...], extents: tuple[tuple[str, Index], ...], tiles: GpuTiles,
) -> None:  # fmt: skip
    group = linear(form.group(), roles)
    tiled = TiledGroup(tree, statements, params, coincident, dict(extents))
    deps = analyse(group, positive=False)
    check_band(group, deps, (*roles.batch, roles.row, roles.col))
    acc = next(s for s in group.statements if s.reduce)
    sizes = dict(acc.iters)
    blocks = {"B_i": (sizes[roles.row], tiles.block(0)), "B_j": (sizes[roles.col], tiles.block(1))}
    blocks["B_k"] = sizes[STEP], tiles.block_steps
    bound = {**tiled.extents, **tiles.extents(), **{n: e.ceildiv(b) for n, (e, b) in blocks.items()}}
    places = [Index.of(f"b_{x}") * tiles.block(a) + tiles.place(a) for a, x in enumerate("ij")]
    if any(s.name == "STAGE" for s in statements):
        row = (Index.of("w_i") * tiles.fragments[0] + "f_i") * STAGED + unstaged("e_i")
        column = Index.of("w_j") * (tiles.fragments[1] * tiles.points[1]) + Index.of("e_s") * SLAB + "e_j" + "e_v"
        places = [Index.of("b_i") * tiles.block(0) + row, Index.of("b_j") * tiles.block(1) + column]
    live = [below(places[0], sizes[roles.row]), below(places[1], sizes[roles.col])]
    own = {s.name: s for s in tiled.statements if s.name in {x.name for x in group.statements}}
    exact = [
        replace(s, conditions=(*s.conditions, *(live if group.statement(s.name).role == "epilogue" else ())))
        for s in own.values()
    ]
    helpers = [s for s in tiled.statements if s.name not in own]
    bound_statements, names, ctx = bind_tiles(group, tiled, [*exact, *helpers], bound, ())
    schedule = to_isl(tiled.tree, bound_statements, names)
    table = _coordinates(roles, tiles)
    images = expansion(group, {n: [table[c] for c in s.coords] for n, s in own.items()})
    order = check_tree(group, deps, images, schedule, ctx, padded=("INIT", acc.name))
    check_parallel(group, deps.under(ctx), order, range(len(tiled.coincident)))
    check_units(group, deps, table, ctx)
    _storage(tiled.tree, bound_statements, names, ctx, tiles, roles).check()


def check_neutral(group: Group) -> None:
    """Padded steps change no sum: it is one of products, and copies put zeros into both operands' tiles there."""
    acc = next(s for s in group.statements if s.reduce)
    v = acc.value
    if acc.reduce != "sum" or not (isinstance(v, Op) and v.name == "mul"):
        raise LegalityError(
            f"padding is not neutral for {acc.name}: it is no sum of products of two operands",
            node=acc.name, rule="neutral fill",
        )  # fmt: skip


def linear(group: Group, roles: Roles) -> Group:
    """The group with its reductions as one; ScheduleError when something besides inputs depends on the single ones."""
    acc = next(s for s in group.statements if s.reduce)
    extents = dict(acc.iters)
    parts = (roles.block, *roles.inner)
    for a in (acc.write, *(a for a in read_accesses(acc) if a.array != "outside")):
        if any(i.symbols() & set(parts) for i in a.index):
            raise ScheduleError(f"{acc.name} meets {a.array} at a reduction step", node=acc.name, tensor=a.array)
    size = product(extents[x] for x in parts)
    params = group.params
    if size.constant is None and not size.is_symbol:  # a product of parameters has no affine form
        size, params = Index.of("steps"), (*group.params, "steps")
    iters = (*((x, e) for x, e in acc.iters if x not in parts), (STEP, size))
    one = replace(acc, iters=iters)
    return replace(group, params=params, statements=tuple(one if s is acc else s for s in group.statements))


def _coordinates(roles: Roles, tiles: GpuTiles) -> dict[str, Coordinate | IndexLike]:
    """Coordinate -> what it is for an instance of the group."""
    out: dict[str, Coordinate | IndexLike] = {x: x for x in roles.batch}
    for a, (x, it) in enumerate((("i", roles.row), ("j", roles.col))):
        out[f"b_{x}"] = Coordinate(it, tiles.block(a))
        if tiles.interleaved:
            out[f"w_{x}"], out[f"f_{x}"] = Coordinate(it, 1, tiles.units[a]), _level(it, tiles.units[a], tiles, a)
            out[f"p_{x}"] = ZERO
        else:
            inner = tiles.fragments[a] * tiles.points[a]
            out[f"w_{x}"] = Coordinate(it, inner, tiles.units[a])
            out[f"f_{x}"], out[f"p_{x}"] = _level(it, tiles.points[a], tiles, a), Coordinate(it, 1, tiles.points[a])
    out["e_i"], out["e_v"] = staged(Index.of(roles.row) % STAGED), ZERO
    out["e_s"] = Coordinate(roles.col, SLAB, max(1, tiles.fragments[1] * tiles.points[1] // SLAB))
    out["e_j"] = Coordinate(roles.col, 1, SLAB)
    out["b_k"] = Coordinate(STEP, tiles.block_steps)
    out["f_k"], out["p_k"] = Coordinate(STEP, tiles.steps[1], tiles.steps[0]), Coordinate(STEP, 1, tiles.steps[1])
    return out


def _level(it: str, divide: int, tiles: GpuTiles, axis: int) -> Coordinate:
    return Coordinate(it, divide, tiles.fragments[axis])


def check_units(
    group: Group, deps: Dependences, table: dict[str, Coordinate | IndexLike], ctx: isl.Set
) -> None:
    """Units of a block run at once between barriers: no dependence may lead from one to another."""
    units = [c.expr() if isinstance(c, Coordinate) else Index.of(c) for c in (table["w_i"], table["w_j"])]
    needed = frozenset(x for u in units for x in u.symbols())
    known = [x for x in group.statements if needed <= {*x.iterators}]
    of = {x.name: statement_frame(group, x).map_to("", units) for x in known}
    for m in deps.strict_pairs:
        s, t = pair(m)
        bad = m.subtract(of[s].apply_range(of[t].reverse())) if s in of and t in of else m
        bad = bad.intersect_params(ctx)
        if not bad.is_empty():
            raise dependence_error("two units meet one element", bad, group, ctx)


def _storage(
    tree: Tree, statements: list[TileStatement], names: tuple[str, ...], ctx: isl.Set, tiles: GpuTiles, roles: Roles
) -> Storage:
    """Sums and fragments belong to a unit, tiles in shared memory to the block, staged rows to a unit and a slab."""
    t, flow = tiles, Storage(tree, statements, names, ctx)
    block = (*roles.batch, "b_i", "b_j")
    tile, step_of = (*block, "b_k"), (*block, "b_k", "f_k")
    flow.epoch = {"tile_a": tile, "tile_b": tile, "a_frag": step_of, "b_frag": step_of, "acc": block}
    flow.epoch["stage"] = (*block, "w_i", "w_j", "f_i", "e_s")
    unit, cell = ("w_i", "w_j"), ("w_i", "w_j", "f_i", "f_j", "p_i", "p_j")
    flow.writes("COPY_A", "tile_a", ("s_i", "s_k"))
    flow.writes("COPY_B", "tile_b", ("s_k", "s_j"))
    step = Index.of("f_k") * t.steps[1] + "k"
    for a, x in enumerate("ij"):
        name, load = "ab"[a], f"FRAG_{'AB'[a]}"
        flow.writes(load, f"{name}_frag", (*unit, f"g_{x}"))
        rows = _loaded(t, a)
        inside = [*between(0, "k", t.steps[1]), *between(0, "r", t.block(a) // (t.units[a] * t.loads[a]))]
        flow.reads(load, f"tile_{name}", (rows, step) if a == 0 else (step, rows), ("r", "k"), inside)
        flow.reads("ACC", f"{name}_frag", (*unit, Index.of(f"f_{x}") // (t.fragments[a] // t.loads[a])))
    flow.writes("INIT", "acc", cell)
    flow.updates("ACC", "acc", cell)
    done = [n for n in flow.coords if n.startswith("DONE")]
    if "STAGE" not in flow.coords:
        for n in done:
            flow.reads(n, "acc", cell)
        return flow
    column = Index.of("e_f") * t.points[1] + "p_j"
    fragment = Index.of("e_s") * (SLAB // t.points[1]) + "e_f"
    flow.reads("STAGE", "acc", (*unit, "f_i", fragment, "p_i", "p_j"))
    flow.writes("STAGE", "stage", (*unit, "p_i", column))
    for n in done:
        flow.reads(n, "stage", (*unit, unstaged("e_i"), Index.of("e_j") + "e_v"))
    return flow


def _loaded(t: GpuTiles, axis: int) -> Index:
    """The row or column ``r`` that a load of fragments takes from the tile."""
    x = "ij"[axis]
    load, unit = Index.of(f"g_{x}"), Index.of(f"w_{x}")
    if t.interleaved:
        return load * t.units[axis] + unit
    wide = t.fragments[axis] * t.points[axis]
    return unit * wide + load * (wide // t.loads[axis]) + "r"
