"""Operators of custom domains (docs/extending.md): by an ONNX function, by primitives in Python, by a C function.

All three become primitives of the graph: they are proven, fused and compiled like operators of ONNX, and a saved
program contains them. A registration is valid for this process. Names that polydyn or ONNX defines cannot be
registered.

>>> @operator("my.domain::Cube", infer=same_as_input)
... def cube(node, ctx):
...     (x,) = operands(node, ctx)
...     emit(ctx, node, op("mul", x, op("mul", x, x)))
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import onnx
import onnx.defs

from polydyn.build.cache import digest
from polydyn.errors import ModelError
from polydyn.graph.bodies import BODIES, FUNCTIONS, split_name
from polydyn.graph.ir import Dim
from polydyn.graph.operators.common import (
    ReductionIndices,
    aligned,
    at,
    broadcast_infer,
    emit,
    iterators,
    like,
    reduce_to,
    refuse,
    same_as_input,
)
from polydyn.graph.operators.elementwise import operands
from polydyn.graph.operators.registry import (
    OPERATORS,
    Context,
    ExpandContext,
    ExpandRule,
    InferContext,
    Inferred,
    InferRule,
    OnnxNode,
    Operator,
)
from polydyn.graph.propagate import load_operators
from polydyn.schedules.expr import FLOATS, INTEGERS, Array, Const, Value, c_function, cast, const, load, op

__all__ = [
    "Const", "Context", "Dim", "ExpandContext", "InferContext", "Inferred", "OnnxNode", "ReductionIndices", "Value",
    "aligned", "at", "broadcast_infer", "c_operator", "cast", "const", "emit", "fingerprint", "function", "iterators",
    "like", "load", "op", "operands", "operator", "reduce_to", "refuse", "same_as_input",
]  # fmt: skip

_REGISTERED: dict[str, str] = {}
"""Maps an operator to a digest of its registration; "" if Python rules define it, which have no digest of all that
they use.
"""


def operator(name: str, *, infer: InferRule) -> Callable[[ExpandRule], ExpandRule]:
    """Register ``domain::Name`` by primitives: a shape rule and an expansion, as in CONTRIBUTING.md.

    Raises ModelError if the name has no custom domain or is registered already.
    """
    _take(name)

    def register(expand: ExpandRule) -> ExpandRule:
        OPERATORS[name] = Operator(name, infer, expand)
        _REGISTERED[name] = ""
        return expand

    return register


def function(proto: onnx.FunctionProto) -> str:
    """Register an ONNX function as the body of the operator with its domain and name. Return the operator.

    A function inside a model needs no registration. Raises ModelError like ``operator``.
    """
    name = f"{proto.domain}::{proto.name}"
    _take(name)
    FUNCTIONS[name] = proto
    _REGISTERED[name] = digest(proto.SerializeToString(deterministic=True))
    return name


def c_operator(
    name: str,
    symbol: str,
    text: str,
    reference: Callable[..., Array],
    *,
    inputs: int = 1,
    dtype: str = "float32",
    infer: InferRule = broadcast_infer,
) -> None:
    """Register an operator whose elements are computed by a C function from one element of each input.

    ``symbol``: the function, which ``text`` defines as ``static inline``. It takes ``inputs`` numbers of ``dtype`` and
    returns one, has no side effects and reads no memory. ``reference``: the same function on numpy arrays, used to
    check it. ``infer``: the declared shape rule; the inputs are broadcast to its shape. Inputs of other dtypes are
    converted, and the result to the output's dtype. Only the CPU supports it. Raises ModelError like ``operator``, or
    for an invalid symbol or dtype.
    """
    _take(name)
    if not re.fullmatch(r"[A-Za-z_]\w*", symbol) or symbol not in text:
        raise ModelError(f"{name}: the text does not define {symbol!r}", remedy="name the C function that text defines")
    if dtype not in (*FLOATS[2:], *INTEGERS):
        raise ModelError(f"{name}: C functions of {dtype} are not built", remedy="float32, float64 or an integer type")
    c_function(symbol, inputs, reference, text)
    OPERATORS[name] = Operator(name, infer, partial(_call, symbol, inputs, dtype))
    plain = infer in (broadcast_infer, same_as_input)
    _REGISTERED[name] = digest(symbol, text, dtype, str(inputs), infer.__name__) if plain else ""


def fingerprint() -> str | None:
    """Return a digest of all registrations, part of the keys of cached programs; empty if there are none.

    Returns None if Python rules define an operator: two processes cannot tell whether their rules are equal, because
    rules may call any code. Programs are then not cached.
    """
    if not all(_REGISTERED.values()):
        return None
    return digest(*(f"{n}={d}" for n, d in sorted(_REGISTERED.items()))) if _REGISTERED else ""


def _call(symbol: str, inputs: int, dtype: str, node: OnnxNode, ctx: ExpandContext) -> None:
    given = operands(node, ctx)
    if len(given) != inputs:
        raise ModelError(f"{node.op} takes {inputs} inputs, not {len(given)}", node=node.name)
    emit(ctx, node, op(symbol, *(cast(x, dtype) for x in given)))


def _take(name: str) -> None:
    """Raise ModelError unless a custom operator may have the name."""
    domain, short = split_name(name)
    if not domain or not short or domain == "ai.onnx":
        raise ModelError(f"{name!r} is not of the form domain::Name", remedy="give the operator a domain of its own")
    if name in _REGISTERED:
        return
    try:
        onnx.defs.get_schema(short, onnx.defs.onnx_opset_version(), domain)
    except onnx.defs.SchemaError:
        if name not in load_operators() and name not in BODIES:
            return
    raise ModelError(f"{name} is defined already", remedy="give the operator another name")
