"""Proof of the GPU's tree of matmul-like groups, for the tile that a binary is built for (``gpu_tiling``).

For every size of every dim, 0 included: the grid carries no dependence; every instance runs exactly once, in an order
that respects every dependence; units (threads, or warps with their fragments) share no element of the sums; what a unit
reads from shared memory was copied there for the same tile of the reduction, and what it reads from registers was
loaded in the same step; a copied tile holds all that is read of it. Padded points (the GPU pads, DietCode's local
padding) accumulate into registers that nothing stores, and along the reduction they add a product of two zeros.

Several reductions are one linear reduction here, their mixed radix. Not proven: the ring of stages and its barriers
(the pass ``pipeline``), swizzled addresses and the lanes' layout of fragments (the emulation runs them).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import islpy as isl

from polydyn.schedules.dependence import Dependences, analyse
from polydyn.schedules.errors import LegalityError, ScheduleError
from polydyn.schedules.expr import Op
from polydyn.schedules.index import ZERO, Index, IndexLike, product
from polydyn.schedules.isl_util import (
    Condition,
    below,
    between,
    frame,
    maps,
    pair,
    union_maps,
)
from polydyn.schedules.model import Group
from polydyn.schedules.polyhedra import read_accesses, statement_frame
from polydyn.schedules.proof import bind_tiles, check_band
from polydyn.schedules.skeleton import Form, check_instance, skeleton
from polydyn.schedules.tiling import Roles, TiledGroup
from polydyn.schedules.tree import TileStatement, Tree, to_isl
from polydyn.schedules.verify import Coordinate, check_parallel, check_tree, expansion
from polydyn.schedules.witness import dependence_error, flow_error

STEP = "step"
"""The linear reduction."""


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
    _Flow(tiled.tree, bound_statements, names, ctx, tiles, roles).check()


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


class _Flow:
    """What shared memory and registers hold: every read has a source, and it is of the reader's own tile and step."""

    def __init__(
        self, tree: Tree, statements: list[TileStatement], names: tuple[str, ...], ctx: isl.Set, tiles: GpuTiles,
        roles: Roles,
    ) -> None:  # fmt: skip
        self.tree, self.statements, self.names, self.ctx, self.tiles = tree, statements, names, ctx, tiles
        self.coords = {s.name: s.coords for s in statements}
        block = (*roles.batch, "b_i", "b_j")
        self.epoch = {"tile_a": (*block, "b_k"), "tile_b": (*block, "b_k"), "a_frag": (*block, "b_k", "f_k"),
                      "b_frag": (*block, "b_k", "f_k"), "acc": block}  # fmt: skip

    def check(self) -> None:
        """LegalityError names the statement, the storage and one instance."""
        schedule = to_isl(self.tree, self.statements, self.names)
        domain = schedule.get_domain().intersect_params(self.ctx)
        order = schedule.get_map().intersect_domain(domain)
        reads, writes = (union_maps(self._accesses(w), self.names).intersect_domain(domain) for w in (False, True))
        flow = isl.UnionAccessInfo.from_sink(reads).set_must_source(writes).set_schedule_map(order).compute_flow()
        for m in maps(flow.get_must_no_source()):
            if not m.is_empty():
                s, array = pair(m)
                raise flow_error(f"{s} reads {array} where nothing was written", m, s, array, self.ctx)
        for m in maps(flow.get_full_must_dependence()):
            self._same_epoch(m)

    def _same_epoch(self, m: isl.Map) -> None:
        array, (s, t) = pair(m.range().unwrap())[1], (pair(m)[0], pair(m.range().unwrap())[0])
        edge = m.range_factor_domain()
        made, wanted = (
            frame(n, self.coords[n], self.names).map_to("", [Index.of(x) for x in self.epoch[array]]) for n in (s, t)
        )
        bad = edge.subtract(made.apply_range(wanted.reverse()))
        if not bad.is_empty():
            what = f"{t} reads {array} of another tile or step, which {s} wrote"
            raise flow_error(what, bad, f"{s} -> {t}", array, self.ctx)

    def _accesses(self, writes: bool) -> list[isl.Map]:
        """Instances -> cells. Sums and fragments belong to a unit; tiles in shared memory to the block."""
        t = self.tiles
        unit, cell = self._at("w_i", "w_j"), self._at("w_i", "w_j", "f_i", "f_j", "p_i", "p_j")
        done = [n for n in self.coords if n.startswith("DONE")]
        if writes:
            out = [self._map("COPY_A", "tile_a", self._at("s_i", "s_k")),
                   self._map("COPY_B", "tile_b", self._at("s_k", "s_j"))]  # fmt: skip
            out += [self._map(f"FRAG_{x}", f"{x.lower()}_frag", [*unit, Index.of(g)]) for x, g in _LOADS]
            return [*out, *(self._map(n, "acc", cell) for n in ("INIT", "ACC"))]
        step = Index.of("f_k") * t.steps[1] + "k"
        out = []
        for a, (x, _) in enumerate(_LOADS):
            rows = self._loaded(a)
            index = [rows, step] if x == "A" else [step, rows]
            inside = [*between(0, "k", t.steps[1]), *between(0, "r", t.block(a) // (t.units[a] * t.loads[a]))]
            out.append(self._map(f"FRAG_{x}", f"tile_{x.lower()}", index, ("r", "k"), inside))
            per = t.fragments[a] // t.loads[a]
            out.append(self._map("ACC", f"{x.lower()}_frag", [*unit, Index.of(f"f_{'ij'[a]}") // per]))
        return [*out, *(self._map(n, "acc", cell) for n in ("ACC", *done))]

    def _loaded(self, axis: int) -> Index:
        """The row or column ``r`` that a load of fragments takes from the tile."""
        t, x = self.tiles, "ij"[axis]
        load, unit = Index.of(f"g_{x}"), Index.of(f"w_{x}")
        if t.interleaved:
            return load * t.units[axis] + unit
        wide = t.fragments[axis] * t.points[axis]
        return unit * wide + load * (wide // t.loads[axis]) + "r"

    def _map(
        self, s: str, array: str, index: list[Index], more: tuple[str, ...] = (), inside: list[Condition] | None = None
    ) -> isl.Map:
        """Instances of ``s`` -> cells, for every value of the coordinates ``more``."""
        wide = frame(s, (*self.coords[s], *more), self.names)
        m = wide.map_to(array, index).intersect_domain(wide.where(inside or []))
        return m.apply_domain(wide.map_to(s, [Index.of(c) for c in self.coords[s]]))

    @staticmethod
    def _at(*names: str) -> list[Index]:
        return [Index.of(n) for n in names]


_LOADS = (("A", "g_i"), ("B", "g_j"))
