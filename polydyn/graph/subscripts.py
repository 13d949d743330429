"""Shape and subscript arithmetic that several operators share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polydyn.errors import UnsupportedError
from polydyn.graph.ir import Dim
from polydyn.graph.operators.registry import Context, OnnxNode
from polydyn.schedules.expr import Array
from polydyn.schedules.index import ONE, ZERO, Index, floordiv, product


def boxed(items: Sequence[Index] | Index, shape: tuple[int, ...] | None = None) -> Array:
    """Return an object array of Dims: of rank 0 for one Dim, else of the given shape (default: a vector)."""
    out = np.empty((() if isinstance(items, Index) else (len(items),)) if shape is None else shape, object)
    for i, x in enumerate([items] if isinstance(items, Index) else items):
        out.flat[i] = x
    return out


def ints(node: OnnxNode, ctx: Context, position: int, attribute: str) -> tuple[int, ...] | None:
    """Return constant integers from an input or, in older opsets, an attribute; None if the node has neither."""
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


def sizes(node: OnnxNode, ctx: Context, position: int, attribute: str) -> tuple[Dim, ...] | None:
    """Return sizes like ``ints``, but accept any shape arithmetic."""
    if attribute in node.attributes:
        return tuple(map(Index.of, ints(node, ctx, position, attribute) or ()))
    if len(node.inputs) <= position or not node.inputs[position]:
        return None
    value, known = ctx.value(node.inputs[position]), ctx.constant(node.inputs[position])
    if value is None and known is not None and (known == known.astype(np.int64)).all():
        return tuple(Index.of(int(x)) for x in known.reshape(-1))  # whole numbers of a float dtype, or very many
    if value is None:
        return data_sizes(node, ctx, node.inputs[position], attribute)
    return tuple(value.reshape(-1))


def is_data(node: OnnxNode, ctx: Context, position: int) -> bool:
    """Check whether an input is present and neither constant nor arithmetic on sizes."""
    name = node.inputs[position] if position < len(node.inputs) else ""
    return bool(name) and ctx.constant(name) is None and ctx.value(name) is None


def data_count(node: OnnxNode, ctx: Context, name: str, attribute: str) -> int:
    """Return the number of integers in a tensor that the host reads.

    Raises UnsupportedError if the number is unknown or too large, or if the elements are not integers.
    """
    t = ctx.tensor(name)
    count = product(t.shape).constant
    if t.dtype == "bool" or count is None or count > MAX_READ:
        raise UnsupportedError(
            f"{attribute} of {node.op} is data of type {t.dtype}{list(map(str, t.shape))}", node=node.name, tensor=name,
            rule=f"the host reads at most {MAX_READ} integers, and knows how many", remedy="export it as a constant",
        )  # fmt: skip
    return count


def data_sizes(node: OnnxNode, ctx: Context, name: str, attribute: str) -> tuple[Dim, ...]:
    """Return the elements of a tensor as sizes that depend on data."""
    names = [f"{attribute}{k}" for k in range(data_count(node, ctx, name, attribute))]
    found = ctx.ask("sizes", (name,), names, settings={"tensor": name})
    return tuple(x if d is None else d for d, x in zip(known_sizes(ctx, name, len(found)), found, strict=True))


def known_sizes(ctx: Context, name: str, count: int) -> list[Dim | None]:
    """Return the elements of a tensor that are shape arithmetic, and None for those that are data or -1."""
    known = ctx.known_elements(name)
    items = [None] * count if known is None else list(known.flat)
    return [x if isinstance(x, Index) and x != -1 else None for x in items]


MAX_READ = 64
"""Maximum integers of a tensor that may decide sizes."""


def reshape_subscripts(source: Sequence[Dim], target: Sequence[Dim], at: Sequence[Index]) -> tuple[Index, ...]:
    """Return the subscripts in the source of element ``at`` of the reshaped tensor (row-major order does not change).

    Groups of dims with the same product are handled separately, so that no division appears where dims agree.
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
    """Return the smallest group of dims before (i, j) with equal products on both sides."""
    for p in range(i - 1, -1, -1):
        for q in range(j - 1, -1, -1):
            if ends[0][p] == ends[1][q]:
                return p, q
    return 0, 0
