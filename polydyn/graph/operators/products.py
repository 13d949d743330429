"""Sums of products: MatMul, Gemm, Einsum."""

from __future__ import annotations

from functools import partial, reduce

from polydyn.errors import ModelError
from polydyn.graph.ir import Dim
from polydyn.graph.operators.common import (
    ReductionIndices,
    Shape,
    aligned,
    at,
    broadcast_all,
    emit,
    fits,
    given,
    iterators,
    like,
    reduce_to,
    wide,
)
from polydyn.graph.operators.registry import Context, ExpandContext, InferContext, Inferred, OnnxNode, operator
from polydyn.schedules.expr import Value, op
from polydyn.schedules.index import Index


def matmul_infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer numpy's matmul: vectors are promoted, batch axes broadcast, the inner dims agree."""
    a, b = (ctx.tensor(x) for x in node.inputs)
    if not a.shape or not b.shape:
        raise ModelError("MatMul of a scalar", node=node.name)
    inner = b.shape[-2] if len(b.shape) > 1 else b.shape[0]
    ctx.unify(a.shape[-1], inner, f"MatMul {node.name} contracts {a.name} with {b.name}")
    batch = broadcast_all(node, ctx, [a.shape[:-2], b.shape[:-2]])
    return (Inferred(a.dtype, (*batch, *a.shape[-2:-1], *(b.shape[-1:] if len(b.shape) > 1 else ()))),)


@operator("MatMul", infer=matmul_infer)
def matmul(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute ``out[..., m, n] = sum(a[..., m, k] * b[..., k, n])``."""
    a, b = (ctx.tensor(x) for x in node.inputs)
    row, column = matmul_subscripts(a.shape, b.shape, len(ctx.tensor(node.outputs[0]).shape))
    x, y = wide(at(ctx, a.name, row)), wide(at(ctx, b.name, column))
    reduce_to(ctx, node, "sum", op("mul", x, y), (a.shape[-1],))


def matmul_subscripts(a: Shape, b: Shape, rank: int) -> tuple[tuple[Index, ...], tuple[Index, ...]]:
    """Return the subscripts of the factors of element ``(d0, ...)`` of a matrix product. ``r0`` is the inner dim.

    ``rank``: rank of the product.
    """
    here = iterators(rank)
    rows, columns = min(len(a) - 1, 1), min(len(b) - 1, 1)
    batch = here[: len(here) - rows - columns]
    k = Index.of("r0")
    row = here[len(batch) : len(batch) + rows]
    column = here[len(here) - columns :] if columns else ()
    return (*_batch(a[:-2], batch), *row, k), (*_batch(b[:-2], batch), k, *column)


def _batch(shape: Shape, index: tuple[Index, ...]) -> tuple[Index, ...]:
    """Return the subscripts of a batch that broadcasts to the last axes of ``index``."""
    tail = index[len(index) - len(shape) :]
    return tuple(Index.of(0) if d == 1 else i for d, i in zip(shape, tail, strict=True))


def gemm_infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer [M, N] of two matrices, each possibly transposed."""
    a, b = (ctx.tensor(x) for x in node.inputs[:2])
    m, k = reversed(a.shape) if node.attribute("transA", 0) else a.shape
    n, inner = b.shape if node.attribute("transB", 0) else reversed(b.shape)
    ctx.unify(k, inner, f"Gemm {node.name} contracts {a.name} with {b.name}")
    if c := given(node.inputs, 2):
        fits(node, ctx, c, (m, n))
    return (Inferred(a.dtype, (m, n)),)


@operator("Gemm", infer=gemm_infer)
def gemm(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute ``alpha * A @ B + beta * C``."""
    a, b = (ctx.tensor(x) for x in node.inputs[:2])
    m, n = here = iterators(2)
    k = Index.of("r0")
    x = wide(at(ctx, a.name, (k, m) if node.attribute("transA", 0) else (m, k)))
    y = wide(at(ctx, b.name, (n, k) if node.attribute("transB", 0) else (k, n)))
    extent = a.shape[0 if node.attribute("transA", 0) else 1]
    alpha, beta = node.attribute("alpha", 1.0), node.attribute("beta", 1.0)
    c = given(node.inputs, 2)

    def finish(total: Value) -> Value:
        out = _scaled(alpha, total)
        return op("add", out, _scaled(beta, wide(aligned(ctx, c, here)))) if c and beta != 0 else out

    plain = alpha == 1 and (not c or beta == 0)
    reduce_to(ctx, node, "sum", op("mul", x, y), (extent,), None if plain else finish)


def _scaled(factor: float, x: Value) -> Value:
    return x if factor == 1 else op("mul", like(factor, x), x)


def _equation(node: OnnxNode, ctx: Context) -> tuple[list[list[str]], list[str]]:
    """Return the labels of each operand and of the output. Axes under an ellipsis are numbered, 0 being the last.

    Raises ModelError if labels do not match an operand's axes.
    """
    text = node.attribute("equation")
    text = (text.decode() if isinstance(text, bytes) else str(text)).replace(" ", "")
    left, arrow, right = text.partition("->")
    terms, deepest = [], 0
    for term, name in zip(left.split(","), node.inputs, strict=True):
        rank = len(ctx.tensor(name).shape)
        count = rank - len(term.replace("...", ""))
        if count < 0 or (count and "..." not in term):
            raise ModelError(f"the labels {term} for the {rank} axes of {name}", node=node.name, tensor=name)
        terms.append(_labels(term, count))
        deepest = max(deepest, count if "..." in term else 0)
    if arrow:
        return terms, _labels(right, deepest)
    letters = left.replace("...", "").replace(",", "")
    return terms, [*_labels("...", deepest), *sorted(c for c in set(letters) if letters.count(c) == 1)]


def _labels(term: str, count: int) -> list[str]:
    """Return a term's labels, with ``count`` numbers in place of the ellipsis."""
    before, dots, after = term.partition("...")
    return [*before, *(str(k) for k in reversed(range(count if dots else 0))), *after]


def _extents(node: OnnxNode, ctx: InferContext) -> dict[str, Dim]:
    extents: dict[str, Dim] = {}
    terms, _ = _equation(node, ctx)
    for term, name in zip(terms, node.inputs, strict=True):
        inside: dict[str, Dim] = {}
        for label, dim in zip(term, ctx.tensor(name).shape, strict=True):
            why = f"Einsum {node.name} uses label {label} twice"
            inside[label] = ctx.unify(inside[label], dim, why) if label in inside else dim
        for label, dim in inside.items():
            why = f"Einsum {node.name} uses label {label} twice"
            extents[label] = ctx.broadcast(extents[label], dim, why) if label in extents else dim
    return extents


def einsum_infer(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer the extents of the output's labels."""
    extents = _extents(node, ctx)
    return (Inferred(ctx.tensor(node.inputs[0]).dtype, tuple(extents[c] for c in _equation(node, ctx)[1])),)


@operator("Einsum", infer=einsum_infer)
def einsum(node: OnnxNode, ctx: ExpandContext) -> None:
    """Compute the sum of the products over all labels that the output lacks."""
    terms, right = _equation(node, ctx)
    position: dict[str, Index] = dict(zip(right, iterators(len(right)), strict=True))
    sums = ReductionIndices()
    seen: dict[str, Dim] = {}
    for term, name in zip(terms, node.inputs, strict=True):
        for label, dim in zip(term, ctx.tensor(name).shape, strict=True):
            if label not in seen or seen[label] == 1:
                seen[label] = dim
    for label, dim in seen.items():
        if label not in position:
            position[label] = sums.add(dim)
    factors = [
        wide(aligned(ctx, name, [position[label] for label in term]))
        for term, name in zip(terms, node.inputs, strict=True)
    ]
    body = reduce(partial(op, "mul"), factors)
    if sums.extents:
        reduce_to(ctx, node, "sum", body, tuple(sums.extents))
    else:
        emit(ctx, node, body)
