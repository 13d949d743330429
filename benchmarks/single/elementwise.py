"""Cases of one element at a time: functions, arithmetic with broadcasts, comparisons, casts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from onnx import TensorProto

from benchmarks.single.case import MICROSOFT, Case, Net, Sizes, cases

FLAT: Sizes = ((256, 768), (1000, 1001), (30000, 7))
FLOATS = "f32 f16 f64"
PLAIN = [
    "Abs",
    "Neg",
    "Sign",
    "Ceil",
    "Floor",
    "Round",
    "Relu",
    "Sigmoid",
    "Tanh",
    "Exp",
    "Erf",
    "Sin",
    "Cos",
    "Tan",
    "Sinh",
    "Cosh",
    "Atan",
    "Asinh",
    "Softplus",
    "Softsign",
    "Elu",
    "Selu",
    "Celu",
    "HardSigmoid",
    "HardSwish",
    "LeakyRelu",
    "Mish",
    "ThresholdedRelu",
    "Gelu",
    "Shrink",
    "Reciprocal",
    "IsNaN",
    "IsInf",
    "Identity",
]
POSITIVE = ("Log", "Sqrt")
WITHIN_ONE = ("Acos", "Asin", "Atanh")
LESS_COMMON = {"Sinh", "Cosh", "Asinh", "Acosh", "Acos", "Asin", "Atanh", "Tan", "Shrink", "ThresholdedRelu", "Mish"}
BROADCASTS: dict[str, tuple[str, str, Sizes]] = {
    "same": ("R,L", "R,L", FLAT),
    "row": ("R,L", "L", FLAT),
    "column": ("R,L", "R,1", FLAT),
    "channel": ("N,64,H,W", "1,64,1,1", ((1, 56, 56), (4, 61, 59), (32, 7, 7))),
    "outer": ("R,1", "1,L", FLAT),
    "middle": ("R,1,L", "1,12,1", ((128, 128), (3, 4001), (4001, 3))),
    "both ways": ("R,1,L,1", "1,7,1,S", ((16, 31, 64), (64, 5, 3), (2, 129, 129))),
    "scalar": ("R,L", "", FLAT),
    "square": ("R,L,L", "L,L", ((12, 128), (64, 33), (3, 512))),
}


def node(operator: str, net: Net, *operands: str, **attributes: Any) -> Any:
    """Add one operator of all inputs."""
    return getattr(net, operator)(*operands, **attributes)


def unary() -> Iterator[Case]:
    """Functions of one operand."""
    for op in (*PLAIN, *POSITIVE, *WITHIN_ONE, "Acosh"):
        mark = "+" if op in POSITIVE else "~" if op in WITHIN_ONE else ""
        build = partial(node, op)
        if op == "Acosh":
            build = lambda net, x: net.Acosh(net.Add(x, 1.0))  # noqa: E731
            mark = "+"
        yield from cases(
            op, f"T{mark} R,L", build, FLAT[: 2 if op in LESS_COMMON else 3], "f32 f64" if op in LESS_COMMON else FLOATS
        )
    for op in ("Abs", "Neg", "Sign", "Relu"):
        yield from cases(op, "T R,L", partial(node, op), FLAT[:2], "i64 i32 i8")
    yield from cases("Not", "T R,L", partial(node, "Not"), FLAT, "b")
    yield from cases("BitwiseNot", "T R,L", partial(node, "BitwiseNot"), FLAT[:2], "i64 u8")
    yield from cases("Gelu tanh", "T R,L", partial(node, "Gelu", approximate="tanh"), FLAT, FLOATS)
    yield from cases("Swish", "T R,L", partial(node, "Swish"), FLAT[:2], opset=24)
    for op in ("Gelu", "FastGelu", "QuickGelu"):
        yield from cases(f"Microsoft's {op}", "T R,L", partial(node, op, domain=MICROSOFT), FLAT[:2], "f32")
    yield from cases("BiasGelu", "T R,768; T 768", partial(node, "BiasGelu", domain=MICROSOFT), ((256,), (1001,)))
    yield from cases("Clip", "T R,L", lambda n, x: n.Clip(x, 0.0, 6.0), FLAT, FLOATS)
    yield from cases(
        "Clip", "T R,L", lambda n, x: n.Clip(x, *(np.asarray(v, n.kind) for v in (1, 9))), FLAT[:2], "i64 i8 u8"
    )
    yield from cases(
        "PRelu", "T N,64,H,W", lambda n, x: n.PRelu(x, n.weight(64, 1, 1)), ((1, 56, 56), (4, 61, 59)), FLOATS
    )
    yield from cases("Dropout", "T R,L", partial(node, "Dropout"), FLAT[:1])


def binary() -> Iterator[Case]:
    """Arithmetic and comparisons of two operands."""
    for op in ("Add", "Sub", "Mul", "Div"):
        yield from cases(f"{op} same", "T R,L; T+ R,L", partial(node, op), FLAT, "f32 f16 f64 i64 i32 i8 u8")
    for name, (a, b, sizes) in BROADCASTS.items():
        if name != "same":
            yield from cases(f"Mul {name}", f"T {a}; T {b}", partial(node, "Mul"), sizes, "f32 f16 i64")
            yield from cases(f"Equal {name}", f"T {a}; T {b}", partial(node, "Equal"), sizes, "f32")
    for op in ("Less", "Greater", "LessOrEqual", "GreaterOrEqual", "Equal"):
        yield from cases(
            f"{op} row", "T R,L; T L", partial(node, op), FLAT[:2], "f32 i64 i32" if op != "Equal" else "i64 i32"
        )
    for op in ("Max", "Min"):
        yield from cases(f"{op} same", "T R,L; T R,L", partial(node, op), FLAT, "f32 f16 f64 i64 u8")
        yield from cases(f"{op} of three", "T R,L; T L; T R,1", partial(node, op), FLAT[:2], "f32 i64")
    for op in ("Sum", "Mean"):
        yield from cases(f"{op} of three", "T R,L; T R,L; T R,L", partial(node, op), FLAT[:2], FLOATS)
    for op in ("And", "Or", "Xor"):
        yield from cases(f"{op} row", "T R,L; T L", partial(node, op), FLAT, "b")
    for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor"):
        yield from cases(op, "T R,L; T R,L", partial(node, op), FLAT[:2], "i64 u8")
    yield from cases("BitShift", "T R,L; T<7 R,L", partial(node, "BitShift", direction="LEFT"), FLAT[:2], "u64 u8")
    yield from cases("Pow of 2", "T R,L", lambda n, x: n.Pow(x, 2.0), FLAT[:2], FLOATS)
    yield from cases("Pow of 3", "T R,L", lambda n, x: n.Pow(x, 3.0), FLAT[:2], FLOATS)
    yield from cases("Pow of 0.5", "T+ R,L", lambda n, x: n.Pow(x, 0.5), FLAT[:2], FLOATS)
    yield from cases("Pow", "T+ R,L; T R,L", partial(node, "Pow"), FLAT[:2], FLOATS)
    yield from cases("Mod", "T R,L; T+ L", partial(node, "Mod"), FLAT[:2], "i64 i32 u8")
    yield from cases("Mod of floats", "T R,L; T+ L", partial(node, "Mod", fmod=1), FLAT[:2], "f32 f64")


def other() -> Iterator[Case]:
    """Choices, casts, and rows of several operators."""
    types = "f32 f16 f64 i64 u8"
    yield from cases("Where same", "b R,L; T R,L; T R,L", partial(node, "Where"), FLAT, types)
    yield from cases("Where scalar", "b R,L; T R,L", lambda n, c, x: n.Where(c, x, np.zeros((), n.kind)), FLAT, types)
    yield from cases(
        "Where mask of rows",
        "b B,1,1,L; T B,12,L,L",
        lambda n, c, x: n.Where(c, x, -1e4),
        ((1, 128), (4, 61)),
        "f32 f16",
    )
    pairs = "f32-f16 f16-f32 f32-f64 f64-f32 f32-i64 i64-f32 f32-i32 i32-f32 f32-u8 u8-f32 f32-b b-f32 i64-i32 i32-i64 "
    for pair in (pairs + "u8-i32 b-i64 i64-b i8-f32 f32-i8 f32-bf16").split():
        source, target = pair.split("-")
        to = getattr(
            TensorProto,
            {
                "f32": "FLOAT",
                "f16": "FLOAT16",
                "f64": "DOUBLE",
                "i64": "INT64",
                "i32": "INT32",
                "u8": "UINT8",
                "i8": "INT8",
                "b": "BOOL",
                "bf16": "BFLOAT16",
            }[target],
        )
        yield from cases(f"Cast to {target} from", "T R,L", partial(node, "Cast", to=to), FLAT[:2], source)
    yield from cases("CastLike", "f32 R,L; f16 1", partial(node, "CastLike"), FLAT[:1])
    yield from cases("NaN to number", "T R,L", lambda n, x: n.Where(n.IsNaN(x), 0.0, x), FLAT[:2], "f32 f64")
    yield from cases(
        "bucketize",
        "T R; T 33",
        lambda n, x, e: n.ReduceSum(n.Cast(n.GreaterOrEqual(n.Unsqueeze(x, [1]), e), to=7), [1]),
        ((4000,), (60001,)),
        "f32 f64",
    )


def every() -> Iterator[Case]:
    """Yield all cases of this module."""
    yield from unary()
    yield from binary()
    yield from other()
