"""Shape arithmetic: the meaning of element-wise operators on tensors that hold sizes.

The propagator applies this table after an operator's own rule if the elements of all inputs are known, so operators
need no code for it. Elements are ``Dim``. Float detours (``floor(H * 0.5)``) are exact ``Ratio`` values. If an element
has no exact form, the whole value is unknown, never wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np

from polydyn.graph.dtypes import numpy_dtype, onnx_dtype
from polydyn.graph.operators.registry import OnnxNode
from polydyn.schedules.expr import FLOATS, Array
from polydyn.schedules.index import Index, maximum, minimum
from polydyn.shapes.context import ShapeContext

MAX_ELEMENTS = 1024
"""Maximum elements of a tensor that holds shape arithmetic."""
MAX_DENOMINATOR = 1 << 12
"""Maximum denominator of a float that counts as an exact fraction."""


@dataclass(frozen=True)
class Ratio:
    """``top / bottom`` with a positive integer bottom: a size that passes through floats."""

    top: Index
    bottom: int


Scalar: TypeAlias = "Index | Ratio"


def elements(array: Array) -> Array | None:
    """Return a constant's elements as Dims (integers, booleans) or Ratios (floats); None if too many or inexact."""
    if array.size > MAX_ELEMENTS or array.dtype.kind not in "iubf":
        return None
    out = np.empty(array.shape, object)
    for i, x in np.ndenumerate(array):
        if array.dtype.kind != "f":
            out[i] = Index.of(int(x))
            continue
        if not np.isfinite(x):
            return None
        f = Fraction(float(x))
        if f.denominator > MAX_DENOMINATOR:
            return None
        out[i] = Ratio(Index.of(f.numerator), f.denominator)
    return out


def dims_only(value: Array | None) -> Array | None:
    """Return the value if every element is a Dim, else None."""
    if value is None or not all(isinstance(x, Index) for x in value.flat):
        return None
    return value


def as_constant(value: Array | None, dtype: str) -> Array | None:
    """Return the numpy array if every element is a constant: a Dim, or a Ratio in a tensor of floats; else None."""
    if value is None:
        return None
    known = [x.constant if isinstance(x, Index) else x.top.constant for x in value.flat]
    floats = dtype in FLOATS
    if any(k is None for k in known) or not (floats or all(isinstance(x, Index) for x in value.flat)):
        return None
    numbers = [
        k / x.bottom if isinstance(x, Ratio) else k for k, x in zip(known, value.flat, strict=True) if k is not None
    ]
    out: Array = np.array(numbers, numpy_dtype(dtype)).reshape(value.shape)
    return out


def infer_value(node: OnnxNode, inputs: list[Array], dtype: str, facts: ShapeContext) -> Array | None:
    """Return the value of the node's first output, or None if the operator or an element has no exact meaning."""
    rule = VALUES.get(node.op)
    if rule is None or not inputs:
        return None
    flat = np.broadcast_arrays(*inputs, subok=False) if len(inputs) > 1 else inputs
    out = np.empty(flat[0].shape, object)
    for i in np.ndindex(*out.shape):
        x = rule(_Asked(node, dtype, facts), *(a[i] for a in flat))
        if x is None:
            return None
        out[i] = Ratio(facts.canonical(x.top), x.bottom) if isinstance(x, Ratio) else facts.canonical(x)
        if dtype in NARROW_DTYPES and not _fits(out[i], dtype):
            return None
    return out


NARROW_DTYPES = ("int8", "int16", "uint8", "uint16", "uint32", "uint64")
"""Integer dtypes too narrow for sizes. They hold only numbers in their range, because they wrap where sizes do not."""


def _fits(x: Scalar, dtype: str) -> bool:
    number, ends = x.constant if isinstance(x, Index) else None, np.iinfo(dtype)
    return number is not None and ends.min <= number <= ends.max


@dataclass(frozen=True)
class _Asked:
    node: OnnxNode
    dtype: str
    facts: ShapeContext


def _ratio(x: Scalar) -> Ratio:
    return x if isinstance(x, Ratio) else Ratio(x, 1)


def _linear(sign: int) -> Callable[..., Scalar | None]:
    def rule(q: _Asked, a: Scalar, b: Scalar) -> Scalar | None:
        if isinstance(a, Index) and isinstance(b, Index):
            return a + b * sign
        x, y = _ratio(a), _ratio(b)
        return Ratio(x.top * y.bottom + y.top * x.bottom * sign, x.bottom * y.bottom)

    return rule


def _mul(q: _Asked, a: Scalar, b: Scalar) -> Scalar | None:
    if isinstance(a, Index) and isinstance(b, Index):
        return a * b
    x, y = _ratio(a), _ratio(b)
    return Ratio(x.top * y.top, x.bottom * y.bottom)


def _div(q: _Asked, a: Scalar, b: Scalar) -> Scalar | None:
    if isinstance(a, Index) and isinstance(b, Index):
        if q.facts.nonnegative(b):
            return _truncated(q, a, b)
        return -_truncated(q, a, -b) if q.facts.nonnegative(-b) else None
    x, y = _ratio(a), _ratio(b)
    d = y.top.constant
    if not d:
        return None
    sign = 1 if d > 0 else -1
    return Ratio(x.top * y.bottom * sign, x.bottom * abs(d))


def _truncated(q: _Asked, a: Index, b: Index) -> Index:
    """Return ``a / b`` rounded towards zero for a size b, like integer division and casts from floats."""
    if q.facts.nonnegative(a):
        return a // b
    return maximum(a, 0) // b - maximum(-a, 0) // b


def _mod(q: _Asked, a: Scalar, b: Scalar) -> Scalar | None:
    if isinstance(a, Ratio) or isinstance(b, Ratio) or not q.facts.nonnegative(b - 1):
        return None
    return a % b if not q.node.attribute("fmod", 0) or q.facts.nonnegative(a) else None


def _extreme(f: Callable[..., Index]) -> Callable[..., Scalar | None]:
    def rule(q: _Asked, *xs: Scalar) -> Scalar | None:
        return f(*xs) if all(isinstance(x, Index) for x in xs) else None

    return rule


def _neg(q: _Asked, a: Scalar) -> Scalar | None:
    return Ratio(-a.top, a.bottom) if isinstance(a, Ratio) else -a


def _abs(q: _Asked, a: Scalar) -> Scalar | None:
    x = _ratio(a)
    top = maximum(x.top, -x.top)
    return Ratio(top, x.bottom) if isinstance(a, Ratio) else top


def _floor(q: _Asked, a: Scalar) -> Scalar | None:
    return Ratio(a.top // a.bottom, 1) if isinstance(a, Ratio) else a


def _ceil(q: _Asked, a: Scalar) -> Scalar | None:
    return Ratio(a.top.ceildiv(a.bottom), 1) if isinstance(a, Ratio) else a


def _cast(q: _Asked, a: Scalar, *like: Scalar) -> Scalar | None:
    to = q.dtype if q.node.op == "CastLike" else onnx_dtype(q.node.attribute("to"))
    if to in FLOATS:
        return _ratio(a)
    if to == "bool":
        return 1 - _compare(q, a, Index.of(0), "eq")
    return a if isinstance(a, Index) else _truncated(q, a.top, Index.of(a.bottom))


def _compare(q: _Asked, a: Scalar, b: Scalar, relation: str) -> Index:
    """Return 1 or 0, or an expression that every call evaluates if facts do not decide."""
    x, y = _ratio(a), _ratio(b)
    d = q.facts.canonical(x.top * y.bottom - y.top * x.bottom)
    if relation == "eq":
        known = q.facts.equal(d, 0)
        return 1 - minimum(1, maximum(d, -d)) if known is None else Index.of(int(known))
    if relation in ("gt", "ge"):
        d = -d
    below = maximum(0, minimum(1, -d if relation in ("lt", "gt") else 1 - d))  # d < 0, or d <= 0
    return q.facts.canonical(below)


def _comparison(relation: str) -> Callable[..., Scalar | None]:
    return lambda q, a, b: _compare(q, a, b, relation)


def _not(q: _Asked, a: Scalar) -> Scalar | None:
    return 1 - a if isinstance(a, Index) else None


def _and(q: _Asked, a: Scalar, b: Scalar) -> Scalar | None:
    return a * b if isinstance(a, Index) and isinstance(b, Index) else None


def _or(q: _Asked, a: Scalar, b: Scalar) -> Scalar | None:
    return a + b - a * b if isinstance(a, Index) and isinstance(b, Index) else None


def _where(q: _Asked, c: Scalar, a: Scalar, b: Scalar) -> Scalar | None:
    if not isinstance(c, Index):
        return None
    if c.constant is None and a != b:  # every call makes this choice: c is 0 or 1
        x, y = _ratio(a), _ratio(b)
        top = y.top * x.bottom + c * (x.top * y.bottom - y.top * x.bottom)
        return Ratio(top, x.bottom * y.bottom) if isinstance(a, Ratio) or isinstance(b, Ratio) else top
    return a if c.constant else b


VALUES: Mapping[str, Callable[..., Any]] = {
    "Add": _linear(1), "Sub": _linear(-1), "Mul": _mul, "Div": _div, "Mod": _mod,
    "Min": _extreme(minimum), "Max": _extreme(maximum), "Neg": _neg, "Abs": _abs,
    "Floor": _floor, "Ceil": _ceil, "Cast": _cast, "CastLike": _cast,
    "Equal": _comparison("eq"), "Less": _comparison("lt"), "LessOrEqual": _comparison("le"),
    "Greater": _comparison("gt"), "GreaterOrEqual": _comparison("ge"),
    "Not": _not, "And": _and, "Or": _or, "Where": _where,
}  # fmt: skip
"""Maps an operator name to its meaning on one element of each input."""
