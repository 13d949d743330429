"""Compositions of other operators: Hardmax, LpNormalization, Det, Inverse, MelWeightMatrix, optional tensors."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np

from polydyn.graph.bodies import Body, body
from polydyn.graph.dtypes import numpy_dtype, onnx_dtype
from polydyn.graph.functions.attention import MICROSOFT
from polydyn.graph.functions.recurrent import Step
from polydyn.graph.importer import ImportedGraph, ModelInput, inner_prefix


@body("Hardmax")
def hardmax(b: Body) -> None:
    """Compute 1 at the first maximum along the axis, 0 elsewhere; before opset 13 over all axes from it on."""
    x = b.input(0)
    rank = len(b.tensor(x).shape)
    new = b.node.opset >= 13
    axis = b.attribute("axis", -1 if new else 1) % max(rank, 1)
    flat = x if new else b.op("Flatten", x, axis=axis)
    place = b.op("ArgMax", flat, axis=axis if new else 1, keepdims=0)
    depth = b.size(flat, axis if new else 1)
    values = b.constant([0, 1], b.tensor(x).dtype)
    hot = b.op("OneHot", place, depth, values, axis=axis if new else 1)
    b.set_output(hot if new else b.op("Reshape", hot, b.op("Shape", x)))


@body("LpNormalization")
def lp_normalization(b: Body) -> None:
    """Compute ``x / norm`` along the axis with p 1 or 2, and 0 where the norm is 0."""
    x, p = b.input(0), b.attribute("p", 2)
    if p not in (1, 2):
        raise b.refuse(f"p={p}")
    norm = b.reduce(f"ReduceL{p}", x, b.attribute("axis", -1))
    zero = b.like(0, x)
    b.set_output(b.op("Where", b.op("Equal", norm, zero), zero, b.op("Div", x, norm)))


@body("MeanVarianceNormalization")
def mean_variance_normalization(b: Body) -> None:
    """Compute ``(x - mean) / (deviation + 1e-9)`` by ONNX's formula. Axes past the rank are ignored, as in ONNX
    Runtime.
    """
    x, rank = b.input(0), len(b.tensor(b.input(0)).shape)
    axes = [a for a in b.attribute("axes", (0, 2, 3)) if a < rank]
    mean = b.reduce("ReduceMean", x, *axes)
    square = b.reduce("ReduceMean", b.op("Mul", x, x), *axes)
    deviation = b.op("Sqrt", b.op("Sub", square, b.op("Mul", mean, mean)))
    b.set_output(b.op("Div", b.op("Sub", x, mean), b.op("Add", deviation, b.like(1e-9, x))))


MAX_DET_ROWS = 4
"""Maximum rows of a matrix whose determinant is expanded."""


@body("Det")
def determinant(b: Body) -> None:
    """Compute the sum of the signed products of all permutations, for small matrices of constant size."""
    x = b.input(0)
    shape = b.tensor(x).shape
    n = shape[-1].constant
    if len(shape) < 2 or shape[-1] != shape[-2] or n is None or n > MAX_DET_ROWS:
        raise b.refuse(f"a matrix of {list(shape[-2:])}", f"square matrices of up to {MAX_DET_ROWS} rows are built")
    if n == 0:  # the empty product
        b.set_output(b.reduce("ReduceProd", x, -2, -1, keepdims=0))
        return
    rows = [b.op("Gather", x, b.constant(i), axis=-2) for i in range(n)]
    at = [[b.op("Gather", row, b.constant(j), axis=-1) for j in range(n)] for row in rows]
    total = ""
    for p in permutations(range(n)):
        term = at[0][p[0]]
        for i in range(1, n):
            term = b.op("Mul", term, at[i][p[i]])
        odd = sum(p[i] > p[j] for i in range(n) for j in range(i, n)) % 2
        total = b.op("Sub" if odd else "Add", total, term) if total else b.op("Identity", term)
    b.set_output(total)


@body(f"{MICROSOFT}::Inverse")
def inverse(b: Body) -> None:
    """Invert matrices by Gauss and Jordan's elimination with the largest pivot of each column; halves as float32."""
    x = b.input(0)
    shape, dtype = b.tensor(x).shape, b.tensor(x).dtype
    if len(shape) < 2:
        raise b.wrong(f"{x} has {len(shape)} axes, not two or more")
    wide = "float64" if dtype == "float64" else "float32"
    n = b.size(x, len(shape) - 2)
    count = b.op("Squeeze", n, b.constant([0]))
    rows = b.op("Unsqueeze", b.op("Range", b.constant(0), count, b.constant(1)), b.constant([1]))
    unit = b.cast(b.op("Equal", rows, b.op("Transpose", rows, perm=(1, 0))), wide)
    matrices = b.cast(b.reshape(x, -1, n, n), wide) if dtype != wide else b.reshape(x, -1, n, n)
    both = b.op("Concat", matrices, b.op("Expand", unit, b.op("Shape", matrices)), axis=2)
    graph = _elimination(f"{inner_prefix(b.node)}step.", rows, wide)
    done = b.op("Loop", count, b.constant(True, "bool"), both, body=graph)
    right = b.op("Slice", done, n, b.op("Mul", n, b.constant([2])), b.constant([2]))
    b.set_output(b.op("CastLike", b.op("Reshape", right, b.op("Shape", x)), x))


def _elimination(prefix: str, rows: str, dtype: str) -> ImportedGraph:
    """Return the step of a Loop that makes column k of each [n, 2n] matrix the unit vector k. ``rows``: 0 to n - 1."""
    s = Step(prefix, dtype)
    k, state = f"{prefix}k", f"{prefix}state"

    def axis(number: int) -> str:
        s.constants[name := f"{prefix}axis_{len(s.constants)}"] = np.asarray([number], np.int64)
        return name

    def column(matrix: str) -> str:
        return s.op("Unsqueeze", s.op("Gather", matrix, k, axis=2), axis(2))

    sizes = s.op("Where", s.op("Less", rows, k), s.number(-1), s.op("Abs", column(state)))
    chosen = s.op("Equal", rows, s.op("ArgMax", sizes, axis=1, keepdims=1))
    pivot = s.op("ReduceSum", s.op("Where", chosen, state, s.number(0)), axis(1), keepdims=1)
    swapped = s.op("Where", chosen, s.op("Unsqueeze", s.op("Gather", state, k, axis=1), axis(1)), state)
    unit = s.op("Div", pivot, column(pivot))
    rest = s.op("Sub", swapped, s.op("Mul", column(swapped), unit))
    new = s.op("Where", s.op("Equal", rows, k), unit, rest)
    inputs = (ModelInput(k, "int64", ()), ModelInput(f"{prefix}more", "bool", ()), ModelInput(state, dtype, None))
    outputs = (s.op("Identity", f"{prefix}more"), new)
    return ImportedGraph("step", inputs, outputs, tuple(s.nodes), s.constants)


@body("MelWeightMatrix")
def mel_weights(b: Body) -> None:
    """Compute the triangles of mel bands over the bins of a spectrum from constants. The result is a constant."""
    known = [b.ctx.constant(b.node.inputs[k]) for k in range(5)]
    if any(k is None for k in known):
        raise b.refuse("a size or frequency that is not constant", "make the inputs initializers")
    bands, length, rate, low, high = (k.reshape(-1)[0].item() for k in known if k is not None)
    dtype = numpy_dtype(onnx_dtype(b.attribute("output_datatype", 1)))
    ends = [2595 * math.log10(1 + f / 700) for f in (low, high)]
    step = (ends[1] - ends[0]) / (bands + 2)
    hertz = 700 * (np.power(10, (np.arange(bands + 2) * step + ends[0]) / 2595) - 1)
    bins = (((length + 1) * hertz) // rate).astype(np.int64)
    out = np.zeros((length // 2 + 1, bands), dtype)
    for i in range(bands):
        first, centre, last = bins[i : i + 3]
        if first == centre:
            out[centre, i] = 1
        for j in range(first, centre + 1):
            if first != centre:
                out[j, i] = (j - first) / (centre - first)
        for j in range(centre, last):
            if last != centre:
                out[j, i] = (last - j) / (last - centre)
    b.set_output(b.op("Identity", b.constant(out, str(dtype))))


@body("OptionalHasElement")
def has_element(b: Body) -> None:
    """Return true for a tensor, false for an absent input."""
    b.set_output(b.op("Identity", b.constant(bool(b.input(0)), "bool")))


@body("OptionalGetElement")
def get_element(b: Body) -> None:
    """Return the tensor itself."""
    b.set_output(b.op("Identity", b.input(0)))
