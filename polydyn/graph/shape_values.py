"""Shape arithmetic: the meaning of element-wise operators on tensors that hold sizes.

The propagator applies this table after an operator's own rule if the elements of all inputs are known, so operators
need no code for it. Elements are ``Dim``. Float detours (``floor(H * 0.5)``) are exact ``Ratio`` values. If an element
has no exact form, or comes from data, it is unknown (None), never wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import lcm
from typing import Any, TypeAlias

import numpy as np

from polydyn.graph.dtypes import numpy_dtype, onnx_dtype
from polydyn.graph.operators.registry import OnnxNode
from polydyn.schedules.expr import FLOATS, Array
from polydyn.schedules.index import ZERO, Atom, Index, maximum, minimum, product
from polydyn.shapes.context import ShapeContext

MAX_ELEMENTS = 1024
"""Maximum elements of a tensor that holds shape arithmetic."""
MAX_DENOMINATOR = 1 << 12
"""Maximum denominator of a float that counts as an exact fraction."""
MAX_POWER = 8
"""Maximum exponent of a size."""


MAX_DEPTH = 32
"""Maximum nested divisions, minima and maxima of a size. Deeper arithmetic has no formula: programs compute it."""


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
    """Return the value of the node's first output: None for an element without an exact meaning, or for all."""
    rule = VALUES.get(node.op)
    if rule is None or not inputs:
        return None
    flat = np.broadcast_arrays(*inputs, subok=False) if len(inputs) > 1 else inputs
    if flat[0].size > MAX_ELEMENTS:  # of two short vectors, for example: no tensor of sizes
        return None
    out = np.empty(flat[0].shape, object)
    for i in np.ndindex(*out.shape):
        operands = [a[i] for a in flat]
        x = None if any(o is None for o in operands) else rule(_Asked(node, dtype, facts), *operands)
        if x is not None and _depth(x.top if isinstance(x, Ratio) else x) <= MAX_DEPTH:
            out[i] = Ratio(facts.canonical(x.top), x.bottom) if isinstance(x, Ratio) else facts.canonical(x)
    return in_range(out, dtype, node.op in ("Cast", "CastLike"))


def _depth(x: Index) -> int:
    """Return the number of nested divisions, minima and maxima."""
    return max((_atom_depth(a) for a in x.atoms() if isinstance(a, Atom)), default=0)


@lru_cache(maxsize=1 << 14)
def _atom_depth(a: Atom) -> int:
    return 1 + max(map(_depth, a.args), default=0)


NARROW_DTYPES = ("int8", "int16", "uint8", "uint16", "uint32", "uint64")
"""Integer dtypes too narrow for sizes. They hold only numbers, because they wrap where sizes do not."""


def in_range(value: Array, dtype: str, is_cast: bool = False) -> Array | None:
    """Wrap numbers to the range of an integer dtype, as its arithmetic does.

    A size in a dtype of ``NARROW_DTYPES`` is unknown, and so is the result of a cast that changes a number: its source
    may be a float, which does not wrap. Returns None if no element is known.
    """
    own = numpy_dtype(dtype)
    out: Array = value.copy()
    if own.kind in "iu":
        ends = np.iinfo(own)
        for i, x in np.ndenumerate(value):
            number = x.constant if isinstance(x, Index) else None
            if number is None:
                out[i] = None if dtype in NARROW_DTYPES else x
            elif not ends.min <= number <= ends.max:
                wrapped = (number - ends.min) % (ends.max - ends.min + 1) + ends.min
                out[i] = None if is_cast else Index.of(wrapped)
    return None if out.size and all(x is None for x in out.flat) else out


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
    fmod = q.node.attribute("fmod", 0)
    if isinstance(a, Index) and isinstance(b, Index):
        return a % b if q.facts.nonnegative(b - 1) and (not fmod or q.facts.nonnegative(a)) else None
    x, y = _ratio(a), _ratio(b)
    if not (fmod and q.facts.nonnegative(x.top) and q.facts.nonnegative(y.top - 1)):
        return None
    return Ratio((x.top * y.bottom) % (y.top * x.bottom), x.bottom * y.bottom)


def _power(q: _Asked, a: Scalar, b: Scalar) -> Scalar | None:
    e = _ratio(b)
    n = e.top.constant
    if n is None or e.bottom != 1 or not 0 <= n <= MAX_POWER:
        return None
    x = _ratio(a)
    top = product([x.top] * n)
    return Ratio(top, x.bottom**n) if isinstance(a, Ratio) else top


def _sum(q: _Asked, *xs: Scalar) -> Scalar | None:
    ratios = [_ratio(x) for x in xs]
    bottom = lcm(*(x.bottom for x in ratios))
    return Ratio(sum((x.top * (bottom // x.bottom) for x in ratios), ZERO), bottom)


def _extreme(f: Callable[..., Index]) -> Callable[..., Scalar | None]:
    def rule(q: _Asked, *xs: Scalar) -> Scalar | None:
        if all(isinstance(x, Index) for x in xs):
            return f(*xs)
        ratios = [_ratio(x) for x in xs]
        bottom = lcm(*(x.bottom for x in ratios))
        return Ratio(f(*(x.top * (bottom // x.bottom) for x in ratios)), bottom)

    return rule


def _clip(q: _Asked, x: Scalar, *bounds: Scalar) -> Scalar | None:
    names = q.node.inputs[1:]
    if q.node.attributes.keys() & {"min", "max"}:  # opsets before 11
        return None
    out: Scalar | None = x
    if names and names[0]:
        out = _extreme(maximum)(q, out, bounds[0])
    if len(names) > 1 and names[1]:
        out = _extreme(minimum)(q, out, bounds[-1])
    return out


def _relu(q: _Asked, a: Scalar) -> Scalar | None:
    return Ratio(maximum(a.top, 0), a.bottom) if isinstance(a, Ratio) else maximum(a, 0)


def _sign(q: _Asked, a: Scalar) -> Scalar | None:
    top = maximum(-1, minimum(1, _ratio(a).top))
    return Ratio(top, 1) if isinstance(a, Ratio) else top


def _round(q: _Asked, a: Scalar) -> Scalar | None:
    """Round half to even: one less than half up where that is odd and ``a`` is halfway."""
    if isinstance(a, Index):
        return a
    above, step = a.top * 2 + a.bottom, 2 * a.bottom
    up = above // step
    return Ratio(up - (1 - minimum(1, above % step)) * (up % 2), 1)


def _finite(q: _Asked, a: Scalar) -> Scalar | None:
    return Index.of(0)


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


def _xor(q: _Asked, a: Scalar, b: Scalar) -> Scalar | None:
    return a + b - a * b * 2 if isinstance(a, Index) and isinstance(b, Index) else None


def _where(q: _Asked, c: Scalar, a: Scalar, b: Scalar) -> Scalar | None:
    if not isinstance(c, Index):
        return None
    if c.constant is None and a != b:  # every call makes this choice: c is 0 or 1
        x, y = _ratio(a), _ratio(b)
        top = y.top * x.bottom + c * (x.top * y.bottom - y.top * x.bottom)
        return Ratio(top, x.bottom * y.bottom) if isinstance(a, Ratio) or isinstance(b, Ratio) else top
    return a if c.constant else b


VALUES: Mapping[str, Callable[..., Any]] = {
    "Add": _linear(1), "Sub": _linear(-1), "Mul": _mul, "Div": _div, "Mod": _mod, "Pow": _power, "Sum": _sum,
    "Min": _extreme(minimum), "Max": _extreme(maximum), "Clip": _clip, "Relu": _relu,
    "Neg": _neg, "Abs": _abs, "Sign": _sign, "IsNaN": _finite, "IsInf": _finite,
    "Floor": _floor, "Ceil": _ceil, "Round": _round, "Cast": _cast, "CastLike": _cast,
    "Equal": _comparison("eq"), "Less": _comparison("lt"), "LessOrEqual": _comparison("le"),
    "Greater": _comparison("gt"), "GreaterOrEqual": _comparison("ge"),
    "Not": _not, "And": _and, "Or": _or, "Xor": _xor, "Where": _where,
}  # fmt: skip
"""Maps an operator name to its meaning on one element of each input."""
