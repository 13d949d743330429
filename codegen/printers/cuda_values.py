"""CUDA text of index expressions and scalar values; floats of 8 and 16 bits are storage types, values are float."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from polydyn.codegen.ir import Apply, FlatLoad, Parameter, Pointer, Reg, Store, Tile, Undefined, walk_value
from polydyn.codegen.passes.widen import stored_value
from polydyn.codegen.printers.c_values import INFIX, RELATIONS
from polydyn.codegen.printers.index_text import IndexText
from polydyn.schedules.errors import CodegenError
from polydyn.schedules.expr import FLOAT8, FLOATS, ITEMSIZE, REDUCTIONS, Const, FromIndex, Op, Value, integer
from polydyn.schedules.index import ZERO, Atom, Index
from polydyn.schedules.ranges import is_nonnegative

STORAGE = {
    "float16": "pd_half", "bfloat16": "pd_bf16", "float32": "float", "float64": "double", "int8": "int8_t",
    "int16": "int16_t", "int32": "int32_t", "int64": "int64_t", "uint8": "uint8_t", "uint16": "uint16_t",
    "uint32": "uint32_t", "uint64": "uint64_t", "bool": "uint8_t", "float8_e4m3fn": "pd_e4m3", "float8_e5m2": "pd_e5m2",
}  # fmt: skip
"""Types in memory."""
HALF = ("float16", "bfloat16")
STORAGE_FLOATS = (*HALF, *FLOAT8)
"""Storage-only floats."""
REGISTER = {**STORAGE, **dict.fromkeys(STORAGE_FLOATS, "float"), "bool": "bool"}
"""Types of values."""
_SHORT_NAME = dict(zip(STORAGE_FLOATS, ("f16", "bf16", "e4m3", "e5m2"), strict=True))
FROM_STORAGE = {t: f"pd_{n}_to_f32" for t, n in _SHORT_NAME.items()} | {"bool": "(bool)"}
TO_STORAGE = {t: f"pd_f32_to_{n}" for t, n in _SHORT_NAME.items()} | {"bool": "(uint8_t)"}
BYTES = ("int8", "uint8")
SINGLE_FLOATS = ("float32", *HALF)
FLOAT_FUNCTIONS = (
    "exp", "log", "sqrt", "tanh", "erf", "sin", "cos", "sigmoid", "floor", "ceil", "rint", "pow", "fmod", "max", "min",
    "abs", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh",
    "expm1", "log1p", "erfc", "atan2",
)  # fmt: skip
"""Operations that the device header has for float."""
FAST_FUNCTIONS = ("exp", "log", "tanh", "erf", "sigmoid", "sqrt")
"""Operations that have a form for results rounded to 16 bits."""
NORMAL = 2.0**-126
"""The smallest normal float32."""
BITS = {"bitand": " & ", "bitor": " | ", "bitxor": " ^ "}


@dataclass(frozen=True)
class Place:
    """Storage of a buffer: ``global``, ``shared`` or ``register``; ``offset``: bytes, in shared memory."""

    dtype: str
    scope: str
    offset: Index = ZERO


def _index_text(t: str) -> IndexText:
    pair = f"(({t}){{0}}, ({t}){{1}})"
    return IndexText(f"pd_floordiv{pair}", f"pd_imin{pair}", f"pd_imax{pair}", f"({t})pd_ldg({{0}} + {{1}})")


INDEX_TEXT = {t: _index_text(t) for t in ("int32_t", "int64_t")}
"""Printers of index expressions of either width."""


class CudaValues:
    """Prints values; ``places`` gives the storage of every buffer. ``fast``: results are finally rounded to 16 bits."""

    def __init__(self, places: Mapping[str, Place], index_type: str = "int64_t", fast: bool = False) -> None:
        self.places, self.index_type, self.index, self.fast = places, index_type, INDEX_TEXT[index_type], fast

    def text(self, v: Value) -> str:
        """Return a C++ expression of the register type of ``v``."""
        if isinstance(v, Const):
            return constant(v)
        if isinstance(v, Undefined):  # an initialiser follows
            return f"{REGISTER[v.dtype]}()"
        if isinstance(v, Reg):
            return v.name
        if isinstance(v, FlatLoad):
            return self._load(v)
        if isinstance(v, Tile):
            return self._read(v.dtype, f"pd_lds<{STORAGE[v.dtype]}>({self.pointer(v)})")
        if isinstance(v, Pointer):
            return self.pointer(v)
        if isinstance(v, Parameter):
            return f"&{v.name}"
        if isinstance(v, FromIndex):
            return f"(({REGISTER[v.dtype]}){self.index(v.index)})"
        if isinstance(v, Apply):
            return f"{v.function}({', '.join(map(self.text, v.args))})"
        if isinstance(v, Op):
            return self._op(v)
        raise CodegenError(f"no CUDA form for {v!r}")

    def call_argument(self, v: Value) -> str:
        """Return the text of an argument of a ``Call``: tiles and pointers are addresses."""
        return self.pointer(v) if isinstance(v, (Tile, Pointer)) else self.text(v)

    def pointer(self, v: Tile | Pointer) -> str:
        """Return the address of an element."""
        place = self.places[v.buffer]
        if isinstance(v, Pointer) and place.scope == "shared":
            return f"({STORAGE[v.dtype]} *)({self.shared(v.buffer, self.index(v.address))})"
        if isinstance(v, Pointer):
            text = f"{v.buffer} + {self.index(v.address)}"
            return text if v.dtype == place.dtype else f"({REGISTER[v.dtype]} *)({text})"
        base = f"smem + {self.index(place.offset)}"
        if place.scope == "global":
            base = f"(unsigned char *){v.buffer}"
        size = ITEMSIZE[v.dtype]
        chunks, all_banks = v.pitch // v.chunk, 128 // (v.chunk * size)
        rows, row = _whole(v.row, max(chunks, all_banks) // chunks * min(chunks, all_banks))
        columns, column = _whole(v.column, min(chunks, all_banks) * v.chunk)
        before = "".join(f"{self.index(i * size)} + " for i in (v.start, rows * v.pitch + columns) if i != ZERO)
        swizzled = f"pd_swizzled<{v.pitch}, {v.chunk}, {all_banks}, {size}>"
        text = f"{base} + ({before}{swizzled}((int){self.index(row)}, (int){self.index(column)}))"
        return text if place.scope == "shared" else f"({STORAGE[v.dtype]} *)({text})"

    def _read(self, dtype: str, text: str) -> str:
        return f"{FROM_STORAGE[dtype]}({text})" if dtype in FROM_STORAGE else text

    def _load(self, v: FlatLoad) -> str:
        place = self.places[v.buffer]
        at = self.index(v.address)
        if v.lanes != 1:
            raise CodegenError(f"a load of {v.lanes} lanes has no CUDA form")
        if place.scope == "register":
            return f"{v.buffer}[{at}]"
        if place.scope == "shared":
            return self._read(place.dtype, f"pd_lds<{STORAGE[place.dtype]}>({self.shared(v.buffer, at)})")
        return self._read(place.dtype, f"pd_ldg({v.buffer} + {at})")

    def shared(self, buffer: str, at: str) -> str:
        """Return the address of an element of a plain array in shared memory."""
        place = self.places[buffer]
        return f"smem + {self.index(place.offset)} + {at} * (int)sizeof({STORAGE[place.dtype]})"

    def store(self, n: Store) -> str:
        """Return the statement that stores, or combines and stores."""
        value: Value = n.value
        if n.reduce is not None:
            value = Op(value.dtype, REDUCTIONS[n.reduce], (FlatLoad(value.dtype, n.buffer, n.address), value))
        place, at = self.places[n.buffer], self.index(n.address)
        x = self.text(value if place.scope == "register" else stored_value(value))
        if place.scope == "register":
            return f"{n.buffer}[{at}] = {x};"
        x = f"{TO_STORAGE[place.dtype]}({x})" if place.dtype in TO_STORAGE else x
        if place.scope == "shared":
            return f"pd_sts<{STORAGE[place.dtype]}>({self.shared(n.buffer, at)}, {x});"
        return f"pd_stg<{STORAGE[place.dtype]}>({n.buffer} + {at}, {x});"

    def _op(self, v: Op) -> str:
        if v.name == "cast":
            return self._cast(v)
        if v.name == "bitcast" and v.args[0].dtype not in STORAGE_FLOATS and v.dtype not in STORAGE_FLOATS:
            return f"pd_bitcast<{REGISTER[v.dtype]}>({self.text(v.args[0])})"
        if self.fast and (x := _above_one(v, "erf")):
            return f"pd_erfc_fast(-{self.text(x)})"
        if self.fast and (x := _above_one(v, "tanh")):
            return f"pd_one_plus_tanh_fast({self.text(x)})"
        if (within := _within(v)) is not None:  # one comparison: negative numbers become large
            return "(" + " < ".join(f"(u{self.index_type}){self.index(i)}" for i in within) + ")"
        args = [self.text(a) for a in v.args]
        source = v.args[-1].dtype
        if v.name in ("where", "select"):
            return f"({args[0]} ? {args[1]} : {args[2]})"
        if v.name in RELATIONS:
            numbers = [integer(a) for a in v.args if a.dtype == "int64"]  # of the index width
            args = [self.index(i) if i is not None else x for i, x in zip(numbers or (None, None), args, strict=True)]
            return f"({args[0]} {RELATIONS[v.name]} {args[1]})"
        if v.name == "isnan":
            return f"({args[0]} != {args[0]})"
        if v.name == "and" and not any(isinstance(x, FlatLoad) for x in walk_value(v)):
            return f"({args[0]} & {args[1]})"  # without branches: neither operand reads memory in vain
        if source == "bool":
            return _logic(v.name, args)
        if v.name in INFIX:
            text = f"({args[0]} {INFIX[v.name]} {args[1]})"
            return f"(({REGISTER[v.dtype]}){text})" if source in ("int8", "int16", "uint8", "uint16") else text
        if v.name == "neg":
            return f"(-{args[0]})"
        if source in SINGLE_FLOATS:
            return _fast(v, args) or _single(v.name, args) if self.fast else _single(v.name, args)
        return _other(v, args)

    def _cast(self, v: Op) -> str:
        (x,) = v.args
        s = self.text(x)
        if v.dtype == "bool":
            return f"({s} != 0)"
        if v.dtype in STORAGE_FLOATS and x.dtype != v.dtype:
            return f"{FROM_STORAGE[v.dtype]}({TO_STORAGE[v.dtype]}((float){s}))"
        return s if REGISTER[v.dtype] == REGISTER[x.dtype] else f"(({REGISTER[v.dtype]}){s})"


def _whole(i: Index, period: int) -> tuple[Index, Index]:
    """Return (the terms that are multiples of a number, the rest): a periodic swizzle depends only on the rest.

    The rest may be negative, which ``pd_swizzled`` allows. Quotients are not split.
    """
    rest = Index({m: c for m, c in i.terms.items() if c % period or any(isinstance(x, Atom) for x in m)})
    return i - rest, rest


def _within(v: Op) -> tuple[Index, Index] | None:
    """Return (x, n) if the value is ``0 <= x < n`` and n is never negative."""
    if v.name != "and" or [x.name for x in v.args if isinstance(x, Op)] != ["ge", "lt"]:
        return None
    parts = [integer(y) if y.dtype == "int64" else None for x in v.args if isinstance(x, Op) for y in x.args]
    x, zero, same, n = parts
    if x is None or n is None or zero != ZERO or same != x or not is_nonnegative(n):
        return None
    return x, n


def _single(name: str, args: list[str]) -> str:
    if name in FLOAT_FUNCTIONS:
        return f"pd_{name}({', '.join(args)})"
    if name == "div":
        return f"({args[0]} / {args[1]})"
    if name == "reciprocal":
        return f"(1.0f / {args[0]})"
    if name == "sign":
        return f"({args[0]} > 0.0f ? 1.0f : {args[0]} < 0.0f ? -1.0f : {args[0]})"
    if name == "isinf":
        return f"(pd_abs({args[0]}) == pd_bits_to_f32(0x7f800000u))"
    raise CodegenError(f"{name} of float32 is not built for CUDA", rule="scalar operations of the device header")


def literal(v: Value) -> float | None:
    """Return the number that a value is, converted or not."""
    while isinstance(v, Op) and v.name == "cast":
        (v,) = v.args
    return float(v.value) if isinstance(v, Const) else None


def _above_one(v: Op, name: str) -> Value | None:
    """Return x of 1 + erf(x), which is erfc(-x), or of 1 + tanh(x): without cancellation or a case for small x."""
    for a, b in (v.args, v.args[::-1]) if v.name == "add" else ():
        if isinstance(a, Op) and a.name == name and a.dtype == "float32" and literal(b) == 1:
            return a.args[0]
    return None


def _fast(v: Op, args: list[str]) -> str:
    """Return the form of ``_single`` that is accurate to 2^-16 (docs/adr/0005-cuda.md), or an empty text."""
    if v.name in FAST_FUNCTIONS:
        return f"pd_{v.name}_fast({', '.join(args)})"
    if v.name == "reciprocal":
        return f"pd_div_fast(1.0f, {args[0]})"
    if v.name != "div":
        return ""
    by = literal(v.args[1])
    inverse = 1 / by if by else 0.0
    if NORMAL < abs(inverse) < 1 / NORMAL:
        return f"({args[0]} * {constant(Const('float32', inverse))})"
    return f"pd_div_fast({args[0]}, {args[1]})"


def _other(v: Op, args: list[str]) -> str:
    """Return operations of integers, and those of float64 that need no library function."""
    source = v.args[-1].dtype
    if source == "float64" and v.name == "div":
        return f"({args[0]} / {args[1]})"
    if source != "float64":
        if v.name == "div":
            return f"({args[1]} == 0 ? 0 : {args[0]} / {args[1]})"
        if v.name in ("max", "min"):
            return _of_two(v.name, source, args)
        if v.name in BITS:
            return f"(({REGISTER[source]})({BITS[v.name].join(args)}))"
        if v.name == "bitnot":
            return f"(({REGISTER[source]})~{args[0]})"
        if v.name in ("shl", "shr"):
            return f"pd_{v.name}({args[0]}, {args[1]})"
        if v.name == "abs":
            return f"({args[0]} < 0 ? -{args[0]} : {args[0]})"
    raise CodegenError(f"{v.name} of {source} is not built for CUDA", rule="scalar operations of the device header")


def _of_two(name: str, dtype: str, args: list[str]) -> str:
    """Return max or min by a function: every lane of a warp evaluates both operands once; one may be a shuffle."""
    return f"pd_{'larger' if name == 'max' else 'smaller'}<{REGISTER[dtype]}>({', '.join(args)})"


def _logic(name: str, args: list[str]) -> str:
    if name == "not":
        return f"(!{args[0]})"
    if name in ("max", "min"):
        return _of_two(name, "bool", args)
    infix = {"and": "&&", "or": "||", "xor": "!="}
    if name not in infix:
        raise CodegenError(f"{name} of booleans has no CUDA form")
    return f"({args[0]} {infix[name]} {args[1]})"


def constant(v: Const) -> str:
    """Return a literal."""
    if v.dtype in FLOATS:
        x, single = float(v.value), v.dtype != "float64"
        if math.isnan(x):
            return "pd_bits_to_f32(0x7fc00000u)"
        if math.isinf(x) or (single and abs(x) > 3.5e38):
            return f"pd_bits_to_f32(0x{'7f' if x > 0 else 'ff'}800000u)"
        text = f"{x!r}{'f' if single else ''}"
        return f"({text})" if text.startswith("-") else text
    if v.dtype == "bool":
        return "true" if v.value else "false"
    n = int(v.value)
    if n == -(2**63):
        return "(-9223372036854775807LL - 1)"
    return f"(({REGISTER[v.dtype]}){n}{'ULL' if v.dtype == 'uint64' else 'LL'})"
