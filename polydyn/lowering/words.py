"""Products several steps at a time: words of 32 bits that hold two or four steps (docs/adr/0013-quantization.md).

Processors multiply two pairs of 16-bit integers, or four unsigned bytes by four signed ones, and add the products in
one instruction. Panels of constants hold words then (``Pack.steps``), and FILL makes words of the rows; to tiles and
proofs it is a product of so many fewer steps. A last word that is not full is filled up with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from polydyn.fusion.plan import FusionPlan
from polydyn.lowering.flatten import FlatNode
from polydyn.schedules.expr import PARTS, Array, Const, FromIndex, Load, Op, Value, const, map_index, op, substitute
from polydyn.schedules.index import Index
from polydyn.schedules.ranges import simplify

BYTES = ("int8", "uint8")
LEAST_STEPS = 4
"""Of the last reduction, for pairs; quads, which may be filled up with zeros, are worth it from 2 on."""


@dataclass(frozen=True)
class Words:
    """A kind of word: ``steps`` in each, the operation ``make`` that makes one of values, and the ends of the numbers
    that rows and columns may hold.
    """

    steps: int
    make: str
    rows: tuple[int, int]
    columns: tuple[int, int]


PAIRS = Words(2, "pair", (-(2**15) + 1, 2**15 - 1), (-(2**15) + 1, 2**15 - 1))
QUADS = Words(4, "quad", (0, 255), (-128, 127))


def in_words(plan: FusionPlan, n: FlatNode, column: Load, quads: bool) -> FlatNode:
    """The product over words, of fewer steps of its last reduction; as it was where no kind of word fits.

    ``column``: the operand that is a constant; packing makes words of it, here it keeps the address of single steps.
    ``quads``: the processor multiplies bytes four at a time.
    """
    assert isinstance(n.body, Op)
    x, steps = n.reduction[-1][0], n.reduction[-1][1].constant
    (row,) = (v for v in n.body.args if v is not column)
    ends = _ends(row)
    if n.dtype != "int32" or steps is None or steps < (2 if quads else LEAST_STEPS) or ends is None:
        return n
    array = plan.graph.constants[column.buffer]
    for kind in (QUADS, PAIRS) if quads else (PAIRS,):
        if _inside(ends, kind.rows) and _inside(_ends_of(array), kind.columns):
            return _over(n, kind, row, column, x, steps)
    return n


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
            inside = op("lt", FromIndex("int64", step), const(steps, "int64"))
            part = Op("int32", "where", (inside, part, const(0, "int32")))
        parts.append(part)
    return replace(n, reduction=reduction, body=Op("int32", f"dot{kind.steps}", (word(kind.make, parts), column)))


def word(make: str, parts: list[Value]) -> Value:
    """The word of several steps; what guards all of them alike guards the word, unless its parts are stored apart."""
    first = parts[0]
    if isinstance(first, Op) and first.name == "where" and make not in PARTS:
        zero, guards = const(0, "int32"), [p for p in parts if isinstance(p, Op) and p.name == "where"]
        if len(guards) == len(parts) and all((g.args[0], g.args[2]) == (first.args[0], zero) for g in guards):
            return Op("int32", "where", (first.args[0], word(make, [g.args[1] for g in guards]), zero))
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
