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
    PARTS,
    Array,
    Const,
    Op,
    Value,
    read_of,
)
from polydyn.schedules.group.footprint import Footprint
from polydyn.schedules.group.words import word

BYTES = ("int8", "uint8")
LEAST_STEPS = 4
"""Of the last reduction, for pairs; quads are worth it from 2 on."""


@dataclass(frozen=True)
class Words:
    """A kind of word: ``steps`` in each, the operation ``make`` that makes one of values, ``dot`` that multiplies two,
    the ends of the integers that rows and columns may hold (None: float32, which is rounded), from how many steps on;
    ``vectors``: of a panel that no cache holds.
    """

    steps: int
    make: str
    dot: str
    rows: tuple[int, int] | None
    columns: tuple[int, int] | None
    least: int = LEAST_STEPS
    vectors: int = 1


PAIRS = Words(2, "pair", "dot2", (-(2**15) + 1, 2**15 - 1), (-(2**15) + 1, 2**15 - 1))
QUADS = Words(4, "quad", "dot4", (0, 255), (-128, 127), 2)
ROUNDED = Words(2, "pair_bf16", "dot2_bf16", None, None)


def in_words(plan: FusionPlan, n: FlatNode, column: Value, kinds: Sequence[Words]) -> FlatNode:
    """The product over words, of fewer steps of its last reduction; as it was where no kind of word fits.

    ``column``: the operand that is a constant; packing makes words of it, here it keeps the address of single steps.
    ``kinds``: those that the processor multiplies, the best ones first.
    """
    assert isinstance(n.body, Op)
    (row,) = (v for v in n.body.args if v is not column)
    kind = _kind(plan, n, row, column, kinds)
    if kind is None:
        return n
    x, steps = n.reduction[-1]
    ranges = dict((*n.shared, *n.reduction[:-1], (x, steps.ceildiv(kind.steps))))
    return _over(n, kind, word(kind.make, row, x, int(steps), ranges), column)


def strips_in_words(
    plan: FusionPlan, n: FlatNode, footprint: Footprint, kinds: Sequence[Words]
) -> tuple[FlatNode, Footprint] | None:
    """As ``in_words`` where rows have a footprint, which then holds the parts of words; None: no kind of word fits."""
    assert isinstance(n.body, Op)
    row = footprint.operand()
    (column,) = (v for v in n.body.args if v != row)
    kind = _kind(plan, n, row, column, kinds)
    if kind is None or kind.make not in PARTS:
        return None
    words = replace(footprint, word=kind.make)
    return None if words.mistake else (_over(n, kind, words.operand(), column), words)


def _kind(plan: FusionPlan, n: FlatNode, row: Value, column: Value, kinds: Sequence[Words]) -> Words | None:
    """The first kind of word that the operands of a product fit into; None: there is none."""
    steps, read = n.reduction[-1][1].constant, read_of(column)
    if read is None or steps is None:
        return None
    array = plan.graph.constants[read.buffer]
    return next((k for k in kinds if steps >= k.least and _holds(k, n.dtype, row, array)), None)


def _holds(kind: Words, dtype: str, row: Value, column: Array) -> bool:
    """Whether words of a kind hold whatever the operands of a product may be."""
    if kind.rows is None or kind.columns is None:
        return dtype == "float32" and column.dtype.name in ("float32", "bfloat16")
    ends = _ends(row)
    return (
        dtype == "int32" and ends is not None and _inside(ends, kind.rows) and _inside(_ends_of(column), kind.columns)
    )


def _over(n: FlatNode, kind: Words, row: Value, column: Value) -> FlatNode:
    """The product over words of a kind, of which the rows are ``row``."""
    *outer, (x, steps) = n.reduction
    reduction = (*outer, (x, steps.ceildiv(kind.steps)))
    return replace(n, reduction=reduction, body=Op(n.dtype, kind.dot, (row, read_of(column) or column)))


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
