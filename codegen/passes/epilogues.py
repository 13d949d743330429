"""Long epilogues: what is made of a register tile's sums is a loop over the tile, which lies in memory.

A micro-kernel is written out for every number of live rows and of live columns, its epilogue for each of its vectors:
hundreds of copies, which keeps a few operations in registers. A chain of quantizations is many operations; as copies
they would be nearly all of a kernel's text and of its compile time, to save a store and a load of what takes much
longer. So micro-kernels leave their sums in a tile on the stack, and one loop over its live part does the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from polydyn.codegen.ir import (
    Alloc,
    Body,
    Compare,
    Def,
    FlatLoad,
    For,
    If,
    Inst,
    Let,
    Node,
    Reg,
    Store,
    bodies,
    walk_value,
)  # fmt: skip
from polydyn.codegen.ir import walk as walk_body
from polydyn.codegen.passes.transpose import by_blocks, transpose_loads
from polydyn.codegen.passes.vectorise import vectorise_loop, vectorise_tile
from polydyn.schedules.errors import CodegenError, Declined
from polydyn.schedules.expr import Op, Value, symbols_of, walk
from polydyn.schedules.index import ZERO, Index
from polydyn.schedules.model import Statement
from polydyn.schedules.tree.names import e

MOST_OPERATIONS = 28
"""Of all epilogues of a tile together, to be written out for every register."""
ROW, COLUMN, COLUMNS = e("i"), e("j"), e("n")
"""The loops over a finished tile, of which the second counts vectors, and its live columns."""


def is_long(epilogues: Iterable[Statement]) -> bool:
    """Whether epilogues are too many operations to be written out for every register, those on numbers not counted."""
    return sum(isinstance(v, Op) and bool(symbols_of(v)) for s in epilogues for v in walk(s.value)) > MOST_OPERATIONS


def instances(body: Body, names: Collection[str]) -> tuple[list[Inst], tuple[Compare, ...]]:
    """The instances of some statements, and under what conditions all of them run.

    CodegenError: they run under different ones.
    """
    pairs = list(_instances(body, names))
    conditions = {c for _, c in pairs}
    if len(conditions) != 1:
        raise CodegenError(f"the statements {sorted(names)} run under {len(conditions)} different conditions")
    return [i for i, _ in pairs], pairs[0][1]


def _instances(body: Body, names: Collection[str]) -> Iterator[tuple[Inst, tuple[Compare, ...]]]:
    for n in body:
        if isinstance(n, Inst) and n.statement in names:
            yield n, ()
        for k, b in enumerate(bodies(n)):
            for i, below in _instances(b, names):
                condition = () if not isinstance(n, If) else _not(n.cond) if k else n.cond
                yield i, (*condition, *below)


def _not(cond: tuple[Compare, ...]) -> tuple[Compare, ...]:
    """The condition of the other branch. CodegenError: it is no conjunction."""
    opposite = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
    if len(cond) > 1:
        raise CodegenError("a statement runs where one of several conditions does not hold")
    return tuple(replace(c, relation=opposite[c.relation]) for c in cond)


def finished(
    tile: Body, memory: tuple[str, str], stores: Sequence[Store], when: tuple[Compare, ...],
    rows: Index, columns: Index, sizes: tuple[int, int, int],
) -> Body:  # fmt: skip
    """A tile whose sums lie in memory, and behind it the loop that stores what is made of them.

    ``memory``: name and dtype of the memory. ``stores``: of one element, at ``ROW`` and ``COLUMN``. ``when``: the
    conditions under which they run. ``rows``, ``columns``: live ones. ``sizes``: rows, columns, lanes of a whole tile.
    """
    most, wide, lanes = sizes
    nest = (For(COLUMN, ZERO, Index.of(wide), _shared(stores)),)
    (whole,) = vectorise_tile(nest, COLUMN, lanes)
    (part,) = vectorise_tile(nest, COLUMN, lanes, mask_extent=Index.of(COLUMNS))
    assert isinstance(whole, For) and isinstance(part, For)
    inside: Body = whole.body
    live = columns.constant
    if live is None or live % lanes:
        rest = Index.of(COLUMNS) - Index.of(COLUMN) * lanes
        inside = (If((Compare(">=", rest, Index.of(lanes)),), inside, part.body),)
    loop: Body = (For(COLUMN, ZERO, Index.of(COLUMNS).ceildiv(lanes), inside, "vector"),)
    loop = (Let(COLUMNS, columns, (For(ROW, ZERO, rows, loop),)),)
    loop = (If(when, loop),) if when else loop
    return (Alloc(*memory, Index.of(most * wide), "stack", (*tile, *loop)),)


def finished_across(
    memory: tuple[str, str], stores: Sequence[Store], rows: Index, columns: Index, lanes: int
) -> Body | Declined:
    """The loop that stores what is made of sums where results lie together along rows, in planes of a column each.

    Vectors run along rows, so stores are whole; blocks of the sums, which lie together along columns, are transposed in
    registers. Otherwise as ``finished``. Declined: the results have no form in such vectors.
    """
    inner = For(COLUMN, ZERO, Index.of(COLUMNS), _shared(stores))
    made = vectorise_loop(For(ROW, ZERO, rows, (inner,)), lanes)
    if isinstance(made, Declined):
        return made
    blocks = transpose_loads(by_blocks(made, COLUMN, lanes), COLUMN, lanes)
    whole = [v for n in walk_body(blocks) if isinstance(n, (Store, Def)) for v in walk_value(n.value)]
    if any(isinstance(v, FlatLoad) and v.buffer == memory[0] for v in whole):
        return Declined("sums are read lane by lane")
    return (Let(COLUMNS, columns, blocks),)


def _shared(stores: Sequence[Store]) -> Body:
    """The stores, with a register for every operation that occurs more than once: of two outputs, or read twice."""
    uses: Counter[Value] = Counter()
    registers: dict[Value, Reg] = {}
    out: list[Node] = []

    def count(v: Value) -> None:
        uses[v] += 1
        if isinstance(v, Op) and uses[v] == 1:
            for a in v.args:
                count(a)

    def put(v: Value) -> Value:
        if not isinstance(v, Op) or v in registers:
            return registers.get(v, v)
        new = replace(v, args=tuple(map(put, v.args)))
        if uses[v] == 1:
            return new
        registers[v] = Reg(v.dtype, f"e_{len(registers)}")
        out.append(Def(registers[v].name, new))
        return registers[v]

    for s in stores:
        count(s.value)
    for s in stores:
        value = put(s.value)
        out.append(replace(s, value=value))
    return tuple(out)
