"""C text of index expressions and scalar or vector values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from polydyn.codegen import ir
from polydyn.codegen.printers.index_text import IndexText
from polydyn.schedules.errors import CodegenError
from polydyn.schedules.expr import (
    ADDED,
    C_FUNCTIONS,
    FLOATS,
    INTEGERS,
    ITEMSIZE,
    NIBBLE,
    REDUCTIONS,
    SMALL,
    WIDENED,
    Const,
    FromIndex,
    Op,
    Value,
    cast,
    children,
    const,
    op,
)
from polydyn.schedules.lanes import RAMP_DTYPES

CTYPE = {
    "float16": "f16", "bfloat16": "bf16",
    "float32": "f32", "float64": "f64", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64",
    "uint8": "u8", "uint16": "u16", "uint32": "u32", "uint64": "u64", "bool": "u8",
}  # fmt: skip
"""Types of elements in memory."""
CTYPE |= {t: t for t in SMALL}
CVALUE = {d: CTYPE[WIDENED.get(d, d)] for d in CTYPE}
"""Types of values."""
SHORT_NAME = {**CVALUE, "bool": "b"}
INLINE_MATH = ("exp", "tanh", "erf", "sigmoid")
INFIX = {"add": "+", "sub": "-", "mul": "*"}
RELATIONS = {"lt": "<", "le": "<=", "eq": "==", "ne": "!=", "gt": ">", "ge": ">="}
BYTES = ("uint8", "int8")
BYTE_ENDS = (0.0, 255.0)
"""The range of uint8."""
OTHER_MASKS = ("int64", "uint8", "int8", "uint16", "int16", "float64")
SHORTS = ("uint16", "int16")
"""Dtypes whose comparisons in lanes do not have the width of ``vb``."""


def vector_type(dtype: str) -> str:
    """Return the C vector type of a dtype."""
    return "vb" if dtype == "bool" else f"v{CVALUE[dtype]}"


index_text = IndexText("pd_fdiv({0}, {1})", "PD_MIN({0}, {1})", "PD_MAX({0}, {1})", "(i64)PD_AT({0}, {1})")
"""Prints int64 C expressions."""


class ValuePrinter:
    """Prints values; ``dtypes`` gives the storage dtype of every buffer; ``inline_math`` expands vector functions.

    ``width``: lanes of a whole vector; vectors of fewer lanes are narrow. 0: all vectors are whole.
    """

    def __init__(self, dtypes: Mapping[str, str], inline_math: bool = False, width: int = 0) -> None:
        self.dtypes, self.inline_math, self.width = dtypes, inline_math, width

    def prefix(self, lanes: int, dtype: str) -> str:
        """Return the prefix of names for vectors of ``lanes`` lanes."""
        if lanes >= self.width:
            return "v"
        if CVALUE[dtype] != "f32":
            raise CodegenError(f"no narrow vectors of {dtype}")
        return "h"

    def text(self, v: Value, want: int = 1) -> str:
        """Return C text with ``want`` lanes.

        A scalar is broadcast, a narrow vector gets additional lanes with undefined values, and a wider vector keeps its
        first lanes.
        """
        lanes = ir.lanes_of(v)
        if lanes == want or want == 1:
            return self._text(v, lanes)
        if 1 < lanes < want and not isinstance(v, (ir.Reg, ir.FlatLoad)):
            return self._text(v, want)
        s = self._text(v, lanes)
        if lanes > 1:
            return f"{'vwiden' if want > lanes else 'hlow'}_{SHORT_NAME[v.dtype]}({s})"
        if v.dtype == "bool":
            return f"vbcast_i32(-(({s}) != 0))"
        return f"{self.prefix(want, v.dtype)}bcast_{SHORT_NAME[v.dtype]}({s})"

    def _text(self, v: Value, lanes: int) -> str:
        if 1 < lanes < self.width and not _of_any_lanes(v):  # functions exist only for whole vectors
            self.prefix(lanes, v.dtype)
            return f"hlow_{SHORT_NAME[v.dtype]}({self._text(v, self.width)})"
        if isinstance(v, Const):
            return _constant(v)
        if isinstance(v, ir.Undefined):
            return f"PD_UNDEFINED({CVALUE[v.dtype]})"
        if isinstance(v, ir.Reg):
            return v.name
        if isinstance(v, ir.FlatLoad):
            return self._load(v)
        if isinstance(v, FromIndex):
            return f"(({CVALUE[v.dtype]}){index_text(v.index)})"
        if isinstance(v, ir.Ramp):
            return self._ramp(v)
        if isinstance(v, ir.Between):
            return f"vbetween({index_text(v.low)}, {index_text(v.high)})"
        if isinstance(v, ir.Broadcast):
            return self.text(v.value, lanes)
        if isinstance(v, ir.Horizontal):
            return f"pd_h{v.reduction}_{vector_type(v.dtype)}({self.text(v.value, ir.lanes_of(v.value))})"
        if isinstance(v, ir.Blend):
            args = f"{self.text(v.new, lanes)}, {self.text(v.old, lanes)}"
            return f"vsel_{SHORT_NAME[v.dtype]}(vlive({index_text(v.count)}), {args})"
        if isinstance(v, ir.Apply):
            return f"{v.function}({', '.join(self.text(a, ir.lanes_of(a)) for a in v.args)})"
        if isinstance(v, Op):
            return self._op(v, lanes)
        raise CodegenError(f"no C form for {v!r}")

    def _ramp(self, v: ir.Ramp) -> str:
        t = CTYPE[v.dtype] if v.dtype in RAMP_DTYPES else None
        if t is None:
            raise CodegenError(f"no ramp of {v.dtype}")
        return f"vramp_{t}({index_text(v.start)}, {index_text(v.step)})"

    def _load(self, v: ir.FlatLoad) -> str:
        if ITEMSIZE[v.dtype] > ITEMSIZE[self.dtypes.get(v.buffer, v.dtype)]:
            if v.lanes > 1:
                raise CodegenError(f"no vectors of {v.dtype} from {v.buffer} of {self.dtypes[v.buffer]}")
            return f"PD_WORD({v.buffer}, {index_text(v.address)})"
        if v.lanes == 1:
            element = f"PD_AT({v.buffer}, {index_text(v.address)})"
            return f"pd_read_{CTYPE[v.dtype]}({element})" if v.dtype in WIDENED else element
        t, p = CTYPE[v.dtype], f"{v.buffer}, {index_text(v.address)}"
        if v.guard is not None:
            guard = self.text(v.guard, v.lanes)
            guard = guard if v.mask is None else f"({guard} & vlive({index_text(v.mask)}))"
            apart = f", {index_text(v.stride)}" if v.stride != 1 else ""
            text = f"vloadg{'s' if apart else ''}_{t}({p}{apart}, {guard})"
        elif v.stride != 1:
            prefix = self.prefix(v.lanes, v.dtype)
            count = index_text(v.mask) if v.mask is not None else "PD_W" if prefix == "v" else str(v.lanes)
            text = f"{prefix}loads_{t}({p}, {index_text(v.stride)}, {count})"
        elif v.mask is not None:
            text = f"{self.prefix(v.lanes, v.dtype)}loadm_{t}({p}, {index_text(v.mask)})"
        else:
            text = f"{self.prefix(v.lanes, v.dtype)}load_{t}({p})"
        return f"vbool({text})" if v.dtype == "bool" else text

    def store(self, n: ir.Store) -> str:
        """Return the statement that stores, or combines and stores."""
        if n.again:
            lanes = "1" if n.lanes == 1 else "PD_W" if n.mask is None else index_text(n.mask)
            place = f"{n.buffer}, {index_text(n.address)}, {index_text(n.stride)}, {lanes}"
            return f"pd_again({place}); {self.store(replace(n, again=False))}"
        dtype = n.value.dtype
        if self.dtypes[n.buffer] != dtype:
            raise CodegenError(f"{dtype} stored to {n.buffer} of {self.dtypes[n.buffer]}")
        value = n.value
        if n.reduce is not None:
            old = ir.FlatLoad(dtype, n.buffer, n.address, n.lanes, n.stride, n.mask)
            value = Op(dtype, REDUCTIONS[n.reduce], (old, value))
        if dtype in WIDENED and isinstance(value, Op) and value.name == "cast":
            value = value.args[0] if value.args[0].dtype == WIDENED[dtype] else value  # the store rounds
        x = self.text(value, n.lanes)
        if n.lanes == 1:
            x = f"({x}) != 0" if dtype == "bool" else f"pd_write_{CTYPE[dtype]}({x})" if dtype in WIDENED else x
            return f"PD_PUT({n.buffer}, {index_text(n.address)}, {x});"
        x = f"vbyte({x})" if dtype == "bool" else x
        t, p = CTYPE[dtype], f"{n.buffer}, {index_text(n.address)}"
        prefix = self.prefix(n.lanes, dtype)
        if prefix != "v" and (n.stride != 1 or n.mask is not None or n.stream is not None):
            raise CodegenError(f"narrow vectors of {dtype} are stored whole and to neighbouring places only")
        if n.stride != 1:
            count = "PD_W" if n.mask is None else index_text(n.mask)
            return f"vstores_{t}({p}, {index_text(n.stride)}, {x}, {count});"
        if n.mask is not None:
            return f"vstorem_{t}({p}, {x}, {index_text(n.mask)});"
        if n.stream is not None and t == "f32":
            return f"vstream_f32({p}, {x}, {index_text(n.stream)});"
        return f"{prefix}store_{t}({p}, {x});"

    def _op(self, v: Op, lanes: int) -> str:
        if v.name == "cast":
            return self._cast(v, lanes)
        if v.name == "bitcast":
            s, pair = self.text(v.args[0], lanes), f"{CTYPE[v.args[0].dtype]}_{CTYPE[v.dtype]}"
            if {v.dtype, v.args[0].dtype} & WIDENED.keys():
                return self._bits(v, s, lanes)
            return f"pd_bitcast_{pair}({s})" if lanes == 1 else f"(({vector_type(v.dtype)}){s})"
        if v.name in ("where", "select"):
            return self._choice(v, lanes)
        if v.name == NIBBLE:
            return f"pd_nibble_{'v' * (lanes > 1)}i32({self.text(v.args[0], lanes)}, {self.text(v.args[1])})"
        args = [self.text(a, lanes) for a in v.args]
        source = v.args[-1].dtype
        if v.name in C_FUNCTIONS:
            return f"{v.name}({', '.join(args)})"
        if v.name in RELATIONS:
            if source == "bool" and lanes > 1:
                args.reverse()  # true is -1 in lanes
            return _mask(f"({args[0]} {RELATIONS[v.name]} {args[1]})", source, lanes)
        if source == "bool" or v.name in ("isnan", "isinf"):
            return _logic(v.name, args, lanes, source)
        if v.name == "add" and lanes > 1 and isinstance(new := v.args[1], Op) and new.name in ADDED:
            words = ", ".join(self.text(a, lanes) for a in new.args)
            return f"pd_{new.name}_add_{vector_type(source)}({args[0]}, {words})"
        if v.name in INFIX or v.name == "neg":
            return _arithmetic(v.name, args, source, lanes)
        if v.name == "reciprocal":
            return f"({'1.0f' if CVALUE[source] == 'f32' else '1'} / {args[0]})"
        if v.name == "div" and source in FLOATS:
            if (inverse := _exact_inverse(v.args[1])) is not None:
                return f"({args[0]} * {self.text(inverse, lanes)})"
            return f"({args[0]} / {args[1]})"
        suffix = vector_type(source) if lanes > 1 else CVALUE[source]
        if self.inline_math and suffix == "vf32" and v.name in INLINE_MATH:
            suffix = f"inline_{suffix}"
        return f"pd_{v.name}_{suffix}({', '.join(args)})"

    def _cast(self, v: Op, lanes: int) -> str:
        (x,) = v.args
        s = self.text(x, lanes)
        if v.dtype == x.dtype or v.dtype == WIDENED.get(x.dtype):
            return s
        if v.dtype in WIDENED:
            return self._rounded(v, s, lanes)
        cut = CVALUE[x.dtype] in ("f32", "f64") and v.dtype in INTEGERS
        if lanes == 1 and cut:
            return f"pd_cut({CVALUE[v.dtype]}, {s})"
        if lanes == 1:
            return f"(({s}) != 0)" if v.dtype == "bool" else f"(({CVALUE[v.dtype]})({s}))"
        if v.dtype == "uint8" and (inside := _clipped(x)) is not None:
            rounded = isinstance(inside, Op) and inside.name == "rint"
            return f"vclip_{'rint_' * rounded}u8({self.text(children(inside)[0] if rounded else inside, lanes)})"
        if v.dtype == "float32" and (near := _near(x)) is not None:
            return f"vnear_f32({', '.join(self.text(a, lanes) for a in near)})"
        if v.dtype == "bool":
            return _mask(f"({s} != 0)", x.dtype, lanes)
        if x.dtype in (*BYTES, *SHORTS) and v.dtype in ("int32", "float32"):
            s = self._widened(x, s, lanes) if x.dtype in BYTES else f"vwide_{CTYPE[x.dtype]}({s})"
            return s if v.dtype == "int32" else f"__builtin_convertvector({s}, {vector_type(v.dtype)})"
        if cut and v.dtype in SHORTS:  # by way of 32 bits, which the processor converts to
            return f"__builtin_convertvector(vcut(vi32, {s}), {vector_type(v.dtype)})"
        if cut:
            return f"vcut({vector_type(v.dtype)}, {s})"
        return f"__builtin_convertvector({f'(({s}) & 1)' if x.dtype == 'bool' else s}, {vector_type(v.dtype)})"

    def _widened(self, x: Value, s: str, lanes: int) -> str:
        """Convert bytes ``x``, in C ``s``, to 32-bit integers; a value that was one before keeps only its lowest bits.
        """
        if isinstance(x, Op) and x.name == "cast" and x.args[0].dtype == "int32":
            whole = self.text(x.args[0], lanes)
            return f"({whole} & 0xff)" if x.dtype == "uint8" else f"((vi32)((vu32){whole} << 24) >> 24)"
        return f"vwide_{CTYPE[x.dtype]}({s})"

    def _rounded(self, v: Op, s: str, lanes: int) -> str:
        """Round a value to a storage type."""
        t, wide, source = CTYPE[v.dtype], WIDENED[v.dtype], v.args[0].dtype
        if lanes == 1:
            s = f"pd_odd_f32({s})" if source == "float64" and wide == "float32" else f"({CVALUE[wide]})({s})"

            return f"pd_read_{t}(pd_write_{t}({s}))"
        if source == "float64":
            s = f"vodd_f32({s})"
        elif CVALUE[source] != CVALUE[wide]:
            s = f"__builtin_convertvector({f'(({s}) & 1)' if source == 'bool' else s}, {vector_type(wide)})"
        return f"vround_{t}({s})"

    def _bits(self, v: Op, s: str, lanes: int) -> str:
        """Reinterpret bits from or to a storage type. CodegenError: in lanes."""
        (x,) = v.args
        if lanes > 1:
            raise CodegenError(f"no bits of {x.dtype} as {v.dtype} in lanes")
        bits = f"pd_write_{CTYPE[x.dtype]}({s})" if x.dtype in WIDENED else f"({s})"
        return f"pd_read_{CTYPE[v.dtype]}({bits})" if v.dtype in WIDENED else f"(({CTYPE[v.dtype]}){bits})"

    def _choice(self, v: Op, lanes: int) -> str:
        c, a, b = v.args
        if lanes == 1 or ir.lanes_of(c) == 1:
            return f"(({self.text(c)}) ? {self.text(a, lanes)} : {self.text(b, lanes)})"
        kind = "i32" if v.dtype == "bool" else SHORT_NAME[v.dtype]
        return f"vsel_{kind}({self.text(c, lanes)}, {self.text(a, lanes)}, {self.text(b, lanes)})"


def _of_any_lanes(v: Value) -> bool:
    """Whether the C form of a value in lanes works for narrow vectors too: stored values, and C's own operators."""
    if not isinstance(v, Op):
        return isinstance(v, (ir.Reg, ir.FlatLoad, ir.Broadcast, Const, ir.Undefined))
    if v.name == "cast":
        return v.dtype in (v.args[0].dtype, WIDENED.get(v.args[0].dtype))
    return v.dtype == "float32" and (v.name in INFIX or v.name in ("neg", "div", "reciprocal"))


def _near(v: Value) -> tuple[Value, Value, Value] | None:
    """Match a byte minus its zero point, where the byte is ``x`` rounded, plus the zero point, and clipped.

    Return (x, low, high) or None. Low and high are the range of uint8 minus the zero point, so the byte and its two
    conversions are not needed.
    """
    zero: Value | None = None
    if isinstance(v, Op) and v.name == "sub":
        v, zero = v.args
    if not (isinstance(v, Op) and v.name == "cast" and v.dtype == "int32"):
        return None
    (byte,) = v.args
    if not (isinstance(byte, Op) and byte.name == "cast" and byte.dtype == "uint8"):
        return None
    x = _clipped(byte.args[0])
    ends: list[Value] = [const(e, "float32") for e in BYTE_ENDS]
    if zero is not None:
        point = cast(zero, "float32")
        if not (isinstance(x, Op) and x.name == "add" and x.args[1] == point):
            return None
        x, ends = x.args[0], [op("sub", e, point) for e in ends]
    return (x.args[0], ends[0], ends[1]) if isinstance(x, Op) and x.name == "rint" else None


def _clipped(v: Value) -> Value | None:
    """Return the float32 value that is clipped to the range of uint8 and converted to an integer, or None."""
    if not (isinstance(v, Op) and v.name == "cast" and v.dtype == "int32"):
        return None
    for name, end in zip(("min", "max"), BYTE_ENDS[::-1], strict=True):
        v = v.args[0]
        if not (isinstance(v, Op) and v.name == name and v.args[1] == Const("float32", end)):
            return None
    return v.args[0]


def _exact_inverse(v: Value) -> Const | None:
    """Return the reciprocal of a constant power of two: multiplying by it rounds like the division."""
    if not isinstance(v, Const) or not math.isfinite(v.value):
        return None
    fraction, exponent = math.frexp(v.value)
    return Const(v.dtype, 1 / float(v.value)) if abs(fraction) == 0.5 and abs(exponent) < 100 else None


def _arithmetic(name: str, args: list[str], dtype: str, lanes: int) -> str:
    """Return sums and products.

    Integers wrap as in numpy, which C guarantees only for unsigned types; narrow ones are cut.
    """
    sign = "-" if name == "neg" else INFIX[name]
    if dtype in FLOATS or (lanes > 1 and dtype == "uint8"):
        return f"({f' {sign} '.join(args)})" if name != "neg" else f"(-{args[0]})"
    wide, kind = "u64" if ITEMSIZE[dtype] == 8 else "u32", CTYPE[dtype]
    if lanes > 1:
        wide, kind = "vu8" if dtype == "int8" else "vu16" if dtype in SHORTS else f"v{wide}", f"v{kind}"
    operands = [f"({wide}){a}" for a in args]
    return f"(({kind})({'-' if name == 'neg' else ''}{f' {sign} '.join(operands)}))"


def _mask(text: str, source: str, lanes: int) -> str:
    """Return a comparison of values of dtype ``source`` as a boolean: in lanes, of the width of ``vb``."""
    return f"__builtin_convertvector({text}, vi32)" if lanes > 1 and source in OTHER_MASKS else text


def _logic(name: str, args: list[str], lanes: int, source: str) -> str:
    if name == "isnan":
        return _mask(f"({args[0]} != {args[0]})", source, lanes)
    if name == "isinf":
        suffix = vector_type(source) if lanes > 1 else CVALUE[source]
        return _mask(f"(pd_abs_{suffix}({args[0]}) == INFINITY)", source, lanes)
    if name == "not":
        return f"(~{args[0]})" if lanes > 1 else f"(!{args[0]})"
    if name not in ("and", "or", "xor", "max", "min"):
        raise CodegenError(f"{name} of booleans has no C form")
    if name == "xor":
        return f"({args[0]} ^ {args[1]})" if lanes > 1 else f"(!{args[0]} != !{args[1]})"
    both = name in ("and", "min")
    if lanes > 1:
        return f"({args[0]} {'&' if both else '|'} {args[1]})"
    return f"({args[0]} {'&&' if both else '||'} {args[1]})"


def _constant(v: Const) -> str:
    if CVALUE[v.dtype] in ("f32", "f64"):
        x = float(v.value)
        suffix = "f" if CVALUE[v.dtype] == "f32" else ""
        if math.isnan(x):
            return "NAN"
        if math.isinf(x):
            return "INFINITY" if x > 0 else "(-INFINITY)"
        text = f"{x!r}" if abs(x) < 3.5e38 or v.dtype == "float64" else "INFINITY"
        return f"({text}{suffix})" if x < 0 or text.startswith("-") else f"{text}{suffix}"
    if v.dtype == "bool":
        return "1" if v.value else "0"
    n = int(v.value)
    if n == -(2**63):
        return "INT64_MIN"
    return f"(({CVALUE[v.dtype]}){n}LL)" if v.dtype != "uint64" else f"{n}ULL"
