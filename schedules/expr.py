"""Value: the one typed scalar expression.

A value is what a statement computes for one instance: constants, loads at logical subscripts, integers from an
``Index``, and operations from one table (``OPS``), which gives the arity, result and numpy meaning of each operation.
The same expressions are the bodies of graph primitives, of polyhedral statements and of the loop IR.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from polydyn.schedules.errors import PolydynError
from polydyn.schedules.index import Index, IndexLike

Array = npt.NDArray[Any]

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
SMALL_FLOATS = (
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn",
)  # fmt: skip
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
"""8-bit floats that tensor cores multiply."""
SMALL_INTEGERS = ("int4", "uint4", "int2", "uint2")
SMALL = (*SMALL_FLOATS, *SMALL_INTEGERS)
"""Types of at most 8 bits, stored in one byte per element and named as in ml_dtypes. No arithmetic uses them."""
DTYPES = (*FLOATS, *INTEGERS, "bool", *SMALL)
ITEMSIZE = dict.fromkeys(SMALL, 1) | {
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "bool": 1,
    "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
}  # fmt: skip
"""Bytes per element."""
WIDENED: Mapping[str, str] = {
    **dict.fromkeys(("float16", "bfloat16", *SMALL_FLOATS), "float32"),
    "int4": "int8", "uint4": "uint8", "int2": "int8", "uint2": "uint8",
}  # fmt: skip
"""Storage-only types and the types they are computed in. Loads widen exactly; stores round floats and truncate
integers."""


@dataclass(frozen=True)
class Value:
    """Base of all scalar expressions. Each has a ``dtype``, a name from numpy or ml_dtypes."""

    dtype: str


@dataclass(frozen=True)
class Const(Value):
    """A literal. Comparison uses the ``repr`` of the value, so that NaN equals itself and -0.0 differs from 0.0."""

    value: float | int | bool

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Const) and self.dtype == other.dtype and repr(self.value) == repr(other.value)

    def __hash__(self) -> int:
        return hash((self.dtype, repr(self.value)))


@dataclass(frozen=True)
class Load(Value):
    """The element of tensor ``buffer`` at logical subscripts ``index``."""

    buffer: str
    index: tuple[Index, ...]


@dataclass(frozen=True)
class FromIndex(Value):
    """An integer expression used as a scalar (an iterator, a size); ``dtype`` is any integer or float."""

    index: Index


@dataclass(frozen=True)
class Op(Value):
    """``name(args)`` with ``name`` from ``OPS``."""

    name: str
    args: tuple[Value, ...]


@dataclass(frozen=True)
class OpInfo:
    """One scalar operation: the number of arguments, its meaning in numpy, and the rule for the result's dtype.

    ``result``: ``same`` as the last argument, ``bool``, or ``given`` by the expression (cast).
    """

    arity: int
    numpy: Callable[..., Any]
    result: str = "same"


def _erf(x: Array) -> Array:
    return np.asarray(np.vectorize(math.erf, otypes=[np.asarray(x).dtype])(x))


def _erfc(x: Array) -> Array:
    return np.asarray(np.vectorize(math.erfc, otypes=[np.asarray(x).dtype])(x))


def _trunc_divide(a: Array, b: Array) -> Array:
    """ONNX Div: true division of floats. Integers truncate toward zero, and division by zero gives 0."""
    if np.issubdtype(np.asarray(a).dtype, np.floating):
        return np.divide(a, b)
    safe = np.where(b == 0, 1, b)
    q = np.floor_divide(a, safe) + ((np.mod(a, safe) != 0) & ((a < 0) != (safe < 0)))
    return np.where(b == 0, 0, q).astype(np.asarray(a).dtype)


def _fmod(a: Array, b: Array) -> Array:
    return np.fmod(a, np.where(b == 0, 1, b)) if not np.issubdtype(np.asarray(a).dtype, np.floating) else np.fmod(a, b)


def _pmod(a: Array, b: Array) -> Array:
    return np.mod(a, np.where(b == 0, 1, b)) if not np.issubdtype(np.asarray(a).dtype, np.floating) else np.mod(a, b)


def _sigmoid(x: Array) -> Array:
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x)))).astype(x.dtype)


def _word(*parts: Array) -> Array:
    """Pack integers of 32 / n bits into one 32-bit integer, the first one in the lowest bits."""
    bits = 32 // len(parts)
    low = (np.asarray(x, np.int64) & (2**bits - 1) for x in parts)
    return np.asarray(sum(x << bits * k for k, x in enumerate(low)), np.int64).astype(np.uint32).astype(np.int32)


def _dot(steps: int, signed: bool) -> Callable[[Array, Array], Array]:
    """Return the dot product of the packed elements of two 32-bit words, modulo 2**32.

    Elements of the second word are signed. ``signed`` tells whether those of the first are.
    """
    bits = 32 // steps

    def parts(word: Array, signed: bool) -> list[Array]:
        top = 2 ** (bits - 1) if signed else 0
        wide = np.asarray(word, np.int64)
        return [((wide >> bits * k & (2**bits - 1)) ^ top) - top for k in range(steps)]

    def dot(a: Array, b: Array) -> Array:
        total = sum(x * y for x, y in zip(parts(a, signed), parts(b, True), strict=True))
        return np.asarray(total, np.int64).astype(np.uint32).astype(np.int32)

    return dot


def _bf16(x: Array) -> Array:
    """Return the bits of bfloat16, rounded half to even, in the lower half of 64-bit integers."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.int64)
    return np.asarray(np.where(np.isnan(x), bits >> 16 | 0x40, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16))


def _pair_bf16(a: Array, b: Array) -> Array:
    """Round two numbers to bfloat16 and pack them in one 32-bit word, the first one in the lower half."""
    return np.asarray((_bf16(a) | _bf16(b) << 16).astype(np.uint32).view(np.int32))


def _dot2_bf16(a: Array, b: Array) -> Array:
    """Return the sum of both products of two pairs of bfloat16, in float32."""
    words = [np.asarray(x, np.int32).view(np.uint32) for x in (a, b)]
    low, high = ([(w << s & 0xFFFF0000).astype(np.uint32).view(np.float32) for w in words] for s in (16, 0))
    return np.asarray(low[0] * low[1] + high[0] * high[1])


def _nibble(word: Array, number: Array) -> Array:
    """Return a 4-bit element of a word, less 8, as float32.

    Elements 0 to 3 are the low halves of its bytes, 4 to 7 the high.
    """
    n = np.asarray(number, np.int64)
    return np.asarray((np.asarray(word, np.int64) >> 8 * (n % 4) + 4 * (n // 4) & 15) - 8, np.float32)


def _dot_nibbles(word: Array, a: Array, b: Array) -> Array:
    """Return the dot product of a word's eight 4-bit elements (0 to 15) and the signed bytes of two words, in order."""
    total: Array = np.zeros((), np.int64)
    for n in range(8):
        byte = (np.asarray((a, b)[n // 4], np.int64) >> 8 * (n % 4) & 255 ^ 128) - 128
        total = total + (_nibble(word, np.asarray(n)).astype(np.int64) + 8) * byte
    return np.asarray(total, np.int64).astype(np.int32)


def _power(a: Array, b: Array) -> Array:
    """Return a power. Integers wrap; a negative exponent gives 0 except for the bases 1 and -1."""
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype.kind != "i":
        return np.asarray(np.power(a, b))
    unit = np.where(np.abs(a) == 1, np.where(b % 2 == 0, 1, a), 0).astype(a.dtype)
    return np.asarray(np.where(b < 0, unit, np.power(a, np.maximum(b, 0))))


def _shift(to_left: bool) -> Callable[[Array, Array], Array]:
    """Return a shift of integers. Shifting by a negative count or by at least the width leaves only the sign (or 0)."""

    def shift(a: Array, b: Array) -> Array:
        bits = 8 * np.asarray(a).dtype.itemsize
        inside = (b >= 0) & (b < bits)
        n = np.where(inside, b, bits - 1).astype(np.asarray(b).dtype)
        moved = np.left_shift(a, n) if to_left else np.right_shift(a, n)
        return np.where(inside | (a < 0 if not to_left else False), moved, 0).astype(np.asarray(a).dtype)

    return shift


OPS: dict[str, OpInfo] = {
    "add": OpInfo(2, np.add), "sub": OpInfo(2, np.subtract), "mul": OpInfo(2, np.multiply),
    "div": OpInfo(2, _trunc_divide), "fmod": OpInfo(2, _fmod), "mod": OpInfo(2, _pmod),
    "max": OpInfo(2, np.maximum), "min": OpInfo(2, np.minimum), "pow": OpInfo(2, _power),
    "neg": OpInfo(1, np.negative), "abs": OpInfo(1, np.abs), "sign": OpInfo(1, np.sign),
    "exp": OpInfo(1, np.exp), "log": OpInfo(1, np.log), "sqrt": OpInfo(1, np.sqrt), "tanh": OpInfo(1, np.tanh),
    "expm1": OpInfo(1, np.expm1), "log1p": OpInfo(1, np.log1p), "erfc": OpInfo(1, _erfc),
    "erf": OpInfo(1, _erf), "sin": OpInfo(1, np.sin), "cos": OpInfo(1, np.cos), "sigmoid": OpInfo(1, _sigmoid),
    "floor": OpInfo(1, np.floor), "ceil": OpInfo(1, np.ceil), "rint": OpInfo(1, np.rint),
    "reciprocal": OpInfo(1, np.reciprocal), "pair": OpInfo(2, _word), "dot2": OpInfo(2, _dot(2, True)),
    "quad": OpInfo(4, _word), "dot4": OpInfo(2, _dot(4, False)),
    "pair_bf16": OpInfo(2, _pair_bf16), "dot2_bf16": OpInfo(2, _dot2_bf16),
    "nibble": OpInfo(2, _nibble, "given"), "dot_nibbles": OpInfo(3, _dot_nibbles),
    "asin": OpInfo(1, np.arcsin), "acos": OpInfo(1, np.arccos), "atan": OpInfo(1, np.arctan),
    "atan2": OpInfo(2, np.arctan2),
    "sinh": OpInfo(1, np.sinh), "cosh": OpInfo(1, np.cosh), "tan": OpInfo(1, np.tan),
    "asinh": OpInfo(1, np.arcsinh), "acosh": OpInfo(1, np.arccosh), "atanh": OpInfo(1, np.arctanh),
    "bitand": OpInfo(2, np.bitwise_and), "bitor": OpInfo(2, np.bitwise_or), "bitxor": OpInfo(2, np.bitwise_xor),
    "bitnot": OpInfo(1, np.invert), "shl": OpInfo(2, _shift(True)), "shr": OpInfo(2, _shift(False)),
    "lt": OpInfo(2, np.less, "bool"), "le": OpInfo(2, np.less_equal, "bool"), "eq": OpInfo(2, np.equal, "bool"),
    "ne": OpInfo(2, np.not_equal, "bool"), "gt": OpInfo(2, np.greater, "bool"),
    "ge": OpInfo(2, np.greater_equal, "bool"),
    "and": OpInfo(2, np.logical_and, "bool"), "or": OpInfo(2, np.logical_or, "bool"),
    "xor": OpInfo(2, np.logical_xor, "bool"), "not": OpInfo(1, np.logical_not, "bool"),
    "isnan": OpInfo(1, np.isnan, "bool"), "isinf": OpInfo(1, np.isinf, "bool"),
    "where": OpInfo(3, np.where), "select": OpInfo(3, np.where), "cast": OpInfo(1, lambda x: x, "given"),
    "bitcast": OpInfo(1, lambda x: x, "given"),
}  # fmt: skip
"""Scalar operations. ``where(c, a, b)`` evaluates only the chosen branch, so it also guards a load; ``select`` may
evaluate both. ``cast`` converts numbers, ``bitcast`` keeps the bits."""

C_FUNCTIONS: dict[str, str] = {}
"""Operations that users define with a C function of one element: name -> C text (``polydyn/extend.py``)."""


def c_function(name: str, arity: int, meaning: Callable[..., Any], text: str) -> None:
    """Add an operation, given as C ``text`` and as a function ``meaning`` of numpy arrays.

    PolydynError: polydyn has an operation of that name.
    """
    if name in OPS and name not in C_FUNCTIONS:
        raise PolydynError(f"{name} is an operation already", remedy="give the C function another name")
    OPS[name], C_FUNCTIONS[name] = OpInfo(arity, meaning), text


DOTS: Mapping[str, int] = {"dot2": 2, "dot4": 4, "dot2_bf16": 2}
"""Operation -> number of packed elements that it multiplies: int16 pairs, uint8 by int8 quads, bfloat16 pairs."""
PARTS: Mapping[str, str] = {"quad": "uint8", "pair_bf16": "bfloat16"}
"""Packing operation -> dtype of the packed elements, which code generation may store one by one."""
NIBBLE = "nibble"
"""Operation ``nibble(word, number)``, which extracts 4 bits as float32. The number is the same for all lanes."""
NIBBLES = 8
"""Number of 4-bit elements in a word."""
ADDED = (*DOTS, "dot_nibbles")
"""Operations that code generation fuses with the addition to a sum."""
PRODUCTS = ("mul", *DOTS)
"""Operations whose sums are sums of products."""

REDUCTIONS: Mapping[str, str] = {"sum": "add", "prod": "mul", "max": "max", "min": "min"}
"""Reduction -> the operation that combines."""


def neutral(reduction: str, dtype: str) -> Const:
    """Return the neutral element of a reduction: combining with it changes nothing."""
    if reduction in ("sum", "prod"):
        return Const(dtype, (0.0 if dtype in FLOATS else 0) if reduction == "sum" else (1.0 if dtype in FLOATS else 1))
    low = reduction == "max"
    if dtype in FLOATS:
        return Const(dtype, float("-inf") if low else float("inf"))
    if dtype == "bool":
        return Const(dtype, not low)
    info = np.iinfo(np.dtype(dtype))
    return Const(dtype, int(info.min if low else info.max))


# -- construction ----------------------------------------------------------------------------------------------------


def op(name: str, *args: Value) -> Value:
    """Build an operation and derive its dtype. The arguments must agree as ``OPS`` requires."""
    info = OPS[name]
    if info.arity != len(args):
        raise PolydynError(f"{name} takes {info.arity} arguments, not {len(args)}")
    if info.result == "given":
        raise PolydynError("a cast needs its dtype: use cast()")
    return Op("bool" if info.result == "bool" else args[-1].dtype, name, args)


def cast(x: Value, dtype: str) -> Value:
    """Convert like ONNX Cast (float to integer truncates). Return ``x`` itself if it has the dtype."""
    if x.dtype == dtype:
        return x
    if isinstance(x, FromIndex):
        return FromIndex(dtype, x.index)
    if isinstance(x, Const) and dtype in FLOATS:
        return Const(dtype, float(x.value))
    return Op(dtype, "cast", (x,))


def bitcast(x: Value, dtype: str) -> Value:
    """Reinterpret the bits as another dtype of the same size."""
    if ITEMSIZE[x.dtype] != ITEMSIZE[dtype]:
        raise PolydynError(f"{x.dtype} and {dtype} have different sizes")
    return x if x.dtype == dtype else Op(dtype, "bitcast", (x,))


def const(value: float | int | bool, dtype: str) -> Const:
    """Return a literal of the given dtype."""
    if dtype in FLOATS or dtype in SMALL_FLOATS:
        return Const(dtype, float(value))
    return Const(dtype, bool(value) if dtype == "bool" else int(value))


def load(buffer: str, index: tuple[IndexLike, ...], dtype: str) -> Load:
    """Return a load at logical subscripts."""
    return Load(dtype, buffer, tuple(map(Index.of, index)))


# -- traversal -------------------------------------------------------------------------------------------------------


def children(v: Value) -> tuple[Value, ...]:
    """Return the direct sub-expressions."""
    return v.args if isinstance(v, Op) else ()


def walk(v: Value) -> Iterator[Value]:
    """Yield the expression and all its sub-expressions, outermost first."""
    stack = [v]
    while stack:
        x = stack.pop()
        yield x
        if isinstance(x, Op):
            stack.extend(reversed(x.args))


def transform(v: Value, f: Callable[[Value], Value]) -> Value:
    """Rebuild bottom-up, replacing every sub-expression ``x`` by ``f(x)``."""
    if isinstance(v, Op):
        args = tuple(transform(a, f) for a in v.args)
        if any(a is not b for a, b in zip(args, v.args, strict=True)):
            v = replace(v, args=args)
    return f(v)


def loads(v: Value) -> tuple[Load, ...]:
    """Return all loads, in order of occurrence, repeated ones included."""
    return tuple(x for x in walk(v) if isinstance(x, Load))


def read_of(v: Value) -> Load | None:
    """Return the load that a value is, widened or not. Return None if it is not a single element of memory."""
    if isinstance(v, Op) and v.name == "cast" and v.dtype == WIDENED.get(v.args[0].dtype):
        (v,) = v.args
    return v if isinstance(v, Load) else None


def is_decoded(v: Value) -> bool:
    """Whether a value is computed from 4-bit elements."""
    return any(isinstance(x, Op) and x.name == NIBBLE for x in walk(v))


def substitute(v: Value, env: Mapping[str, IndexLike]) -> Value:
    """Substitute symbols in every Index of the expression."""
    return map_index(v, lambda i: i.subs(env))


def map_index(v: Value, f: Callable[[Index], Index]) -> Value:
    """Apply ``f`` to every Index of the expression."""

    def g(x: Value) -> Value:
        if isinstance(x, Load):
            index = tuple(map(f, x.index))
            return x if all(map(operator.is_, index, x.index)) else replace(x, index=index)
        return replace(x, index=f(x.index)) if isinstance(x, FromIndex) else x

    return transform(v, g)


def indices(v: Value) -> Iterator[Index]:
    """Yield every Index in the expression."""
    for x in walk(v):
        if isinstance(x, Load):
            yield from x.index
        elif isinstance(x, FromIndex):
            yield x.index


def symbols_of(v: Value) -> frozenset[str]:
    """Return all symbols of the subscripts and integers inside the expression."""
    return frozenset(s for i in indices(v) for s in i.symbols())


def show(v: Value) -> str:
    """Return a one-line text for people."""
    if isinstance(v, Const):
        return repr(v.value)
    if isinstance(v, Load):
        return f"{v.buffer}[{', '.join(map(str, v.index))}]"
    if isinstance(v, FromIndex):
        return str(v.index)
    if isinstance(v, Op):
        return f"{v.dtype if v.name == 'cast' else v.name}({', '.join(map(show, v.args))})"
    return repr(v)


def conjuncts(v: Value) -> Iterator[Value]:
    """Yield the terms of a conjunction."""
    if isinstance(v, Op) and v.name == "and":
        for a in v.args:
            yield from conjuncts(a)
    else:
        yield v


def at_least_zero(v: Value) -> Index | None:
    """Return an Index that is >= 0 exactly if a comparison of integers (not read from tensors) holds.

    Return None if the value is not such a comparison.
    """
    if not isinstance(v, Op) or v.name not in ("ge", "gt", "le", "lt"):
        return None
    a, b = map(integer, v.args if v.name[0] == "g" else v.args[::-1])
    return None if a is None or b is None else a - b - (v.name[1] == "t")


def integer(v: Value) -> Index | None:
    """Return an integer that is not read from a tensor as an Index, or None."""
    if isinstance(v, FromIndex):
        return v.index
    return Index.of(v.value) if isinstance(v, Const) and isinstance(v.value, int) else None
