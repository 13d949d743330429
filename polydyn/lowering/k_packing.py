"""K packing: products over 32-bit words that hold two or four steps (docs/adr/0013-quantization.md).

Processors multiply two pairs of 16-bit integers, two of bfloat16 (docs/adr/0023-types.md), or four unsigned bytes by
four signed ones, and add the products, in one instruction. Panels of constants then hold words (``Pack.steps``), and
FILL packs the rows. For tiles and proofs it is a product with fewer steps. The last word is padded with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from polydyn.fusion.plan import FusionPlan
from polydyn.lowering.flatten import FlatNode
from polydyn.schedules.errors import Declined
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

BYTE_DTYPES = ("int8", "uint8")
MIN_STEPS = 4
"""Minimum steps of the last reduction for two 16-bit steps per word. Four 8-bit steps pay from 2 on."""


@dataclass(frozen=True)
class KPacking:
    """A K packing: ``steps`` steps per 32-bit word.

    ``make``: operation that packs values into a word. ``dot``: operation that multiplies two words. ``rows``,
    ``columns``: the integer ranges of both operands (None: float32, rounded). ``least``: minimum number of K steps.
    ``vectors``: vectors per panel that exceeds the cache.
    """

    steps: int
    make: str
    dot: str
    rows: tuple[int, int] | None
    columns: tuple[int, int] | None
    least: int = MIN_STEPS
    vectors: int = 1


INT16X2 = KPacking(2, "pair", "dot2", (-(2**15) + 1, 2**15 - 1), (-(2**15) + 1, 2**15 - 1))
INT8X4 = KPacking(4, "quad", "dot4", (0, 255), (-128, 127), 2)
BF16X2 = KPacking(2, "pair_bf16", "dot2_bf16", None, None)


def pack_k(plan: FusionPlan, n: FlatNode, column: Value, kinds: Sequence[KPacking]) -> FlatNode:
    """Return the product over words, with fewer steps of its last reduction, or ``n`` if no packing fits.

    ``column``: the constant operand. Packing makes words of it later; here it keeps the address of single steps.
    ``kinds``: the packings that the processor multiplies, best first.
    """
    assert isinstance(n.body, Op)
    (row,) = (v for v in n.body.args if v is not column)
    kind = _kind(plan, n, row, column, kinds)
    if isinstance(kind, Declined):
        return n
    x, steps = n.reduction[-1]
    ranges = dict((*n.shared, *n.reduction[:-1], (x, steps.ceildiv(kind.steps))))
    return _over(n, kind, word(kind.make, row, x, int(steps), ranges), column)


def pack_k_of_footprint(
    plan: FusionPlan, n: FlatNode, footprint: Footprint, kinds: Sequence[KPacking]
) -> tuple[FlatNode, Footprint] | Declined:
    """Like ``pack_k``, but for rows with a footprint, which then holds the parts of words. Declined if no packing fits.
    """
    assert isinstance(n.body, Op)
    row = footprint.operand()
    (column,) = (v for v in n.body.args if v != row)
    kind = _kind(plan, n, row, column, kinds)
    if isinstance(kind, Declined):
        return kind
    if kind.make not in PARTS:
        return Declined(f"words of {kind.make} have no parts in memory")
    words = replace(footprint, word=kind.make)
    return Declined(words.mistake) if words.mistake else (_over(n, kind, words.operand(), column), words)


def _kind(
    plan: FusionPlan, n: FlatNode, row: Value, column: Value, kinds: Sequence[KPacking]
) -> KPacking | Declined:  # fmt: skip
    """Return the first packing that the operands of a product fit into."""
    steps, read = n.reduction[-1][1].constant, read_of(column)
    if read is None or steps is None:
        return Declined("its columns are more than loads, or the number of its steps is not known")
    array = plan.graph.constants[read.buffer]
    kind = next((k for k in kinds if steps >= k.least and _holds(k, n.dtype, row, array)), None)
    return kind or Declined("its operands do not fit into words of 8 or 16 bits, or it has few steps")


def _holds(kind: KPacking, dtype: str, row: Value, column: Array) -> bool:
    """Check whether a packing represents all values that the operands of a product may have."""
    if kind.rows is None or kind.columns is None:
        return dtype == "float32" and column.dtype.name in ("float32", "bfloat16")
    ends = _ends(row)
    return (
        dtype == "int32" and ends is not None and _inside(ends, kind.rows) and _inside(_ends_of(column), kind.columns)
    )


def _over(n: FlatNode, kind: KPacking, row: Value, column: Value) -> FlatNode:
    """Return the product over words of a packing. ``row`` is its packed row operand."""
    *outer, (x, steps) = n.reduction
    reduction = (*outer, (x, steps.ceildiv(kind.steps)))
    return replace(n, reduction=reduction, body=Op(n.dtype, kind.dot, (row, read_of(column) or column)))


def _ends(v: Value) -> tuple[int, int] | None:
    """Return the minimum and maximum that an int32 value may have, whatever is loaded, or None if it may be any."""
    if isinstance(v, Const):
        return int(v.value), int(v.value)
    if not isinstance(v, Op):
        return None
    if v.name == "cast" and v.args[0].dtype in BYTE_DTYPES:
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
