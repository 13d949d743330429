"""Operators that read sizes or reshape tensors: Shape, Reshape, Transpose, Expand, Tile, Cast ..."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from polydyn.errors import ModelError, ShapeError, UnsupportedError
from polydyn.graph.dtypes import onnx_dtype
from polydyn.graph.importer import ImportedGraph, inner_prefix
from polydyn.graph.ir import Dim
from polydyn.graph.operators.common import iterators, normalize_axis, wide
from polydyn.graph.operators.registry import (
    ExpandContext,
    InferContext,
    Inferred,
    OnnxNode,
    Rewritten,
    operator,
)  # fmt: skip
from polydyn.graph.subscripts import (
    boxed,
    data_count,
    data_sizes,
    ints,
    is_data,
    known_sizes,
    reshape_subscripts,
    sizes,
)
from polydyn.schedules.expr import FLOATS, ITEMSIZE, SMALL_INTEGERS, Array, Value, bitcast, cast, const, load, op
from polydyn.schedules.index import ONE, Index, floordiv, product
from polydyn.shapes.context import Undecided
from polydyn.shapes.rules import content


def reshaped(value: Array | None, shape: tuple[Dim, ...]) -> Array | None:
    """Reshape shape arithmetic, if the new shape is constant."""
    if value is None or any(d.constant is None for d in shape):
        return None
    out: Array = value.reshape([int(d) for d in shape])
    return out


def expand_view(node: OnnxNode, ctx: ExpandContext) -> None:
    """Rename elements in row-major order: Reshape, Flatten, Squeeze, Unsqueeze."""
    source, target = ctx.tensor(node.inputs[0]), ctx.tensor(node.outputs[0])
    if source.shape == target.shape:
        ctx.alias(target.name, source.name)
        return
    at = reshape_subscripts(source.shape, target.shape, iterators(len(target.shape)))
    ctx.compute(target.shape, load(source.name, at, source.dtype), output=target.name)


def expand_alias(node: OnnxNode, ctx: ExpandContext) -> None:
    """Alias the input."""
    ctx.alias(node.outputs[0], node.inputs[0])


def no_data(node: OnnxNode, ctx: ExpandContext) -> None:
    """Raise an error: never called, because the results are always shape arithmetic."""
    raise UnsupportedError(f"{node.op} is not shape arithmetic here", node=node.name)


def infer_shape(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer the sizes of axes start to end."""
    dims = ctx.tensor(node.inputs[0]).shape
    dims = dims[node.attribute("start", 0) : node.attribute("end", None)]
    return (Inferred("int64", (Index.of(len(dims)),), boxed(dims)),)


operator("Shape", infer=infer_shape)(no_data)


def infer_size(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer the number of elements."""
    return (Inferred("int64", (), boxed(product(ctx.tensor(node.inputs[0]).shape))),)


operator("Size", infer=infer_size)(no_data)


def infer_reshape(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer a Reshape: 0 copies a dim (unless allowzero), one -1 takes the remaining elements; the products must
    agree.
    """
    x = ctx.tensor(node.inputs[0])
    if is_data(node, ctx, 1):
        return (Inferred(x.dtype, _shape_of_data(node, ctx)),)
    requested = sizes(node, ctx, 1, "shape")
    if requested is None:
        raise ShapeError("Reshape without a shape", tensor=node.inputs[0])
    shape: list[Dim] = []
    for axis, d in enumerate(requested):
        if d == 0 and not node.attribute("allowzero", 0):
            if axis >= len(x.shape):
                raise ShapeError(f"0 at position {axis} copies a dim that does not exist", tensor=x.name)
            d = x.shape[axis]
        shape.append(d)
    free = [axis for axis, d in enumerate(shape) if d == -1]
    if len(free) > 1:
        raise ShapeError(f"{len(free)} sizes are -1", tensor=x.name, rule="at most one size of Reshape is -1")
    why = f"{x.name} {list(x.shape)} is reshaped to {list(requested)}"
    left, right = _unshared(x.shape, [d for d in shape if d != -1])
    if free:
        shape[free[0]] = floordiv(left, right)
        ctx.unify(left, shape[free[0]] * right, why)
    elif _is_divided(left, right):
        ctx.unify(left, right, why)
    else:
        ctx.unify(product(x.shape), product(shape), why)
    return (Inferred(x.dtype, tuple(shape), reshaped(ctx.known_elements(x.name), tuple(shape))),)


def _shape_of_data(node: OnnxNode, ctx: InferContext) -> tuple[Dim, ...]:
    """Request the sizes that 0 and -1 represent from the host."""
    names = [f"shape{k}" for k in range(data_count(node, ctx, node.inputs[1], "shape"))]
    allowzero = int(node.attribute("allowzero", 0))
    known = [None if d == 0 and not allowzero else d for d in known_sizes(ctx, node.inputs[1], len(names))]
    return _same_elements(node, ctx, "reshape", names, {"allowzero": allowzero}, known)


def _same_elements(
    node: OnnxNode, ctx: InferContext, kind: str, names: Sequence[str], settings: Mapping[str, int] | None = None,
    known: Sequence[Dim | None] = (),
) -> tuple[Dim, ...]:  # fmt: skip
    """Request sizes from the host, except the known ones, with as many elements as the input has."""
    x = ctx.tensor(node.inputs[0])
    sizes_found = ctx.ask(kind, node.inputs[1:2], names, x.shape, settings)
    sizes_found = tuple(s if d is None else d for s, d in zip(sizes_found, known or sizes_found, strict=True))
    count, why = product(sizes_found), f"{x.name} has as many elements before as after"
    ctx.promise(count, product(x.shape), why)
    ctx.promise(product(x.shape), count, why)
    return sizes_found


def _unshared(old: Sequence[Dim], new: Sequence[Dim]) -> tuple[Index, Index]:
    """Return the products of two shapes without the dims that both have: for (B, L) and (B, 2), L and 2."""
    left, right = list(old), list(new)
    for d in new:
        if d.constant is None and d in left:
            left.remove(d)
            right.remove(d)
    return product(left), product(right)


def _is_divided(x: Index, parts: Index) -> bool:
    """Check whether ``parts`` is ``blocks`` times ``x // blocks``, which is x if x is a multiple of ``blocks``."""
    blocks = content(parts)
    return blocks > 1 and parts == floordiv(x, Index.of(blocks)) * blocks


operator("Reshape", infer=infer_reshape)(expand_view)


def infer_flatten(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer a Flatten: the product of the dims before the axis and of those from it on."""
    x = ctx.tensor(node.inputs[0])
    axis = node.attribute("axis", 1)
    axis = axis if axis == len(x.shape) else normalize_axis(node, axis, len(x.shape))
    shape = (product(x.shape[:axis]), product(x.shape[axis:]))
    return (Inferred(x.dtype, shape, reshaped(ctx.known_elements(x.name), shape)),)


operator("Flatten", infer=infer_flatten)(expand_view)


def infer_squeeze(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer a Squeeze: the given axes must be 1; without axes, those that are known to be 1."""
    x = ctx.tensor(node.inputs[0])
    if is_data(node, ctx, 1):
        left = len(x.shape) - data_count(node, ctx, node.inputs[1], "axes")
        return (Inferred(x.dtype, _same_elements(node, ctx, "squeeze", [f"size{k}" for k in range(left)])),)
    axes = ints(node, ctx, 1, "axes")
    if axes is None:
        squeezed = {a for a, d in enumerate(x.shape) if ctx.equal(d, ONE)}
        if open_axes := [a for a, d in enumerate(x.shape) if ctx.equal(d, ONE) is None]:
            raise _squeeze_of_each_rank(node, ctx, squeezed, open_axes)
    else:
        squeezed = {normalize_axis(node, a, len(x.shape)) for a in axes}
        for a in squeezed:
            ctx.unify(x.shape[a], ONE, f"axis {a} of {x.name} is squeezed")
    shape = tuple(d for a, d in enumerate(x.shape) if a not in squeezed)
    return (Inferred(x.dtype, shape, reshaped(ctx.known_elements(x.name), shape)),)


operator("Squeeze", infer=infer_squeeze)(expand_view)

MAX_OPEN_AXES = 3
"""Maximum axes of unknown size in a Squeeze without axes. There are ``2 ** MAX_OPEN_AXES`` versions."""


def _squeeze_of_each_rank(node: OnnxNode, ctx: InferContext, squeezed: set[int], open_axes: list[int]) -> Exception:
    """Return the replacement of a Squeeze without axes: one If, with axes inside, per axis whose size may be 1."""
    x = ctx.tensor(node.inputs[0])
    axis, dim = open_axes[0], x.shape[open_axes[0]]
    question = f"whether axis {axis} of {x.name}, {dim}, is 1 is not known, nor then the rank of the result"
    error = ctx.undecided(question, (dim,), "give the axes of Squeeze, or a range of the dim that decides it")
    if isinstance(error, Undecided) or len(open_axes) > MAX_OPEN_AXES:
        return error
    return Rewritten(_squeezed(node, frozenset(squeezed), open_axes))


def _squeezed(node: OnnxNode, squeezed: frozenset[int], open_axes: Sequence[int]) -> ImportedGraph:
    """Return the graph that squeezes axes, and those of ``open_axes`` whose size is 1 in a call."""
    name = f"{inner_prefix(node)}{len(open_axes)}.{'.'.join(map(str, sorted(squeezed)))}"
    if not open_axes:
        axes = {f"{name}.axes": np.array(sorted(squeezed), np.int64)}
        squeeze = OnnxNode(name, "Squeeze", (node.inputs[0], *axes), (name,), {}, 13)
        return ImportedGraph(node.name, (), (name,), (squeeze,), axes)
    axis, rest = open_axes[0], open_axes[1:]
    constants = {f"{name}.one": np.array(1, np.int64), f"{name}.axis": np.array(axis, np.int64)}
    branches = {"then_branch": _squeezed(node, squeezed | {axis}, rest), "else_branch": _squeezed(node, squeezed, rest)}
    nodes = (
        OnnxNode(f"{name}.shape", "Shape", (node.inputs[0],), (f"{name}.shape",), {}, 13),
        OnnxNode(f"{name}.size", "Gather", (f"{name}.shape", f"{name}.axis"), (f"{name}.size",), {}, 13),
        OnnxNode(f"{name}.equal", "Equal", (f"{name}.size", f"{name}.one"), (f"{name}.equal",), {}, 13),
        OnnxNode(name, "If", (f"{name}.equal",), (name,), branches, 13),
    )
    return ImportedGraph(node.name, (), (name,), nodes, constants)


def infer_unsqueeze(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer new axes of size 1."""
    x = ctx.tensor(node.inputs[0])
    if is_data(node, ctx, 1):
        rank = len(x.shape) + data_count(node, ctx, node.inputs[1], "axes")
        return (Inferred(x.dtype, _same_elements(node, ctx, "unsqueeze", [f"size{k}" for k in range(rank)])),)
    axes = ints(node, ctx, 1, "axes") or ()
    rank = len(x.shape) + len(axes)
    new = {normalize_axis(node, a, rank) for a in axes}
    if len(new) != len(axes):
        raise ShapeError(f"axes {list(axes)} name an axis twice", tensor=x.name)
    left = iter(x.shape)
    shape = tuple(ONE if a in new else next(left) for a in range(rank))
    return (Inferred(x.dtype, shape, reshaped(ctx.known_elements(x.name), shape)),)


operator("Unsqueeze", infer=infer_unsqueeze)(expand_view)


def infer_transpose(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer a Transpose: axis i of the output is axis perm[i] of the input."""
    x = ctx.tensor(node.inputs[0])
    perm = tuple(node.attribute("perm", range(len(x.shape) - 1, -1, -1)))
    if sorted(perm) != list(range(len(x.shape))):
        raise ShapeError(f"perm {list(perm)} does not permute the axes of {x.name}", tensor=x.name)
    value = ctx.known_elements(x.name)
    return (Inferred(x.dtype, tuple(x.shape[p] for p in perm), None if value is None else value.transpose(perm)),)


@operator("Transpose", infer=infer_transpose)
def expand_transpose(node: OnnxNode, ctx: ExpandContext) -> None:
    """Add a view with permuted subscripts."""
    x, y = ctx.tensor(node.inputs[0]), ctx.tensor(node.outputs[0])
    perm = tuple(node.attribute("perm", range(len(x.shape) - 1, -1, -1)))
    d = iterators(len(perm))
    at = tuple(d[perm.index(a)] for a in range(len(perm)))
    ctx.compute(y.shape, load(x.name, at, x.dtype), output=y.name)


def infer_identity(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer the same tensor."""
    x = ctx.tensor(node.inputs[0])
    return (Inferred(x.dtype, x.shape, ctx.known_elements(x.name)),)


operator("Identity", infer=infer_identity)(expand_alias)


def infer_cast(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer another dtype for Cast and CastLike (values of sizes: see shape_values)."""
    dtype = ctx.tensor(node.inputs[1]).dtype if node.op == "CastLike" else onnx_dtype(node.attribute("to"))
    return (Inferred(dtype, ctx.tensor(node.inputs[0]).shape),)


@operator("Cast", "CastLike", infer=infer_cast)
def expand_cast(node: OnnxNode, ctx: ExpandContext) -> None:
    """Convert element by element."""
    x, y = ctx.tensor(node.inputs[0]), ctx.tensor(node.outputs[0])
    if x.dtype == y.dtype:
        ctx.alias(y.name, x.name)
        return
    element = wide(load(x.name, iterators(len(x.shape)), x.dtype))
    if y.dtype == "float8_e8m0fnu":
        ctx.compute(y.shape, _power_of_two(cast(element, "float32"), node.attribute("round_mode", "up")), output=y.name)
        return
    ctx.compute(y.shape, converted(element, y.dtype, bool(node.attribute("saturate", 1))), output=y.name)


MAX_FLOAT8 = {
    "float8_e4m3fn": 448.0, "float8_e4m3fnuz": 240.0, "float8_e5m2": 57344.0, "float8_e5m2fnuz": 57344.0,
}  # fmt: skip
"""Largest numbers of the 8-bit float dtypes that may saturate."""
NARROW_INTEGERS = ("int8", "int16", "uint8", "uint16", *SMALL_INTEGERS)
"""Integer dtypes for which C does not define the conversion of an out-of-range float."""


def converted(x: Value, dtype: str, saturate: bool = True) -> Value:
    """Convert a number to another dtype. ``saturate``: clamp to the largest number of an 8-bit float dtype."""
    if saturate and dtype in MAX_FLOAT8:
        x = x if x.dtype in FLOATS else cast(x, "float32")
        most = MAX_FLOAT8[dtype]
        x = op("max", op("min", x, const(most, x.dtype)), const(-most, x.dtype))
    if x.dtype in FLOATS and dtype in NARROW_INTEGERS:  # out of range, the low bits remain
        x = cast(x, "int32")
    return cast(x, dtype)


def _power_of_two(x: Value, mode: str) -> Value:
    """Round a float32's exponent to float8_e8m0fnu ``up``, ``down`` or to the ``nearest``. NaN stays NaN."""
    bits = op("bitand", bitcast(x, "uint32"), const(0x7FFFFFFF, "uint32"))
    more = {"up": 0x7FFFFF, "down": 0, "nearest": 0x3FFFFF + 1}[mode]
    exponent = op("shr", op("add", bits, const(more, "uint32")), const(23, "uint32"))
    exponent = op("where", op("isnan", x), const(255, "uint32"), op("min", exponent, const(254, "uint32")))
    return bitcast(cast(exponent, "uint8"), "float8_e8m0fnu")


def infer_bit_cast(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer another dtype with the same number of bits."""
    x, dtype = ctx.tensor(node.inputs[0]), onnx_dtype(node.attribute("to"))
    if dtype == "bool" != x.dtype:
        raise UnsupportedError(f"BitCast of {x.dtype} to booleans is not supported", node=node.name)
    if ITEMSIZE[x.dtype] != ITEMSIZE[dtype]:
        why = f"the bits of {x.dtype} are not as many as those of {dtype}"
        raise ModelError(why, node=node.name, rule="BitCast of ONNX", remedy="use Cast")
    return (Inferred(dtype, x.shape),)


@operator("BitCast", infer=infer_bit_cast)
def expand_bit_cast(node: OnnxNode, ctx: ExpandContext) -> None:
    """Reinterpret the bits as another dtype."""
    x, y = ctx.tensor(node.inputs[0]), ctx.tensor(node.outputs[0])
    element = load(x.name, iterators(len(x.shape)), x.dtype)
    bits = cast(element, "uint8") if x.dtype == "bool" != y.dtype else element
    ctx.compute(y.shape, bitcast(bits, y.dtype), output=y.name)


def infer_expand(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer the numpy broadcast of the tensor with the given shape."""
    x = ctx.tensor(node.inputs[0])
    if is_data(node, ctx, 1):
        return (Inferred(x.dtype, _expanded_by_data(node, ctx)),)
    requested = sizes(node, ctx, 1, "shape") or ()
    rank = max(len(requested), len(x.shape))
    a = (ONE,) * (rank - len(x.shape)) + x.shape
    b = (ONE,) * (rank - len(requested)) + requested
    shape = tuple(
        ctx.broadcast(p, q, f"axis {i} of {x.name} {list(x.shape)} is expanded to {list(requested)}")
        for i, (p, q) in enumerate(zip(a, b, strict=True))
    )
    value = ctx.known_elements(x.name)
    known = [d.constant for d in shape]
    if value is not None and all(c is not None and c <= 64 for c in known):
        value = np.broadcast_to(value, [int(d) for d in shape])
    else:
        value = None
    return (Inferred(x.dtype, shape, value),)


def _expanded_by_data(node: OnnxNode, ctx: InferContext) -> tuple[Dim, ...]:
    """Request the common sizes from the host. Those of the tensor that are not 1 hold by construction."""
    x, shape = ctx.tensor(node.inputs[0]), node.inputs[1]
    if all(d == 1 for d in x.shape) and data_count(node, ctx, shape, "shape") >= len(x.shape):
        return data_sizes(node, ctx, shape, "shape")
    rank = max(data_count(node, ctx, shape, "shape"), len(x.shape))
    shape_found = list(ctx.ask("broadcast", (shape,), [f"shape{k}" for k in range(rank)], x.shape))
    known = known_sizes(ctx, shape, data_count(node, ctx, shape, "shape"))
    for k, s in enumerate(known, rank - len(known)):
        shape_found[k] = shape_found[k] if s is None else s
    for k, d in enumerate(x.shape, rank - len(x.shape)):
        if d != 1:
            shape_found[k] = ctx.broadcast(d, shape_found[k], f"axis {k} of {x.name} {list(x.shape)} is expanded")
    return tuple(shape_found)


@operator("Expand", infer=infer_expand)
def expand_expand(node: OnnxNode, ctx: ExpandContext) -> None:
    """Add a view whose subscripts ignore the expanded axes."""
    x, y = ctx.tensor(node.inputs[0]), ctx.tensor(node.outputs[0])
    if x.shape == y.shape:
        ctx.alias(y.name, x.name)
        return
    d = iterators(len(y.shape))[len(y.shape) - len(x.shape) :]
    at = tuple(Index.of(0) if e == 1 else i for e, i in zip(x.shape, d, strict=True))
    ctx.compute(y.shape, load(x.name, at, x.dtype), output=y.name)


def infer_tile(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer a Tile: every axis repeated."""
    x = ctx.tensor(node.inputs[0])
    repeats = sizes(node, ctx, 1, "repeats") or ()
    if len(repeats) != len(x.shape):
        raise ShapeError(f"{len(repeats)} repeats for rank {len(x.shape)}", tensor=x.name)
    shape = tuple(d * r for d, r in zip(x.shape, repeats, strict=True))
    value = ctx.known_elements(x.name)
    if value is not None and all(r.constant is not None and r.constant <= 64 for r in repeats):
        return (Inferred(x.dtype, shape, np.tile(value, [int(r) for r in repeats])),)
    return (Inferred(x.dtype, shape),)


@operator("Tile", infer=infer_tile)
def expand_tile(node: OnnxNode, ctx: ExpandContext) -> None:
    """Add a view with subscripts modulo the source's sizes."""
    x, y = ctx.tensor(node.inputs[0]), ctx.tensor(node.outputs[0])
    d = iterators(len(y.shape))
    at = tuple(i if e == f else i % e for i, e, f in zip(d, x.shape, y.shape, strict=True))
    ctx.compute(y.shape, load(x.name, at, x.dtype), output=y.name)
