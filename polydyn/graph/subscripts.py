"""Small pieces of shape and subscript arithmetic that several operators share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polydyn.errors import UnsupportedError
from polydyn.graph.ir import Dim
from polydyn.graph.operators.registry import ExpandContext, InferContext, OnnxNode
from polydyn.schedules.expr import Array
from polydyn.schedules.index import ONE, ZERO, Index, floordiv, product


def boxed(items: Sequence[Index] | Index, shape: tuple[int, ...] | None = None) -> Array:
    """An object array of Dims: of rank 0 for one Dim, else of the given shape (default: a vector)."""
    out = np.empty((() if isinstance(items, Index) else (len(items),)) if shape is None else shape, object)
    for i, x in enumerate([items] if isinstance(items, Index) else items):
        out.flat[i] = x
    return out


def ints(node: OnnxNode, ctx: InferContext | ExpandContext, position: int, attribute: str) -> tuple[int, ...] | None:
    """Constant integers from an input or, in older opsets, an attribute; None when the node gives neither."""
    if attribute in node.attributes:
        given = node.attributes[attribute]
        return (int(given),) if isinstance(given, int) else tuple(map(int, given))
    if len(node.inputs) <= position or not node.inputs[position]:
        return None
    array = ctx.constant(node.inputs[position])
    if array is None:
        raise UnsupportedError(
            f"{attribute} of {node.op} must be constant", node=node.name, tensor=node.inputs[position],
        )  # fmt: skip
    return tuple(int(x) for x in array.reshape(-1))


def sizes(node: OnnxNode, ctx: InferContext | ExpandContext, position: int, attribute: str) -> tuple[Dim, ...] | None:
    """Like ``ints``, but any shape arithmetic will do."""
    if attribute in node.attributes:
        return tuple(map(Index.of, ints(node, ctx, position, attribute) or ()))
    if len(node.inputs) <= position or not node.inputs[position]:
        return None
    value, known = ctx.value(node.inputs[position]), ctx.constant(node.inputs[position])
    if value is None and known is not None and (known == known.astype(np.int64)).all():
        return tuple(Index.of(int(x)) for x in known.reshape(-1))  # whole numbers of a float dtype, or very many
    if value is None:
        raise UnsupportedError(
            f"{attribute} of {node.op} is not arithmetic on the sizes of the inputs", node=node.name,
            tensor=node.inputs[position], remedy="sizes that depend on data are not supported",
        )  # fmt: skip
    return tuple(value.reshape(-1))


def reshape_subscripts(source: Sequence[Dim], target: Sequence[Dim], at: Sequence[Index]) -> tuple[Index, ...]:
    """Where element ``at`` of the reshaped tensor lies in the source (row-major order is kept).

    Groups of dims with the same product are treated apart, so that no division appears where dims agree.
    """
    out = [ZERO] * len(source)
    src = [k for k, d in enumerate(source) if d != 1]
    dst = [k for k, d in enumerate(target) if d != 1]
    ends = _suffix_products([source[k] for k in src]), _suffix_products([target[k] for k in dst])
    i, j = len(src), len(dst)
    while i and j:
        p, q = _group(ends, i, j)
        linear = ZERO
        for k in dst[q:j]:
            linear = linear * target[k] + at[k]
        stride = ONE
        for k in reversed(src[p:i]):
            quotient = floordiv(linear, stride)
            out[k] = quotient if k == src[p] else quotient - source[k] * floordiv(quotient, source[k])
            stride = stride * source[k]
        i, j = p, q
    return tuple(out)


def _suffix_products(dims: list[Dim]) -> list[Index]:
    return [product(dims[k:]) for k in range(len(dims) + 1)]


def _group(ends: tuple[list[Index], list[Index]], i: int, j: int) -> tuple[int, int]:
    """The smallest group of dims before (i, j) with equal products on both sides."""
    for p in range(i - 1, -1, -1):
        for q in range(j - 1, -1, -1):
            if ends[0][p] == ends[1][q]:
                return p, q
    return 0, 0
