"""The reference evaluator: the meaning of a Graph, in plain numpy.

It is the oracle for compiled programs, and it folds constants. Iterators are broadcastable aranges and loads are fancy
indexing, so a body is evaluated for all its instances at once. Sums are accumulated in float64, so the reference is
more accurate than the programs that it checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from polydyn.errors import InputError, PolydynError
from polydyn.graph.dtypes import numpy_dtype
from polydyn.graph.ir import Compute, Concat, Graph, Guard, Node, Tensor, dim_name, reduction_name
from polydyn.schedules.expr import (
    FLOATS,
    OPS,
    Array,
    Const,
    FromIndex,
    Load,
    Op,
    Value,
    children,
    neutral,
    symbols_of,
)
from polydyn.schedules.index import Atom, Index

Integer: TypeAlias = int | Array
Environment: TypeAlias = Mapping[str, Integer]
Arrays: TypeAlias = Mapping[str, Array]

BLOCK_BYTES = 64 << 20
"""Maximum bytes of an iteration space that is materialised at once."""


def evaluate(graph: Graph, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Evaluate the graph for the given inputs. Return all outputs by name.

    Raises InputError if an input is missing, differs from its tensor in dtype, rank or size, or breaks a guard.
    """
    symbols = bind_symbols(graph, feeds)
    arrays: dict[str, Array] = {**graph.constants, **{n: np.asarray(feeds[n]) for n in graph.inputs}}
    for node in graph.nodes:
        arrays[node.output] = evaluate_node(node, graph.tensors[node.output], symbols, arrays)
    return {graph.copies.get(n, n): arrays[n] for n in graph.outputs}


def bind_symbols(graph: Graph, feeds: Mapping[str, Array]) -> dict[str, int]:
    """Return the symbols' values for one call, after checking every input and every guard. Raises InputError if one
    fails.
    """
    for name in graph.inputs:
        if name not in feeds:
            raise InputError("an input is missing", tensor=name)
        _check_type(graph.tensors[name], np.asarray(feeds[name]))
    symbols = {s.symbol: int(np.shape(feeds[s.input])[s.axis]) for s in graph.sources}
    for name in graph.inputs:
        for axis, (dim, size) in enumerate(zip(graph.tensors[name].shape, np.shape(feeds[name]), strict=True)):
            if dim.evaluate(symbols) != size:
                raise InputError(f"axis {axis} has size {size}, expected {dim}", tensor=name, dim=str(dim))
    for guard in graph.guards:
        check_guard(guard, symbols)
    return symbols


def _check_type(tensor: Tensor, array: Array) -> None:
    if array.dtype != numpy_dtype(tensor.dtype):
        raise InputError(f"dtype is {array.dtype}, expected {tensor.dtype}", tensor=tensor.name)
    if array.ndim != len(tensor.shape):
        raise InputError(f"rank is {array.ndim}, expected {len(tensor.shape)}", tensor=tensor.name)


def check_guard(guard: Guard, symbols: Mapping[str, int]) -> None:
    """Raise InputError with the guard's message if the symbols' values break it."""
    left, right = guard.left.evaluate(symbols), guard.right.evaluate(symbols)
    holds = {
        "==": left == right,
        "<=": left <= right,
        "%==": left % right == 0 if right else left == 0,
    }[guard.relation]
    if not holds:
        raise InputError(guard.message, dim=f"{guard.left} = {left}", rule=f"{left} {guard.relation} {right}")


def evaluate_node(node: Node, tensor: Tensor, env: Environment, arrays: Arrays) -> Array:
    """Return the node's output. ``tensor`` is its output's type, ``env`` the symbols, ``arrays`` all tensors that it
    reads.
    """
    if isinstance(node, Concat):
        return np.concatenate([arrays[p] for p in node.parts], node.axis)
    shape = tuple(int(evaluate_index(e, env, arrays)) for e in tensor.shape)
    reduction = tuple(int(evaluate_index(e, env, arrays)) for e in node.reduction)
    if any(n < 0 for n in shape + reduction):
        raise InputError(f"the shape {tensor.shape} becomes {shape}", node=node.origin, tensor=node.output)
    dtype = numpy_dtype(tensor.dtype)
    if 0 in shape:
        return np.empty(shape, dtype)
    if node.reduce is not None and 0 in reduction:
        return np.full(shape, neutral(node.reduce, tensor.dtype).value, dtype)
    try:
        with np.errstate(all="ignore"):
            return _block(node, tuple((0, n) for n in shape), tuple((0, n) for n in reduction), env, arrays)
    except IndexError as e:
        raise PolydynError(str(e), node=node.origin, tensor=node.output) from e


# -- scalar expressions, over all instances at once ------------------------------------------------------------------


def evaluate_index(index: Index, env: Environment, arrays: Arrays, guarded: bool = False) -> Integer:
    """Return an integer, or an array of integers if ``env`` holds arrays for iterators."""
    return _index(index, env, arrays, guarded, {})


def _index(index: Index, env: Environment, arrays: Arrays, guarded: bool, done: dict[Atom, Integer]) -> Integer:
    """Evaluate recursively. ``done`` caches atoms, because minima and quotients repeat them."""
    total: Integer = 0
    for monomial, coefficient in index.terms.items():
        term: Integer = coefficient
        for factor in monomial:
            if isinstance(factor, str):
                term = term * env[factor]
                continue
            if factor not in done:
                done[factor] = _atom(factor, env, arrays, guarded, done)
            term = term * done[factor]
        total = total + term
    return total


def _atom(atom: Atom, env: Environment, arrays: Arrays, guarded: bool, done: dict[Atom, Integer]) -> Integer:
    args = [_index(x, env, arrays, guarded, done) for x in atom.args]
    if atom.kind == "fetch":
        return _gather(atom.name, arrays[atom.name], args, guarded).astype(np.int64)
    if atom.kind == "floordiv":
        x, n = args
        return np.where(np.equal(n, 0), 0, np.floor_divide(x, np.where(np.equal(n, 0), 1, n)))
    out = args[0]
    for x in args[1:]:
        out = np.minimum(out, x) if atom.kind == "min" else np.maximum(out, x)
    return out


def _gather(name: str, array: Array, subscripts: list[Integer], guarded: bool) -> Array:
    """Return ``array[subscripts]``. A guarded load may be out of range, because its branch is not taken there."""
    if guarded and array.size == 0:
        return np.zeros(np.broadcast_shapes(*(np.shape(i) for i in subscripts)), array.dtype)
    for axis, (i, n) in enumerate(zip(subscripts, array.shape, strict=True)):
        if guarded:
            subscripts[axis] = np.clip(i, 0, n - 1)
        elif np.any(np.less(i, 0) | np.greater_equal(i, n)):
            raise IndexError(f"{name}: subscript {np.min(i)}..{np.max(i)} of axis {axis} leaves [0, {n})")
    return np.asarray(array[tuple(subscripts)])


def evaluate_value(value: Value, env: Environment, arrays: Arrays, guarded: bool = False) -> Array:
    """Evaluate the scalar expression for all instances of the iterators, which ``env`` maps to broadcastable aranges.

    Subscripts may leave their tensor only inside a branch of ``where`` (``guarded``). Elsewhere this is an
    IndexError.
    """
    dtype = numpy_dtype(value.dtype)
    if isinstance(value, Const):
        return np.asarray(value.value, dtype)
    if isinstance(value, FromIndex):
        return np.asarray(evaluate_index(value.index, env, arrays, guarded)).astype(dtype)
    if isinstance(value, Load):
        subscripts = [evaluate_index(i, env, arrays, guarded) for i in value.index]
        return _gather(value.buffer, arrays[value.buffer], subscripts, guarded)
    assert isinstance(value, Op)
    branch = guarded or value.name == "where"
    args = [evaluate_value(a, env, arrays, branch and (guarded or i > 0)) for i, a in enumerate(value.args)]
    if value.name == "bitcast":
        return np.ascontiguousarray(args[0]).view(dtype).reshape(args[0].shape)
    result = np.asarray(OPS[value.name].numpy(*args))
    if value.name == "cast" and result.dtype.name.endswith("fnuz"):  # the only NaN of such a type has no sign
        return np.where(np.isnan(result), np.nan, result.astype(np.float32)).astype(dtype)
    return result.astype(dtype)


# -- loop nests ------------------------------------------------------------------------------------------------------

Range: TypeAlias = tuple[int, int]


def _block(
    node: Compute, outer: tuple[Range, ...], inner: tuple[Range, ...], env: Environment, arrays: Arrays
) -> Array:
    """Return the part of the output with subscripts in ``outer``, halved along its longest axis while it is too
    large.
    """
    ranges = {dim_name(a): r for a, r in enumerate(outer)} | {reduction_name(j): r for j, r in enumerate(inner)}
    factors = _factors(node)
    if outer and 8 * sum(_instances(f, ranges) for f in factors) > BLOCK_BYTES:
        axis = max(range(len(outer)), key=lambda a: outer[a][1] - outer[a][0])
        low, high = outer[axis]
        if high - low > 1:
            middle = (low + high) // 2
            halves = [(*outer[:axis], r, *outer[axis + 1 :]) for r in ((low, middle), (middle, high))]
            return np.concatenate([_block(node, h, inner, env, arrays) for h in halves], axis)
    local = dict(env)
    for position, (name, (low, high)) in enumerate(ranges.items()):
        local[name] = np.arange(low, high).reshape([-1 if p == position else 1 for p in range(len(ranges))])
    parts = [evaluate_value(f, local, arrays) for f in factors]
    full = tuple(high - low for low, high in ranges.values())
    if len(parts) > 1:
        return _sum_of_products(parts, full, len(outer), numpy_dtype(node.body.dtype))
    whole = np.broadcast_to(parts[0], full)
    return whole.copy() if node.reduce is None else _reduce(node.reduce, whole, len(outer))


def _factors(node: Compute) -> list[Value]:
    """Return the factors of a sum of products in which every reduction iterator occurs, else the body alone."""
    if node.reduce != "sum":
        return [node.body]
    factors = [node.body]
    while any(isinstance(f, Op) and f.name == "mul" for f in factors):
        factors = [g for f in factors for g in (children(f) if isinstance(f, Op) and f.name == "mul" else (f,))]
    used = {s for f in factors for s in symbols_of(f)}
    return factors if used >= {reduction_name(j) for j in range(len(node.reduction))} else [node.body]


def _instances(value: Value, ranges: Mapping[str, Range]) -> int:
    """Return the number of elements of the value over the iterators that it uses."""
    used = symbols_of(value)
    total = 1
    for name in used & ranges.keys():
        total *= ranges[name][1] - ranges[name][0]
    return total


def _sum_of_products(parts: list[Array], full: tuple[int, ...], rank: int, dtype: np.dtype[Any]) -> Array:
    """Return ``sum of parts[0] * parts[1] * ...`` over the axes from ``rank`` on. Unused axes of a part have size 1."""
    wide = np.dtype(np.float64) if dtype.name in FLOATS else dtype
    operands: list[Any] = []
    used: set[int] = set()
    for part in parts:
        part = part.reshape((1,) * (len(full) - part.ndim) + part.shape)
        axes = [a for a in range(len(full)) if part.shape[a] > 1]
        used |= set(axes)
        operands += [part.astype(wide).reshape([part.shape[a] for a in axes]), axes]
    output_axes = [a for a in range(rank) if a in used]
    summed: Array = np.einsum(*operands, output_axes, optimize=True) + wide.type(0)  # a sum begins at 0
    spread = np.reshape(summed, [full[a] if a in used else 1 for a in range(rank)])
    return np.broadcast_to(spread, full[:rank]).astype(dtype)


def _reduce(reduce: str, whole: Array, rank: int) -> Array:
    axes = tuple(range(rank, whole.ndim))
    if reduce in ("max", "min"):
        return np.asarray((np.max if reduce == "max" else np.min)(whole, axes))
    wide = np.dtype(np.float64) if whole.dtype.name in FLOATS else whole.dtype
    total = (np.sum if reduce == "sum" else np.prod)(whole.astype(wide, copy=False), axes, dtype=wide)
    return np.asarray(total).astype(whole.dtype)
