"""Control flow: If on data, Loop, Scan. The host controls it; bodies are separate models, compiled like any other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polydyn.errors import ModelError, PolydynError, ShapeError
from polydyn.graph.branches import BRANCHES
from polydyn.graph.ir import Dim, size_input
from polydyn.graph.operators.common import given, normalize_axis, refuse
from polydyn.graph.operators.registry import (
    Context,
    ExpandContext,
    InferContext,
    Inferred,
    OnnxNode,
    RanksDiffer,
    Rewritten,
    operator,
)  # fmt: skip
from polydyn.schedules.index import ZERO, Index, maximum
from polydyn.shapes.context import Undecidable

Shape = tuple[Dim, ...]
Slots = list[list[Dim | None]]


def _described(inner: Any, inputs: Sequence[str], sizes: Sequence[Dim]) -> dict[str, Any]:
    """Describe how the host feeds a body and where its results are. ``inputs``, ``sizes``: the step's, in order."""
    return {
        "formals": list(inner.formals), "captured": [[x, inputs.index(x)] for x in inner.captured],
        "sizes": [[size_input(s), sizes.index(Index.of(s))] for s in inner.sizes], "results": list(inner.results),
    }  # fmt: skip


def _axis_names(shapes: Sequence[Sequence[Dim | None]]) -> list[str]:
    return [f"output{k}_{a}" for k, shape in enumerate(shapes) for a in range(len(shape))]


def _symbols(*inner: Any) -> tuple[Dim, ...]:
    """Return the outer sizes that come into the bodies by name."""
    return tuple(Index.of(s) for s in dict.fromkeys(s for i in inner for s in i.sizes))


def _filled(shapes: Sequence[Sequence[Dim | None]], symbols: Sequence[Dim]) -> list[Shape]:
    """Replace the unknown sizes of shapes by ``symbols``, which hold one symbol per axis of all shapes, in order."""
    left = iter(symbols)
    return [tuple(s if d is None else d for d, s in zip(shape, left, strict=False)) for shape in shapes]


# -- If --------------------------------------------------------------------------------------------------------------


def infer_branch(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Return the sizes on which both branches agree, and symbols for the others.

    A branch that contradicts the sizes around it is never taken. If the condition is arithmetic on sizes, a guard
    requires this (Rewritten: the other branch is left), else a call that takes the branch is rejected. Raises
    RanksDiffer if a result has two ranks.
    """
    inner, contradiction = dict[str, Any](), dict[str, PolydynError]()
    for role in BRANCHES:
        try:
            inner[role] = ctx.inside(role, ())
        except (ShapeError, ModelError) as e:
            if isinstance(e, Undecidable) or contradiction:
                raise
            contradiction[role] = e
    condition = ctx.value(node.inputs[0])
    for role, problem in contradiction.items():
        (other,) = inner
        why = f"the {role} of {node.name} cannot run: {problem.message}"
        if condition is not None:
            ctx.decide(condition.reshape(-1)[0], other == "then_branch", why)
            raise Rewritten(node.attribute(other))
        inner[role] = ctx.refused(role, inner[other], why)
    first, second = (inner[role] for role in BRANCHES)
    shapes: list[Sequence[Dim | None]] = []
    for k, output in enumerate(node.outputs):
        a, b = first.shape(k), second.shape(k)
        if first.dtype(k) != second.dtype(k):
            raise refuse(node, f"branches that give {first.dtype(k)} and {second.dtype(k)}")
        if len(a) != len(b):
            raise RanksDiffer(output, (len(a), len(b)))
        shapes.append(a if second.is_refused else b if first.is_refused else _common(a, b))
    inputs, sizes = _branch_inputs(node, first, second), _symbols(first, second)
    symbols = ctx.ask("branch", inputs, _axis_names(shapes), sizes, {"node": node.name})
    filled = _filled(shapes, symbols)
    return tuple(Inferred(first.dtype(k), s) for k, s in enumerate(filled))


def _common(a: Sequence[Dim | None], b: Sequence[Dim | None]) -> Sequence[Dim | None]:
    """Return the sizes that two shapes of equal rank share, and None for the others."""
    return [p if p == q else None for p, q in zip(a, b, strict=True)]


def _branch_inputs(node: OnnxNode, *inner: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys((node.inputs[0], *(x for i in inner for x in i.captured))))


@operator("If", infer=infer_branch)
def branch(node: OnnxNode, ctx: ExpandContext) -> None:
    """Add a step in which the host tests the condition and runs one of two models."""
    first, second = (ctx.inner(role) for role in BRANCHES)
    inputs = _branch_inputs(node, first, second)
    sizes = _symbols(first, second)
    more = {role: _described(i, inputs, sizes) for role, i in zip(BRANCHES, (first, second), strict=True)}
    types = [(o or None, *_type(ctx, o, first, k)) for k, o in enumerate(node.outputs)]
    ctx.made("branch", inputs, types, sizes, {"node": node.name}, more, BRANCHES)


def _type(ctx: ExpandContext, name: str, inner: Any, position: int) -> tuple[str, Shape]:
    if name:
        t = ctx.tensor(name)
        return t.dtype, t.shape
    return inner.dtype(position), tuple(ZERO if d is None else d for d in inner.shape(position))


# -- Loop and Scan ---------------------------------------------------------------------------------------------------


def _settled(
    node: OnnxNode, ctx: InferContext, before: Sequence[Any], carried: Sequence[str], after: Sequence[Any], first: int
) -> tuple[Any, Slots]:
    """Return the body for carried shapes that every iteration keeps. An axis that changes has no size there.

    ``first``: the body's first carried result. ``before``, ``after``: the types of its other inputs.
    """
    shapes: Slots = [list(ctx.tensor(x).shape) for x in carried]
    while True:
        types = [(ctx.tensor(x).dtype, s) for x, s in zip(carried, shapes, strict=True)]
        inner = ctx.inside("body", [*before, *types, *after])
        widened = False
        for j, shape in enumerate(shapes):
            formal = inner.formals[len(before) + j]
            kept = inner.keeps(first + j, formal)
            if kept is None:
                t = inner.typed.tensor(inner.results[first + j])
                raise refuse(node, f"{carried[j]}, which an iteration turns into {t.dtype} of rank {len(t.shape)},")
            for a, same in enumerate(kept):
                if not same and shape[a] is not None:
                    shape[a], widened = None, True
        if not widened:
            return inner, shapes


def _loop_parts(node: OnnxNode) -> tuple[tuple[str, ...], str, str]:
    return node.inputs[2:], given(node.inputs, 0) or "", given(node.inputs, 1) or ""


def infer_loop(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer the carried tensors, then scan outputs with one row per iteration."""
    carried, trips, condition = _loop_parts(node)
    inner, shapes = _settled(node, ctx, [("int64", ()), ("bool", ())], carried, [], 1)
    count = _trips(ctx, inner, trips, condition)
    scans = range(1 + len(carried), len(inner.results))
    expected: list[Sequence[Dim | None]] = [*shapes, *((count, *inner.shape(k)) for k in scans)]
    inputs = (trips, condition, *carried, *inner.captured)
    symbols = ctx.ask("iterate", inputs, _axis_names(expected), _symbols(inner), {"node": node.name})
    dtypes = [ctx.tensor(x).dtype for x in carried] + [inner.dtype(k) for k in scans]
    return tuple(Inferred(d, s) for d, s in zip(dtypes, _filled(expected, symbols), strict=True))


def _trips(ctx: InferContext, inner: Any, trips: str, condition: str) -> Dim | None:
    """Return the number of iterations if sizes determine it: a known count, and a condition that is never false."""
    known = ctx.constant(condition) if condition else None
    if (condition and (known is None or not known.all())) or not inner.always(0):
        return None
    value = ctx.value(trips) if trips else None
    return None if value is None else maximum(value.reshape(-1)[0], 0)


@operator("Loop", infer=infer_loop)
def loop(node: OnnxNode, ctx: ExpandContext) -> None:
    """Add a step in which the host runs the body while the count and the condition allow it."""
    carried, trips, condition = _loop_parts(node)
    inner = ctx.inner("body")
    inputs = (trips, condition, *carried, *inner.captured)
    scans = range(1 + len(carried), len(inner.results))
    more = {"carried": len(carried), "slices": [], "scans": [[0, False, _rows(inner, k)] for k in scans], "loop": True}
    _iterate(node, ctx, inner, inputs, more, range(1, len(inner.results)))


def _rows(inner: Any, result: int) -> list[int]:
    """Return the shape of a row for the case of no iteration: constants, else 0."""
    return [0 if d is None or d.constant is None else d.constant for d in inner.shape(result)]


def _iterate(
    node: OnnxNode, ctx: ExpandContext, inner: Any, inputs: tuple[str, ...], more: dict[str, Any], results: range
) -> None:
    sizes = _symbols(inner)
    rows = list(results)[int(more["carried"]) :]
    described = _described(inner, inputs, sizes) | {"row_dtypes": [inner.dtype(k) for k in rows]}
    types = [(o or None, *_type(ctx, o, inner, k)) for o, k in zip(node.outputs, results, strict=False)]
    ctx.made("iterate", inputs, types, sizes, {"node": node.name}, described | more, ("body",))


def _scan_parts(node: OnnxNode, ctx: Context) -> tuple[tuple[str, ...], tuple[str, ...], list[int]]:
    """Return states, scanned inputs, and the axes along which these are scanned."""
    first = len(node.inputs) - int(node.attribute("num_scan_inputs", 0))
    states, scanned = node.inputs[:first], node.inputs[first:]
    axes = node.attribute("scan_input_axes") or [0] * len(scanned)
    ranks = [len(ctx.tensor(x).shape) for x in scanned]
    return states, scanned, [normalize_axis(node, a, r) for a, r in zip(axes, ranks, strict=True)]


def infer_scan(node: OnnxNode, ctx: InferContext) -> tuple[Inferred, ...]:
    """Infer the states, then outputs with one slice per element along the scanned axes."""
    states, scanned, axes = _scan_parts(node, ctx)
    length: Dim | None = None
    slices: list[tuple[str, Shape]] = []
    for x, a in zip(scanned, axes, strict=True):
        t = ctx.tensor(x)
        length = t.shape[a] if length is None else ctx.unify(length, t.shape[a], f"{x} is as long as the others")
        slices.append((t.dtype, (*t.shape[:a], *t.shape[a + 1 :])))
    inner, shapes = _settled(node, ctx, [], states, slices, 0)
    expected: list[Sequence[Dim | None]] = list(shapes)
    for k, a in _scan_outputs(node, inner, len(states)):
        row = list(inner.shape(k))
        expected.append([*row[:a], length, *row[a:]])
    inputs = ("", "", *states, *scanned, *inner.captured)
    symbols = ctx.ask("iterate", inputs, _axis_names(expected), _symbols(inner), {"node": node.name})
    dtypes = [ctx.tensor(x).dtype for x in states] + [inner.dtype(k) for k in range(len(states), len(inner.results))]
    return tuple(Inferred(d, s) for d, s in zip(dtypes, _filled(expected, symbols), strict=True))


def _scan_outputs(node: OnnxNode, inner: Any, states: int) -> list[tuple[int, int]]:
    """Return (result of the body, axis along which its slices are stacked) of a Scan's outputs other than states."""
    results = range(states, len(inner.results))
    axes = node.attribute("scan_output_axes") or [0] * len(results)
    return [(k, normalize_axis(node, a, len(inner.shape(k)) + 1)) for k, a in zip(results, axes, strict=True)]


@operator("Scan", infer=infer_scan)
def scan(node: OnnxNode, ctx: ExpandContext) -> None:
    """Add a step in which the host runs the body for every slice."""
    states, scanned, axes = _scan_parts(node, ctx)
    inner = ctx.inner("body")
    inputs = ("", "", *states, *scanned, *inner.captured)
    scans = _scan_outputs(node, inner, len(states))
    backwards = node.attribute("scan_input_directions") or [0] * len(scanned)
    outwards = node.attribute("scan_output_directions") or [0] * len(scans)
    more = {
        "carried": len(states), "slices": [[a, bool(b)] for a, b in zip(axes, backwards, strict=True)],
        "scans": [[a, bool(b), _rows(inner, k)] for (k, a), b in zip(scans, outwards, strict=True)], "loop": False,
    }  # fmt: skip
    _iterate(node, ctx, inner, inputs, more, range(len(inner.results)))
