"""Products several steps at a time: words of 32 bits that hold two or four steps (docs/adr/0013-quantization.md).

Processors multiply two pairs of 16-bit integers, two of bfloat16 (docs/adr/0023-types.md), or four unsigned bytes by
four signed ones, and add the products in one instruction. Panels of constants hold words then (``Pack.steps``), and
FILL makes words of the rows; to tiles and proofs it is a product of so many fewer steps. A last word that is not full
is filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from polydyn.fusion.plan import FusionPlan
from polydyn.lowering.flatten import FlatNode
from polydyn.schedules.expr import (
    INTEGERS,
    PARTS,
    Array,
    Const,
    FromIndex,
    Load,
    Op,
    Value,
    cast,
    const,
    map_index,
    op,
    read_of,
    substitute,
)
from polydyn.schedules.index import Index
from polydyn.schedules.ranges import simplify

BYTES = ("int8", "uint8")
LEAST_STEPS = 4
"""Of the last reduction, for pairs; quads are worth it from 2 on."""


@dataclass(frozen=True)
class Words:
    """A kind of word: ``steps`` in each, the operation ``make`` that makes one of values, ``dot`` that multiplies two,
    the ends of the integers that rows and columns may hold (None: float32, which is rounded), from how many steps on.
    """

    steps: int
    make: str
    dot: str
    rows: tuple[int, int] | None
    columns: tuple[int, int] | None
    least: int = LEAST_STEPS


PAIRS = Words(2, "pair", "dot2", (-(2**15) + 1, 2**15 - 1), (-(2**15) + 1, 2**15 - 1))
QUADS = Words(4, "quad", "dot4", (0, 255), (-128, 127), 2)
ROUNDED = Words(2, "pair_bf16", "dot2_bf16", None, None)


def in_words(plan: FusionPlan, n: FlatNode, column: Value, kinds: Sequence[Words]) -> FlatNode:
    """The product over words, of fewer steps of its last reduction; as it was where no kind of word fits.

    ``column``: the operand that is a constant; packing makes words of it, here it keeps the address of single steps.
    ``kinds``: those that the processor multiplies, the best ones first.
    """
    assert isinstance(n.body, Op)
    x, steps = n.reduction[-1][0], n.reduction[-1][1].constant
    (row,) = (v for v in n.body.args if v is not column)
    read = read_of(column)
    if read is None or steps is None:
        return n
    for kind in kinds:
        if steps >= kind.least and _holds(kind, n.dtype, row, plan.graph.constants[read.buffer]):
            return _over(n, kind, row, read, x, steps)
    return n


def _holds(kind: Words, dtype: str, row: Value, column: Array) -> bool:
    """Whether words of a kind hold whatever the operands of a product may be."""
    if kind.rows is None or kind.columns is None:
        return dtype == "float32" and column.dtype.name in ("float32", "bfloat16")
    ends = _ends(row)
    return (
        dtype == "int32" and ends is not None and _inside(ends, kind.rows) and _inside(_ends_of(column), kind.columns)
    )


def _over(n: FlatNode, kind: Words, row: Value, column: Load, x: str, steps: int) -> FlatNode:
    """The product over words of a kind."""
    count = -(-steps // kind.steps)
    reduction = (*n.reduction[:-1], (x, Index.of(count)))
    ranges = dict((*n.shared, *reduction))
    parts = []
    for k in range(kind.steps):
        step = Index.of(x) * kind.steps + k
        part = map_index(substitute(row, {x: step}), lambda i: simplify(i, ranges))
        if steps % kind.steps:
            part = _in_a_step(part, op("lt", FromIndex("int64", step), const(steps, "int64")))
        parts.append(part)
    return replace(n, reduction=reduction, body=Op(n.dtype, kind.dot, (word(kind.make, parts), column)))


def _in_a_step(part: Value, last: Value) -> Value:
    """A part of a word, under the condition that it is a step at all.

    Columns are 0 beyond the last step. An integer may be anything there, also what a guard puts outside of an image:
    one condition then serves for both.
    """
    wide = isinstance(part, Op) and part.name == "cast" and part.dtype == "int32"
    v = part.args[0] if wide and isinstance(part, Op) else part
    if v.dtype in INTEGERS and isinstance(v, Op) and v.name == "where":
        guard, then, orelse = v.args
        if isinstance(guard, Op) and guard.name == "and":
            both = op("and", guard.args[0], op("and", guard.args[1], last))
            return cast(replace(v, args=(both, then, orelse)), part.dtype)
    return Op(part.dtype, "where", (last, part, const(0, part.dtype)))


def word(make: str, parts: list[Value]) -> Value:
    """The word of several steps; what guards all of them alike guards the word, unless its parts are stored apart."""
    first = parts[0]
    if isinstance(first, Op) and first.name == "where" and make not in PARTS:
        zero, guards = const(0, first.dtype), [p for p in parts if isinstance(p, Op) and p.name == "where"]
        if len(guards) == len(parts) and all((g.args[0], g.args[2]) == (first.args[0], zero) for g in guards):
            return Op("int32", "where", (first.args[0], word(make, [g.args[1] for g in guards]), const(0, "int32")))
    return Op("int32", make, tuple(parts))


def _ends(v: Value) -> tuple[int, int] | None:
    """The least and the greatest number that a value of int32 may be, whatever is loaded; None: it may be any."""
    if isinstance(v, Const):
        return int(v.value), int(v.value)
    if not isinstance(v, Op):
        return None
    if v.name == "cast" and v.args[0].dtype in BYTES:
        return (0, 255) if v.args[0].dtype == "uint8" else (-128, 127)
    parts = [_ends(a) for a in (v.args[1:] if v.name in ("where", "select") else v.args)]
    known = [p for p in parts if p is not None]
    if len(known) < len(parts):
        return None
    if v.name == "sub":
        (low, high), (least, most) = known
        return low - most, high - least
    return (min(p[0] for p in known), max(p[1] for p in known)) if v.name in ("where", "select") else None


def _ends_of(a: Array) -> tuple[int, int]:
    return (int(a.min()), int(a.max())) if a.size else (0, 0)


def _inside(ends: tuple[int, int], limits: tuple[int, int]) -> bool:
    return limits[0] <= ends[0] and ends[1] <= limits[1]
