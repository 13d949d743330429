"""Element-wise operators of one, two or any number of inputs, with numpy's broadcasting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from polydyn.graph.operators.common import (
    aligned,
    at,
    broadcast_infer,
    emit,
    is_float,
    iterators,
    like,
    refuse,
    same_as_input,
    scalar,
    square,
    wide,
)
from polydyn.graph.operators.registry import ExpandContext, InferContext, Inferred, OnnxNode, operator
from polydyn.schedules.expr import ITEMSIZE, Value, cast, op
from polydyn.schedules.index import Index


def operands(node: OnnxNode, ctx: ExpandContext) -> list[Value]:
    """Return loads of all inputs, aligned to the output, with 16-bit floats widened."""
    index = iterators(len(ctx.tensor(node.outputs[0]).shape))
    return [wide(aligned(ctx, x, index)) for x in node.inputs if x]


def predicate_infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer like broadcast_infer, with a boolean output."""
    return tuple(replace(r, dtype="bool") for r in broadcast_infer(node, ctx))


def first_dtype_infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer like broadcast_infer, with the first input's dtype."""
    dtype = ctx.tensor(node.inputs[0]).dtype
    return tuple(replace(r, dtype=dtype) for r in broadcast_infer(node, ctx))


def _binary(name: str, node: OnnxNode, ctx: ExpandContext) -> None:
    a, b = operands(node, ctx)
    emit(ctx, node, op(name, a, b))


def _bit_shift(node: OnnxNode, ctx: ExpandContext) -> None:
    a, b = operands(node, ctx)
    emit(ctx, node, op("shl" if node.attribute("direction") == "LEFT" else "shr", a, b))


BINARY = {
    "Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div",
    "BitwiseAnd": "bitand", "BitwiseOr": "bitor", "BitwiseXor": "bitxor",
}  # fmt: skip
PREDICATES = {
    "And": "and", "Or": "or", "Xor": "xor", "Equal": "eq",
    "Less": "lt", "LessOrEqual": "le", "Greater": "gt", "GreaterOrEqual": "ge",
}  # fmt: skip

for _onnx, _name in BINARY.items():
    operator(_onnx, infer=broadcast_infer)(partial(_binary, _name))
operator("BitShift", infer=broadcast_infer)(_bit_shift)
for _onnx, _name in PREDICATES.items():
    operator(_onnx, infer=predicate_infer)(partial(_binary, _name))


@operator("Where", infer=broadcast_infer)
def where(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute ``where(condition, x, y)``."""
    emit(ctx, node, op("where", *operands(node, ctx)))


@operator("Not", infer=predicate_infer)
def logical_not(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute the negation."""
    emit(ctx, node, op("not", *operands(node, ctx)))


@operator("IsNaN", infer=predicate_infer)
def is_nan(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute whether an element is NaN."""
    emit(ctx, node, op("isnan", *operands(node, ctx)))


@operator("IsInf", infer=predicate_infer)
def is_inf(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute whether an element is infinite with one of the signs that the attributes select."""
    (x,) = operands(node, ctx)
    result = op("isinf", x)
    if not node.attribute("detect_negative", 1):
        result = op("and", result, op("gt", x, like(0, x)))
    if not node.attribute("detect_positive", 1):
        result = op("and", result, op("lt", x, like(0, x)))
    emit(ctx, node, result)


@operator("Mod", infer=broadcast_infer)
def mod(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute the remainder with the divisor's sign, or with ``fmod`` the dividend's sign."""
    _binary("fmod" if node.attribute("fmod", 0) else "mod", node, ctx)


def power_infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer like first_dtype_infer. An integral power of two constants is known shape arithmetic
    (``side = n ** 0.5``).
    """
    (out,) = first_dtype_infer(node, ctx)
    base, exponent = (ctx.constant(x) for x in node.inputs)
    if base is None or exponent is None or base.size != 1 or exponent.size != 1:
        return (out,)
    with np.errstate(all="ignore"):
        number = float(np.power(base.reshape(-1)[0].astype(np.float64), exponent.reshape(-1)[0].astype(np.float64)))
    if not 0 <= number < 2**53 or number != int(number) or len(out.shape) > 1:
        return (out,)
    value = np.full((1,) * len(out.shape), Index.of(int(number)), object)
    return (replace(out, value=value),)


@operator("Pow", infer=power_infer)
def power(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute ``x ** y``. The constant exponents 1, 2, 3 and 0.5 become products and a square root.

    Operands of two kinds, and float64 exponents, are computed in float64, unless the exponent is a constant that the
    base's float type represents.
    """
    x, y = operands(node, ctx)
    exponent = scalar(ctx, node.inputs[1])
    if exponent in (1, 2, 3):
        emit(ctx, node, x if exponent == 1 else square(x) if exponent == 2 else op("mul", square(x), x))
        return
    mixed = is_float(y.dtype) != is_float(x.dtype) and ITEMSIZE[y.dtype] + ITEMSIZE[x.dtype] > 4
    if mixed or y.dtype == "float64":
        exact = exponent is not None and is_float(x.dtype) and float(np.float32(exponent)) == exponent
        x = x if exact else cast(x, "float64")
    emit(ctx, node, op("sqrt", x) if exponent == 0.5 else op("pow", x, cast(y, x.dtype)))


def _fold(name: str, node: OnnxNode, ctx: ExpandContext) -> None:
    values = operands(node, ctx)
    shape = ctx.tensor(node.outputs[0]).shape
    total = values[0]
    for k, v in enumerate(values[1:], 1):
        total = op(name, total, v)
        if k % MAX_OPERANDS == 0:  # bounds the nesting depth
            total = at(ctx, ctx.compute(shape, total), iterators(len(shape)))
    emit(ctx, node, op("div", total, like(len(values), total)) if node.op == "Mean" else total)


MAX_OPERANDS = 64
"""Maximum operands of a Sum and similar operators in one expression."""


for _onnx, _name in {"Sum": "add", "Mean": "add", "Max": "max", "Min": "min"}.items():
    operator(_onnx, infer=broadcast_infer)(partial(_fold, _name))


@operator("Clip", infer=same_as_input)
def clip(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute ``min(max(x, low), high)``. The bounds are inputs, or attributes before opset 11."""
    index = iterators(len(ctx.tensor(node.inputs[0]).shape))
    x = wide(aligned(ctx, node.inputs[0], index))
    for position, (name, keep) in enumerate((("min", "max"), ("max", "min")), 1):
        if position < len(node.inputs) and node.inputs[position]:
            x = op(keep, x, wide(aligned(ctx, node.inputs[position], index)))
        elif node.attribute(name) is not None:
            x = op(keep, x, like(node.attribute(name), x))
    emit(ctx, node, x)


@operator("PRelu", infer=first_dtype_infer)
def prelu(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute ``slope * x`` below zero, else x."""
    x, slope = operands(node, ctx)
    emit(ctx, node, op("where", op("lt", x, like(0, x)), op("mul", slope, x), x))


# -- functions of one input ------------------------------------------------------------------------------------------

Function = Callable[[OnnxNode, Value], Value]


def _softplus(x: Value) -> Value:
    """Return ``log(1 + exp(x))`` without overflow."""
    tail = op("log1p", op("exp", op("neg", op("abs", x))))
    return op("add", op("max", x, like(0, x)), tail)


def _gelu(node: OnnxNode, x: Value) -> Value:
    kind = node.attribute("approximate", "none")
    half = op("mul", like(0.5, x), x)
    if kind == "none":
        inner = op("erf", op("mul", x, like(0.7071067811865476, x)))
    elif kind == "tanh":
        cubic = op("mul", like(0.044715, x), op("mul", square(x), x))
        inner = op("tanh", op("mul", like(0.7978845608028654, x), op("add", x, cubic)))
    else:
        raise refuse(node, f"approximate={kind}")
    return op("mul", half, op("add", like(1, x), inner))


def _exp_minus_one(x: Value, scale: float) -> Value:
    """Return ``exp(scale * x) - 1``."""
    arg = x if scale == 1 else op("mul", x, like(scale, x))
    return op("expm1", arg)


def _below_zero(x: Value, below: Value, otherwise: Value) -> Value:
    return op("where", op("lt", x, like(0, x)), below, otherwise)


def _elu(node: OnnxNode, x: Value) -> Value:
    return _below_zero(x, op("mul", like(node.attribute("alpha", 1.0), x), _exp_minus_one(x, 1)), x)


def _selu(node: OnnxNode, x: Value) -> Value:
    alpha = like(node.attribute("alpha", 1.6732632423543772), x)
    gamma = like(node.attribute("gamma", 1.0507009873554805), x)
    return op("mul", gamma, _below_zero(x, op("mul", alpha, _exp_minus_one(x, 1)), x))


def _celu(node: OnnxNode, x: Value) -> Value:
    alpha = node.attribute("alpha", 1.0)
    return _below_zero(x, op("mul", like(alpha, x), _exp_minus_one(x, 1 / alpha)), x)


def _unit(x: Value) -> Value:
    """Clamp to [0, 1]."""
    return op("max", like(0, x), op("min", like(1, x), x))


def _hard_sigmoid(node: OnnxNode, x: Value) -> Value:
    scaled = op("mul", like(node.attribute("alpha", 0.2), x), x)
    return _unit(op("add", scaled, like(node.attribute("beta", 0.5), x)))


def _hard_swish(node: OnnxNode, x: Value) -> Value:
    return op("mul", x, _unit(op("add", op("mul", like(1 / 6, x), x), like(0.5, x))))


def _leaky_relu(node: OnnxNode, x: Value) -> Value:
    return _below_zero(x, op("mul", like(node.attribute("alpha", 0.01), x), x), x)


def _thresholded_relu(node: OnnxNode, x: Value) -> Value:
    return op("where", op("gt", x, like(node.attribute("alpha", 1.0), x)), x, like(0, x))


def _shrink(node: OnnxNode, x: Value) -> Value:
    """Shrink towards 0 by the bias, and to 0 near it. Integers are compared with the float bound."""
    x = x if is_float(x.dtype) else cast(x, "float64")
    bound, bias = node.attribute("lambd", 0.5), like(node.attribute("bias", 0.0), x)
    above = op("where", op("gt", x, like(bound, x)), op("sub", x, bias), like(0, x))
    return op("where", op("lt", x, like(-bound, x)), op("add", x, bias), above)


def _swish(node: OnnxNode, x: Value) -> Value:
    alpha = node.attribute("alpha", 1.0)
    return op("mul", x, op("sigmoid", x if alpha == 1 else op("mul", like(alpha, x), x)))


FUNCTIONS: dict[str, Function] = {
    "Relu": lambda n, x: op("max", x, like(0, x)), "LeakyRelu": _leaky_relu, "ThresholdedRelu": _thresholded_relu,
    "Elu": _elu, "Selu": _selu, "Celu": _celu, "Shrink": _shrink, "Gelu": _gelu, "Swish": _swish,
    "HardSigmoid": _hard_sigmoid, "HardSwish": _hard_swish,
    "Softplus": lambda n, x: _softplus(x), "Mish": lambda n, x: op("mul", x, op("tanh", _softplus(x))),
    "Softsign": lambda n, x: op("div", x, op("add", like(1, x), op("abs", x))),
}  # fmt: skip
"""Operators that are an expression of several scalar operations."""

SCALAR_OPS: Sequence[tuple[str, str]] = (
    ("Neg", "neg"), ("Abs", "abs"), ("Sign", "sign"), ("Exp", "exp"), ("Log", "log"), ("Sqrt", "sqrt"),
    ("Reciprocal", "reciprocal"), ("Tanh", "tanh"), ("Erf", "erf"), ("Sin", "sin"), ("Cos", "cos"),
    ("Sigmoid", "sigmoid"), ("Floor", "floor"), ("Ceil", "ceil"), ("Round", "rint"),
    ("Tan", "tan"), ("Asin", "asin"), ("Acos", "acos"), ("Atan", "atan"), ("Sinh", "sinh"), ("Cosh", "cosh"),
    ("Asinh", "asinh"), ("Acosh", "acosh"), ("Atanh", "atanh"), ("BitwiseNot", "bitnot"),
)  # fmt: skip
"""Operators that are one scalar operation."""


def _apply(function: Function, node: OnnxNode, ctx: ExpandContext) -> None:
    (x,) = operands(node, ctx)
    emit(ctx, node, function(node, x))


def _apply_op(name: str, node: OnnxNode, ctx: ExpandContext) -> None:
    emit(ctx, node, op(name, *operands(node, ctx)))


for _onnx, _function in FUNCTIONS.items():
    operator(_onnx, infer=broadcast_infer)(partial(_apply, _function))
for _onnx, _name in SCALAR_OPS:
    operator(_onnx, infer=broadcast_infer)(partial(_apply_op, _name))
