"""Vector lanes: the types that they hold, and how a subscript or address changes from one lane to the next.

Fusion uses this before it joins groups, code generation when it vectorises a loop.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache

from polydyn.schedules.expr import C_FUNCTIONS, FLOAT8, FromIndex, Op, Value, walk
from polydyn.schedules.index import ZERO, Index
from polydyn.schedules.ranges import simplify

LANE = "@lane"
"""The symbol of the lane's number."""
VECTOR_DTYPES = (
    "float32", "int32", "int64", "bool", "uint8", "int8", "uint16", "int16", "float16", "bfloat16", "float64",
)  # fmt: skip
"""Types of values in the lanes of a CPU vector. Loops over other types stay scalar."""
FLOAT_LANES = ("float32", "float16", "bfloat16")
"""Types that the lanes of a CPU vector hold as float32."""
DEVICE_DTYPES = ("float32", "int32", "int64", "bool", "uint8", "int8", "float16", "bfloat16", *FLOAT8)
"""Types of values in CUDA kernels, whose lanes are threads."""
RAMP_DTYPES = ("float32", "int32", "int64", "float64")
"""Types that an integer expression may be converted to if it differs from lane to lane."""


def has_lanes(v: Value, dtypes: Collection[str] = VECTOR_DTYPES) -> bool:
    """Whether every part of an expression has a vector form for these dtypes."""
    if C_FUNCTIONS and any(isinstance(x, Op) and x.name in C_FUNCTIONS for x in walk(v)):
        return False
    return all(x.dtype in dtypes and (x.dtype in RAMP_DTYPES or not isinstance(x, FromIndex)) for x in walk(v))


@lru_cache(maxsize=4096)
def lane_stride(i: Index, var: str, start: Index, width: int) -> tuple[Index, Index] | None:
    """Return (stride per lane, rest) of an expression whose ``var`` is ``start + lane``; None if it is not affine."""
    if var not in i.symbols():
        return ZERO, i
    moved = simplify(i.subs({var: start + LANE}), {LANE: Index.of(width)})
    stride, rest = moved.split(LANE)
    return None if LANE in rest.symbols() or LANE in stride.symbols() else (stride, rest)


def is_affine_in_lanes(i: Index, var: str, width: int, ranges: Mapping[str, Index]) -> bool:
    """Whether an address moves by one stride per lane, for vectors of ``var`` that begin at multiples of the width."""
    if var not in i.symbols():
        return True
    return lane_stride(simplify(i, ranges), var, Index.of("@vector") * width, width) is not None
