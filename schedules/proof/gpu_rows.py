"""Proofs of the GPU's other trees of matmul-like groups: for few rows, and for warpgroups (``gpu_tiling``).

For every size of every dim, 0 included, for a binary's tile. In the tree for few rows lanes share a reduction, so the
order of accumulation is free; what is proven instead is that every product is made once, into a register that is summed
for its own element and for no other. Not proven: the shuffles that sum, mbarriers (the emulation runs them).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import islpy as isl

from polydyn.schedules.errors import LegalityError, ScheduleError
from polydyn.schedules.expr import Op
from polydyn.schedules.group.dependence import Dependences, analyse
from polydyn.schedules.group.skeleton import Form, check_instance, skeleton
from polydyn.schedules.index import ZERO, Index, IndexLike
from polydyn.schedules.isl_util import Condition, below, between, frame, maps, pair
from polydyn.schedules.model import Group, Statement
from polydyn.schedules.proof.gpu_flow import Storage
from polydyn.schedules.proof.order import check_parallel, check_tree, expansion
from polydyn.schedules.proof.parts import bind_tiles, check_band
from polydyn.schedules.proof.witness import flow_error
from polydyn.schedules.tiling import Roles, TiledGroup
from polydyn.schedules.tree import TileStatement, Tree, to_isl
from polydyn.schedules.tree.gpu import SLAB, STAGED, staged

V = Index.of
Table = Mapping[str, IndexLike]


@dataclass(frozen=True)
class FewRows:
    """Sizes of a kernel for few rows: ``rows`` of a block, warps on ``columns`` and on ``steps``, lanes likewise.

    ``vector``: columns and steps of a lane's points.
    """

    rows: int
    warps: tuple[int, int]
    lanes: tuple[int, int]
    vector: tuple[int, int]

    @property
    def block(self) -> int:
        """Columns of a block."""
        return self.warps[0] * self.lanes[0] * self.vector[0]

    @property
    def steps(self) -> int:
        """Steps that all lanes of a column make at a time."""
        return self.warps[1] * self.lanes[1] * self.vector[1]

    def summed(self) -> tuple[tuple[IndexLike, ...], list[Condition]]:
        """Registers (``w_j l_j w_k l_k p_i p_j``) whose sum over ``wk`` and ``lk`` is element (``e_i``, ``e_j``)."""
        lane = V("e_j") // self.vector[0]
        cell = (lane // self.lanes[0], lane % self.lanes[0], "wk", "lk", "e_i", V("e_j") % self.vector[0])
        return cell, [*between(0, "wk", self.warps[1]), *between(0, "lk", self.lanes[1])]


@dataclass(frozen=True)
class Warpgroups:
    """Sizes of a warp-specialised kernel: ``rows`` of a warpgroup, their number, ``columns`` and ``steps`` of a tile.

    ``panels``: TMA boxes of the column operand; ``points``: steps of an instruction.
    """

    rows: int
    groups: int
    columns: int
    steps: int
    panels: int
    points: int = 16


def prove_few_rows(group: Group, roles: Roles, tiled: TiledGroup, sizes: FewRows) -> None:
    """``gpu_gemv_tree``: LegalityError with a witness when it does not compute the group."""
    _checked(_few_rows, group, roles, tiled, sizes)


def prove_warpgroups(group: Group, roles: Roles, tiled: TiledGroup, sizes: Warpgroups) -> None:
    """``gpu_wgmma_tree``, likewise."""
    _checked(_warpgroups, group, roles, tiled, sizes)


def check_neutral(group: Group) -> None:
    """Padded steps change no sum: it is one of products, and copies put zeros into both operands' tiles there."""
    acc = next(s for s in group.statements if s.reduce)
    v = acc.value
    if acc.reduce != "sum" or not (isinstance(v, Op) and v.name == "mul"):
        raise LegalityError(
            f"padding is not neutral for {acc.name}: it is no sum of products of two operands",
            node=acc.name, rule="neutral fill",
        )  # fmt: skip


def _checked(
    prove: Callable[..., None], group: Group, roles: Roles, tiled: TiledGroup, sizes: FewRows | Warpgroups
) -> None:
    """The proof on the group's skeleton, made once."""
    check_neutral(group)
    s = skeleton(group)
    if s is None:
        raise ScheduleError(f"{group.name} writes at positions known only at run time", node=group.name)
    check_instance(s, group)
    extents = tuple((n, s.lift(e)) for n, e in tiled.extents.items())
    prove(s.form, roles, tiled.tree, tiled.statements, tiled.params, tiled.coincident, extents, sizes)


@dataclass(frozen=True)
class _Bound:
    """A tree with a binary's sizes: what is left to prove is done by its methods."""

    group: Group
    roles: Roles
    tiled: TiledGroup
    deps: Dependences
    names: tuple[str, ...]
    ctx: isl.Set
    statements: list[TileStatement]
    images: isl.UnionMap

    def order(self, allow_reassociation: bool = False) -> None:
        """Every instance once, dependences forwards, none carried by the grid."""
        schedule = to_isl(self.tiled.tree, self.statements, self.names)
        padded = [s.name for s in self.group.statements if s.role != "epilogue"]
        found = check_tree(self.group, self.deps, self.images, schedule, self.ctx, padded, allow_reassociation)
        grid = range(len(self.tiled.coincident))
        check_parallel(self.group, self.deps.under(self.ctx), found, grid, allow_reassociation)

    def storage(self) -> Storage:
        """Its shared memory and registers."""
        return Storage(self.tiled.tree, self.statements, self.names, self.ctx)


def _bind(
    form: Form, roles: Roles, tiled: TiledGroup, sizes: Mapping[str, int], counts: Mapping[str, Index],
    live: Mapping[str, list[Condition]], table: Mapping[str, Table],
) -> _Bound:  # fmt: skip
    """``live``: what holds of an instance, by statement (or ``DONE``); ``table``: the original's coordinates."""
    group = form.group()
    deps = analyse(group, positive=False)
    check_band(group, deps, (*roles.batch, roles.row, roles.col))
    bound = {**tiled.extents, **{n: V(v) for n, v in sizes.items()}, **counts}

    def kind(name: str) -> str:
        return "DONE" if name.startswith("DONE") else name

    exact = [replace(s, conditions=(*s.conditions, *live.get(kind(s.name), ()))) for s in tiled.statements]
    statements, names, ctx = bind_tiles(group, tiled, exact, bound, ())
    own = {s.name: s.coords for s in tiled.statements if s.name in {x.name for x in group.statements}}
    batch = {x: V(x) for x in roles.batch}
    coords = {n: [{**batch, **table[kind(n)]}[c] for c in cs] for n, cs in own.items()}
    return _Bound(group, roles, tiled, deps, names, ctx, statements, expansion(group, coords))


@lru_cache(maxsize=64)
def _few_rows(
    form: Form, roles: Roles, tree: Tree, statements: tuple[TileStatement, ...], params: tuple[str, ...],
    coincident: tuple[str, ...], extents: tuple[tuple[str, Index], ...], t: FewRows,
) -> None:  # fmt: skip
    tiled = TiledGroup(tree, statements, params, coincident, dict(extents))
    acc = next(s for s in form.statements if s.reduce)
    of = dict(acc.iters)
    row, col, k = V(roles.row), V(roles.col), V(roles.block)
    sizes = {"W_j": t.warps[0], "W_k": t.warps[1], "L_j": t.lanes[0], "L_k": t.lanes[1], "E_i": t.rows,
             "E_j": t.block, "P_i": t.rows, "P_j": t.vector[0], "P_k": t.vector[1]}  # fmt: skip
    counts = {"B_i": of[roles.row].ceildiv(t.rows), "B_j": of[roles.col].ceildiv(t.block)}
    counts["B_k"] = of[roles.block].ceildiv(t.steps)
    lane = col % t.block // t.vector[0]
    share = k // t.vector[1] % (t.warps[1] * t.lanes[1])
    block: Table = {"b_i": row // t.rows, "b_j": col // t.block}
    point: Table = {"p_i": row % t.rows, "p_j": col % t.vector[0], "w_j": lane // t.lanes[0], "l_j": lane % t.lanes[0]}
    table: dict[str, Table] = {
        "INIT": {**block, **point, "w_k": ZERO, "l_k": ZERO},
        "ACC": {**block, **point, "w_k": share // t.lanes[1], "l_k": share % t.lanes[1], "b_k": k // t.steps,
                "p_k": k % t.vector[1]},
        "DONE": {**block, "e_i": row % t.rows, "e_j": col % t.block},
    }  # fmt: skip
    done = [below(V("b_i") * t.rows + "e_i", of[roles.row]), below(V("b_j") * t.block + "e_j", of[roles.col])]
    step = (V("b_k") * (t.warps[1] * t.lanes[1]) + V("w_k") * t.lanes[1] + "l_k") * t.vector[1] + "p_k"
    b = _bind(form, roles, tiled, sizes, counts, {"DONE": done, "ACC": [below(step, of[roles.block])]}, table)
    b.order(allow_reassociation=True)
    flow = b.storage()
    flow.epoch = {"acc": (*roles.batch, "b_i", "b_j")}
    cell = ("w_j", "l_j", "w_k", "l_k", "p_i", "p_j")
    flow.writes("INIT", "acc", cell)
    flow.updates("ACC", "acc", cell)
    summed, inside = t.summed()
    for s in b.statements:
        if s.name.startswith("DONE"):
            flow.reads(s.name, "acc", summed, ("wk", "lk"), inside)
    flow.check()
    for done_statement in (x for x in b.group.statements if x.role == "epilogue"):
        _sums(b, acc, done_statement, cell, summed, inside)


def _sums(
    b: _Bound, acc: Statement, done: Statement, cell: tuple[str, ...], summed: tuple[IndexLike, ...],
    inside: list[Condition],
) -> None:  # fmt: skip
    """An element's sum is over exactly the registers that its products went to."""
    coords = {s.name: s.coords for s in b.statements}
    images = {pair(m)[0]: m for m in maps(b.images)}
    block = tuple(c for c in coords[done.name] if c in (*b.roles.batch, "b_i", "b_j"))
    wide = frame(done.name, (*coords[done.name], "wk", "lk"), b.names)
    read = wide.map_to("", [*map(V, block), *map(Index.of, summed)]).intersect_domain(wide.where(inside))
    read = read.apply_domain(wide.map_to(done.name, [V(c) for c in coords[done.name]]))
    kept = frame(acc.name, coords[acc.name], b.names).map_to("", [V(c) for c in (*block, *cell)])
    made = images[acc.name].apply_range(kept)
    taken = images[done.name].apply_range(read)
    met = made.apply_range(taken.reverse())
    iterators = tuple(x for x in acc.iterators if x in done.iterators)
    same = [frame(s.name, s.iterators, b.group.params).map_to("", [V(x) for x in iterators]) for s in (acc, done)]
    right = same[0].apply_range(same[1].reverse()).intersect_domain(images[acc.name].domain())
    right = right.intersect_range(images[done.name].domain()).intersect_params(b.ctx)
    wrong = met.intersect_params(b.ctx).subtract(right)
    for bad, what in ((wrong, "of another element is summed for"), (right.subtract(met), "is not summed for")):
        if not bad.is_empty():
            raise flow_error(f"{acc.name} {what} {done.name}", bad, f"{acc.name} -> {done.name}", "acc", b.ctx)


@lru_cache(maxsize=64)
def _warpgroups(
    form: Form, roles: Roles, tree: Tree, statements: tuple[TileStatement, ...], params: tuple[str, ...],
    coincident: tuple[str, ...], extents: tuple[tuple[str, Index], ...], t: Warpgroups,
) -> None:  # fmt: skip
    tiled = TiledGroup(tree, statements, params, coincident, dict(extents))
    acc = next(s for s in form.statements if s.reduce)
    of = dict(acc.iters)
    row, col, k = V(roles.row), V(roles.col), V(roles.block)
    rows, warps = t.rows * t.groups, t.rows // STAGED
    sizes = {"W_i": rows // STAGED, "G_i": t.groups, "F_j": t.columns // 8, "P_i": STAGED, "P_j": 8, "Q_i": t.rows,
             "Q_j": t.columns, "F_k": t.steps // t.points, "P_k": t.points, "S_j": t.panels, "E_s": t.columns // SLAB,
             "E_f": SLAB // 8, "E_i": STAGED, "E_j": SLAB, "E_v": 1}  # fmt: skip
    counts = {"B_i": of[roles.row].ceildiv(rows), "B_j": of[roles.col].ceildiv(t.columns)}
    counts["B_k"] = of[roles.block].ceildiv(t.steps)
    block: Table = {"b_i": row // rows, "b_j": col // t.columns}
    warp: Table = {"w_i": row % rows // STAGED}
    table: dict[str, Table] = {
        "INIT": {**block, **warp, "f_j": col % t.columns // 8, "p_i": row % STAGED, "p_j": col % 8},
        "ACC": {**block, "b_k": k // t.steps, "g_i": row % rows // t.rows, "f_k": k % t.steps // t.points,
                "q_i": row % t.rows, "q_j": col % t.columns, "p_k": k % t.points},
        "DONE": {**block, **warp, "e_s": col % t.columns // SLAB, "e_i": staged(row % STAGED), "e_j": col % SLAB,
                 "e_v": ZERO},
    }  # fmt: skip
    at = V("b_i") * rows + V("w_i") * STAGED + staged("e_i"), V("b_j") * t.columns + V("e_s") * SLAB + "e_j" + "e_v"
    live = [below(at[0], of[roles.row]), below(at[1], of[roles.col])]
    b = _bind(form, roles, tiled, sizes, counts, {"DONE": live}, table)
    b.order()
    flow, whole = b.storage(), (*roles.batch, "b_i", "b_j")
    tile = (*whole, "b_k")
    flow.epoch = {"tile_a": tile, "tile_b": tile, "acc": whole, "stage": (*whole, "w_i", "e_s")}
    step, panel = between(0, "k", t.steps), t.columns // t.panels
    flow.writes("COPY_A", "tile_a", ("r", "k"), ("r", "k"), [*between(0, "r", rows), *step])
    flow.writes("COPY_B", "tile_b", (V("s_j") * panel + "r", "k"), ("r", "k"), [*between(0, "r", panel), *step])
    inner = V("f_k") * t.points + "p_k"
    flow.reads("ACC", "tile_a", (V("g_i") * t.rows + "q_i", inner))
    flow.reads("ACC", "tile_b", ("q_j", inner))
    flow.writes("INIT", "acc", ("w_i", "p_i", V("f_j") * 8 + "p_j"))  # registers are a warp's
    flow.updates("ACC", "acc", (V("g_i") * warps + V("q_i") // STAGED, V("q_i") % STAGED, "q_j"))
    flow.reads("STAGE", "acc", ("w_i", "p_i", V("e_s") * SLAB + V("e_f") * 8 + "p_j"))
    flow.writes("STAGE", "stage", ("w_i", "p_i", V("e_f") * 8 + "p_j"))
    for s in b.statements:
        if s.name.startswith("DONE"):
            flow.reads(s.name, "stage", ("w_i", staged("e_i"), V("e_j") + "e_v"))
    flow.check()

