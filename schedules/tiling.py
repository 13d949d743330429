"""The purpose of a group's parts: roles of iterators, parts of an attention, stages of a stitch, and the tiled tree.

Code generation walks the tree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from polydyn.schedules.expr import Load, Value, transform
from polydyn.schedules.index import Index
from polydyn.schedules.model import Array, Group, Statement, row_major
from polydyn.schedules.tree import TileStatement, Tree


@dataclass(frozen=True)
class Roles:
    """The roles of the iterators of a matmul-like group.

    ``batch``: parallel, in both operands or in neither. ``row``: the side that is
    broadcast (register rows). ``col``: the vector side. ``block``: the reduction that is blocked. ``inner``: further
    reductions, run inside the block. ``sunk``: the reduction step, ``first`` or ``last``, where the solved schedule
    matrix puts each statement that does not reduce.
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

    Extents of iterators are parameters too: ``extents`` maps ``E_x`` to its value. So groups of one form share one tree
    and one isl AST.
    """

    tree: Tree
    statements: tuple[TileStatement, ...]
    params: tuple[str, ...]
    coincident: tuple[str, ...]
    extents: dict[str, Index]


@dataclass(frozen=True)
class AttentionParts:
    """The statements of an attention group: scores (contraction), rows (stitch), values (contraction).

    ``phases`` are those of the rows' statements; ``schedule.schedule_attention`` fills them in from the solved matrix.
    """

    scores: Group
    score_roles: Roles
    rows: Group
    row_prefix: tuple[str, ...]
    phases: dict[str, int]
    values: Group
    value_roles: Roles


def unfold(group: Group, batch: tuple[str, ...], role: str = "rows") -> Group:
    """Return the group with its arrays of role ``rows`` extended to all rows of all batches, with the new ``role``."""
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


def inner_iterators(s: Statement, prefix: tuple[str, ...]) -> tuple[str, ...]:
    """Return the iterators below the shared prefix."""
    return s.iterators[len(prefix) :]


def stages(group: Group, prefix: tuple[str, ...], phases: dict[str, int]) -> list[list[Statement]]:
    """Group the statements that share loops: by phase, then by inner iterators, initialisers first, in original order.
    """
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
