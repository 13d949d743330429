"""Tile space: schedule trees whose tile counts and tile sizes are parameters, so that one tree serves every tile.

Two tree shapes for the CPU. *Contract*: matmul-like groups (TSCompiler 5.2) with register tiles; sunk statements stay
in the register-tile band, guarded by first and last reduction tile (the ``?`` solution ``K-1`` read at tile level).
*Nest*: element-wise and stitch groups; a coincident band, then phases one after another.

Coordinates: ``b_x`` block of tiles (task), ``c_x`` register tile, ``p_x`` point inside it; ``B_x``, ``C_x``, ``P_x``
their extents. Batch and further reduction iterators keep their names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from polydyn.schedules.expr import Load, Value, transform
from polydyn.schedules.index import Index
from polydyn.schedules.isl_util import between
from polydyn.schedules.model import Array, Group, Statement, row_major
from polydyn.schedules.tree import Band, Leaf, Mark, TileStatement, Tree, sequence


@dataclass(frozen=True)
class Roles:
    """What the iterators of a matmul-like group are for.

    ``batch``: parallel, in both operands or in neither alone; ``row``: broadcast side (register rows), ``col``: vector
    side; ``block``: the reduction that is blocked; ``inner``: further reductions, run inside the block. ``sunk``: where
    the solved schedule matrix puts statements that do not reduce, ``first`` or ``last`` reduction step.
    """

    batch: tuple[str, ...]
    row: str
    col: str
    block: str
    inner: tuple[str, ...]
    sunk: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class TiledGroup:
    """A tree over tile-space statements; ``coincident`` names the coordinates that form the task band.

    Extents of iterators are parameters too (``E_x``, what they stand for is in ``extents``), so that groups of one form
    share one tree and one isl AST.
    """

    tree: Tree
    statements: tuple[TileStatement, ...]
    params: tuple[str, ...]
    coincident: tuple[str, ...]
    extents: dict[str, Index]

    def coordinates(self) -> dict[str, tuple[str, ...]]:
        """Statement -> its coordinates."""
        return {s.name: s.coords for s in self.statements}


@dataclass(frozen=True)
class AttentionParts:
    """The statements of an attention group: scores (contraction), rows (stitch), values (contraction).

    ``phases``: of the rows' statements; ``schedule.schedule_attention`` fills them in from the solved matrix.
    """

    scores: Group
    score_roles: Roles
    rows: Group
    row_prefix: tuple[str, ...]
    phases: dict[str, int]
    values: Group
    value_roles: Roles


def unfold(group: Group, batch: tuple[str, ...], role: str = "rows") -> Group:
    """The group with rows of the current block (role ``rows``) as arrays of all rows of all batches, of ``role``."""
    extents = {n: e for s in group.statements for n, e in s.iters}
    front = tuple(Index.of(x) for x in batch)
    folded = {n for n, a in group.arrays.items() if a.role == "rows"}
    arrays = dict(group.arrays)
    for n in folded:
        shape = (*(extents[x] for x in batch), *arrays[n].shape)
        arrays[n] = Array(n, arrays[n].dtype, shape, role, row_major(shape))

    def value(v: Value) -> Value:
        return replace(v, index=(*front, *v.index)) if isinstance(v, Load) and v.buffer in folded else v

    statements = tuple(
        replace(s, index=(*front, *s.index) if s.array in folded else s.index, value=transform(s.value, value))
        for s in group.statements
    )
    return replace(group, arrays=arrays, statements=statements)


def attention_tree(parts: AttentionParts, promote: bool) -> TiledGroup:
    """The CPU tree of an attention group: blocks of rows are tasks; inside, scores, rows, values one after another.

    Coordinates as in ``contract_tree``, without reduction blocks; ``p_i`` also counts the rows of the stitch.
    Scores have the suffix ``1`` in their column coordinates, values ``2``.
    """
    batch = parts.score_roles.batch
    named = {f"E_{n}": dict(_accumulation(parts.scores).iters)[n] for n in batch}
    block = (*batch, "b_i", "c_i")
    bounds = {n: Index.of(f"E_{n}") for n in batch}
    bounds |= {"b_i": Index.of("B_i"), "c_i": Index.of("C_i"), "p_i": Index.of("P_i")}
    statements: list[TileStatement] = []

    def add(name: str, coords: tuple[str, ...]) -> str:
        statements.append(TileStatement(name, coords, tuple(c for x in coords for c in between(0, x, bounds[x]))))
        return name

    def micro(group: Group, roles: Roles, n: int) -> tuple[list[str], Tree]:
        extents = dict(_accumulation(group).iters)
        reduction = (f"p_k{n}", *roles.inner)
        bounds.update({f"c_j{n}": Index.of(f"C_j{n}"), f"p_j{n}": Index.of(f"P_j{n}"), f"p_k{n}": Index.of(f"P_k{n}")})
        bounds.update({x: Index.of(f"E_{x}") for x in roles.inner})
        named.update({f"E_{x}": extents[x] for x in roles.inner})
        point, ij = ("p_i", f"p_j{n}"), Band(("p_i", f"p_j{n}"))
        tile = (*block, f"c_j{n}")
        init, acc = add(f"INIT{n}", (*tile, *point)), add(f"ACC{n}", (*tile, *reduction, *point))
        done = [add(f"DONE{n}_{k}", (*tile, *point)) for k, _ in enumerate(_epilogues(group))]
        body = sequence((init, ij), (acc, Mark("reduce", Band(reduction, ij))), *((d, ij) for d in done))
        return [init, acc, *done], Band((f"c_j{n}",), Mark(f"micro{n}", body))

    first, first_tree = micro(parts.scores, parts.score_roles, 1)
    for x, e in ((x, e) for s in parts.rows.statements for x, e in s.iters):
        if x not in parts.row_prefix:
            bounds[x] = Index.of(f"E_{x}")
            named[f"E_{x}"] = e
    children: list[tuple[list[str], Tree]] = []
    for stage in stages(parts.rows, parts.row_prefix, parts.phases):
        inner = inner_iterators(stage[0], parts.row_prefix)
        names = [add(f"ROW_{s.name}", (*block, "p_i", *inner)) for s in stage]
        leaf: Tree = sequence(*((n, Leaf()) for n in names)) if len(names) > 1 else Leaf()
        children.append((names, Mark("stage", Band(inner, leaf)) if inner else leaf))
    row_names = [n for names, _ in children for n in names]
    rows = Mark("rows", Band(("p_i",), Mark("row", sequence(*children))))
    second, second_tree = micro(parts.values, parts.value_roles, 2)
    body: Tree = Mark("block", sequence((first, first_tree), (row_names, rows), (second, second_tree)))
    body = Band(("c_i",), body)
    if promote:
        inner = parts.score_roles.inner
        bounds |= {"v": Index.of("V_j"), "a_k": Index.of("P_k1"), "lane": Index.of("W")}
        everything = [s.name for s in statements]
        pack = add("PACK", (*batch, "b_i", "v", "a_k", *inner, "lane"))
        body = sequence((pack, Mark("promote", Band(("v", "a_k", *inner, "lane")))), (everything, body))
    tiles = ("B_i", "C_i", "P_i", "C_j1", "P_j1", "P_k1", "C_j2", "P_j2", "P_k2")
    params = (*named, *tiles, *(("V_j", "W") if promote else ()))
    tree = Mark("task", Band((*batch, "b_i"), Mark("share", body)))
    return TiledGroup(tree, tuple(statements), params, (*batch, "b_i"), named)


def _accumulation(group: Group) -> Statement:
    return next(s for s in group.statements if s.reduce)


def _epilogues(group: Group) -> list[Statement]:
    return [s for s in group.statements if s.role == "epilogue"]


def inner_iterators(s: Statement, prefix: tuple[str, ...]) -> tuple[str, ...]:
    """The iterators below the shared prefix."""
    return s.iterators[len(prefix) :]


def stages(group: Group, prefix: tuple[str, ...], phases: dict[str, int]) -> list[list[Statement]]:
    """Statements that share loops: by phase, then by inner iterators, initialisers first, in the original order."""
    out: list[list[Statement]] = []
    for phase in sorted(set(phases.values())):
        members = [s for s in group.statements if phases[s.name] == phase]
        members.sort(key=lambda s: s.role != "init")
        for s in members:
            inner = inner_iterators(s, prefix)
            if out and out[-1][0] in members and inner_iterators(out[-1][0], prefix) == inner:
                out[-1].append(s)
            else:
                out.append([s])
    return out


