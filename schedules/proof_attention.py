"""Proof of an attention kernel: scores, row stitch and values on blocks of rows compute the group.

The group as the kernel has it keeps ``scores`` and ``weights`` of the current rows only. The proof unfolds them to
arrays of all rows, proves the tree against that group, and then that the folded storage always holds the right row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from polydyn.schedules.dependence import Dependences, analyse
from polydyn.schedules.errors import ScheduleError
from polydyn.schedules.index import ZERO, Index, IndexLike
from polydyn.schedules.isl_util import Condition, at_least, below, param_set
from polydyn.schedules.model import Group, Statement
from polydyn.schedules.polyhedra import read_accesses
from polydyn.schedules.proof import bind_tiles, check_band, check_lanes, check_rows, check_tiles
from polydyn.schedules.tile_flow import SHARE, Accesses, ContractTiles, check_flow
from polydyn.schedules.tiling import AttentionParts, Roles, TiledGroup, inner_iterators, unfold
from polydyn.schedules.tree import TileStatement
from polydyn.schedules.verify import Coordinate


def prove_attention(
    group: Group, parts: AttentionParts, tiled: TiledGroup, tiles: tuple[ContractTiles, ContractTiles]
) -> None:
    """The tree of an attention group, for the kernel's register tiles and every size of every dim, 0 included."""
    batch, rows = parts.score_roles.batch, parts.row_prefix
    whole, deps = prove_row_blocks(group, parts)
    stitch = unfold(parts.rows, batch)
    check_lanes(stitch, analyse(stitch, positive=False), rows, parts.phases)
    sizes = _Sizes(parts, tiles)
    statements = [sizes.live(s) for s in tiled.statements]
    coords = {s.name: sizes.coordinates(s) for s in whole.statements}
    cover = [at_least(Index.of("B_i") * SHARE["i"] * tiles[0].rows, sizes.rows)]
    bound = {**tiled.extents, **sizes.bound}
    check_tiles(whole, deps, tiled, statements, coords, bound, cover)
    bound_statements, params, ctx = bind_tiles(whole, tiled, statements, bound, cover)
    check_flow(tiled.tree, bound_statements, params, ctx.intersect(param_set(params)), sizes.accesses(whole, tiled))


def prove_row_blocks(group: Group, parts: AttentionParts) -> tuple[Group, Dependences]:
    """Any partition of the rows into blocks is legal: no dependence moves along them, no statement reads other rows.

    Returns the group with arrays of all rows, its statements named as in the tree, and its dependences.
    """
    batch, rows = parts.score_roles.batch, parts.row_prefix
    whole = _tile_names(unfold(group, batch, "local"), parts)
    deps = analyse(whole, positive=False)
    check_band(whole, deps, rows)
    check_rows(unfold(parts.rows, batch, "local"), rows)
    return whole, deps


def _tile_names(group: Group, parts: AttentionParts) -> Group:
    """The group with its statements named as in the tree."""

    def name(s: str) -> str:
        part, _, rest = s.partition("_")
        if part not in ("A", "B"):
            return f"ROW_{s}"
        n = "1" if part == "A" else "2"
        return f"DONE{n}_{rest[4:]}" if rest.startswith("DONE") else rest + n

    return replace(group, statements=tuple(replace(s, name=name(s.name)) for s in group.statements))


class _Sizes:
    """Register tiles and what the coordinates of the tree stand for."""

    def __init__(self, parts: AttentionParts, tiles: tuple[ContractTiles, ContractTiles]) -> None:
        self.parts, self.tiles = parts, tiles
        self.roles = {"1": parts.score_roles, "2": parts.value_roles}
        extents = {n: dict(next(s for s in g.statements if s.reduce).iters) for n, g in
                   (("1", parts.scores), ("2", parts.values))}  # fmt: skip
        self.extents = extents
        self.rows = extents["1"][parts.score_roles.row]
        self.bound: dict[str, Index] = {"P_i": Index.of(tiles[0].rows), "C_i": Index.of(SHARE["i"])}
        for n, t in zip("12", tiles, strict=True):
            columns = extents[n][self.roles[n].col]
            self.bound |= {f"P_j{n}": Index.of(t.columns), f"C_j{n}": columns.ceildiv(t.columns)}
            self.bound[f"P_k{n}"] = extents[n][self.roles[n].block]
        width = tiles[0].width
        self.bound |= {"W": Index.of(width), "V_j": extents["1"][self.roles["1"].col].ceildiv(width)}

    def part(self, statement: str) -> str:
        """``1`` for scores, ``2`` for values, empty for the rows."""
        return "" if statement.startswith("ROW_") else statement.partition("_")[0][-1]

    def column(self, n: str) -> Index:
        """The column of an instance of scores or values."""
        return Index.of(f"c_j{n}") * self.tiles[int(n) - 1].columns + f"p_j{n}"

    def live(self, s: TileStatement) -> TileStatement:
        """The statement on the live part of its tiles, which is what exact loops and masks leave."""
        conditions: list[Condition] = []
        if "p_i" in s.coords:
            row = (Index.of("b_i") * SHARE["i"] + "c_i") * self.tiles[0].rows + "p_i"
            conditions.append(below(row, self.rows))
        for n in "12":
            if f"p_j{n}" in s.coords:
                conditions.append(below(self.column(n), self.extents[n][self.roles[n].col]))
        return replace(s, conditions=(*s.conditions, *conditions))

    def coordinates(self, s: Statement) -> list[Coordinate | IndexLike]:
        """Original instance -> tile-space instance."""
        row, rows, share = self.parts.score_roles.row, self.tiles[0].rows, SHARE["i"]
        block: list[Coordinate | IndexLike] = [Coordinate(row, share * rows), Coordinate(row, rows, share)]
        head, point, n = [*self.parts.score_roles.batch, *block], Coordinate(row, 1, rows), self.part(s.name)
        if not n:
            return [*head, point, *inner_iterators(s, self.parts.row_prefix)]
        r, columns = self.roles[n], self.tiles[int(n) - 1].columns
        steps: list[Coordinate | IndexLike] = [r.block, *r.inner] if s.reduce else []
        return [*head, Coordinate(r.col, columns), *steps, point, Coordinate(r.col, 1, columns)]

    def accesses(self, whole: Group, tiled: TiledGroup) -> tuple[Accesses, Accesses, Accesses]:
        """(reads, writes, elements) of register tiles, of the rows in scratch, and of packed panels."""
        reads: Accesses = {}
        writes: Accesses = {}
        elements: Accesses = {}
        batch = self.parts.score_roles.batch
        own = tuple(map(Index.of, (*batch, "b_i", "c_i", "p_i")))
        for s in whole.statements:
            env = self._tile_env(s)
            for into, suffix, found in ((reads, " reads", read_accesses(s)), (writes, "", (s.write,))):
                for a in found:
                    if whole.arrays[a.array].role != "local":
                        continue
                    inner = [i.subs(env) for i in a.index if str(i) not in self.parts.row_prefix]
                    cell = [Index.of("p_i"), *inner]
                    if into.setdefault(a.array, {}).setdefault(s.name, cell) != cell:
                        raise ScheduleError(f"{s.name} meets {a.array} at two places of its row", node=s.name)
                    elements.setdefault(a.array, {})[s.name + suffix] = [*own, *inner]
        if any(s.name == "PACK" for s in tiled.statements):
            self._panel(batch, reads, writes, elements)
        return reads, writes, elements

    def _tile_env(self, s: Statement) -> Mapping[str, Index]:
        n = self.part(s.name)
        if not n:
            return {}
        r: Roles = self.roles[n]
        return {r.col: self.column(n), r.block: Index.of(f"p_k{n}")}

    def _panel(self, batch: Sequence[str], reads: Accesses, writes: Accesses, elements: Accesses) -> None:
        w, inner, j = self.tiles[0].width, self.roles["1"].inner, self.column("1")
        front, steps = [Index.of(x) for x in batch], [Index.of(x) for x in inner]
        reads["panel"] = {"ACC1": [j // w, Index.of("p_k1"), *steps, j % w]}
        writes["panel"] = {"PACK": [Index.of(x) for x in ("v", "a_k", *inner, "lane")]}
        packed = Index.of("v") * w + "lane"
        elements["panel"] = {
            "PACK": [*front, Index.of("b_i"), packed, Index.of("a_k"), *steps, ZERO],
            "ACC1 reads": [*front, Index.of("b_i"), j, Index.of("p_k1"), *steps, ZERO],
        }
