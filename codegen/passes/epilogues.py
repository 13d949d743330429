"""Long epilogues: a loop over a register tile in memory computes the results from its sums.

A micro-kernel is unrolled for every number of live rows and of live columns, with its epilogue for each of its vectors:
hundreds of copies, which keep a few operations in registers. A chain of quantizations is many operations, and a gate
calls a function. Their copies would be nearly all of a kernel's text and of its compile time, and would save only a
store and a load compared with much longer work. So micro-kernels store their sums in a tile on the stack, and one loop
over its live part does the rest.
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
"""Maximum operations of all epilogues of a tile that are unrolled for every register."""
FUNCTIONS = frozenset((
    "exp", "expm1", "log", "log1p", "sigmoid", "tanh", "erf", "erfc", "pow", "fmod", "mod",
    "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh", "acosh", "atanh",
))  # fmt: skip
"""Operations that are calls of leaf functions. A call saves all vector registers, so the sums of a tile go to memory
anyway."""
ROW, COLUMN, COLUMNS = e("i"), e("j"), e("n")
"""The loops over rows and over vectors of columns of a finished tile, and the number of its live columns."""


def is_long(epilogues: Iterable[Statement]) -> bool:
    """Whether epilogues are a loop after the tile: they call a function, or have too many operations to be unrolled for
    every register. Operations on numbers do not count.
    """
    found = [v for s in epilogues for v in walk(s.value) if isinstance(v, Op) and symbols_of(v)]
    return len(found) > MOST_OPERATIONS or any(v.name in FUNCTIONS for v in found)


def instances(body: Body, names: Collection[str]) -> tuple[list[Inst], tuple[Compare, ...]]:
    """Return the instances of some statements, and the conditions under which all of them run.

    CodegenError: their conditions differ.
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
    """Return the condition of the other branch. CodegenError: the condition has several terms."""
    opposite = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
    if len(cond) > 1:
        raise CodegenError("a statement runs where one of several conditions does not hold")
    return tuple(replace(c, relation=opposite[c.relation]) for c in cond)


def finished(
    tile: Body, memory: tuple[str, str], stores: Sequence[Store], when: tuple[Compare, ...],
    rows: Index, columns: Index, sizes: tuple[int, int, int],
) -> Body:  # fmt: skip
    """Return a tile whose sums are stored to memory, followed by the loop that computes and stores the results.

    ``memory``: name and dtype of the memory. ``stores``: those of one element, at ``ROW`` and ``COLUMN``. ``when``:
    their conditions. ``rows``, ``columns``: live rows and columns. ``sizes``: rows, columns, lanes of a whole tile.
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
    """Return the loop that computes and stores the results if they are contiguous along rows, in one plane per column.

    Vectors run along rows, so stores are whole. Blocks of the sums, which are contiguous along columns, are transposed
    in registers. Otherwise it is like ``finished``. Declined: the results cannot be vectorised in this way.
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
    """Return the stores, with a register for every operation that occurs more than once."""
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
