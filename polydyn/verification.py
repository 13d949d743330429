"""Recompute every group of a program by the reference from the program's own inputs of the group, at a given shape.

An error is thus reported where it arises, not where it becomes visible. The reference (``polydyn.graph.reference``)
computes the primitives of a group with numpy, one after another, and reads every stored tensor from the program.
Kernels run checked (``polydyn.checked``), which is slow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from polydyn.backends import target_of
from polydyn.checked import CheckedProgram
from polydyn.compiler import Options, plan_program
from polydyn.errors import UnsupportedError
from polydyn.fusion.pipeline import rewrite_graph
from polydyn.graph.dtypes import numpy_dtype
from polydyn.graph.expand import import_model
from polydyn.graph.importer import ModelLike
from polydyn.graph.reference import bind_symbols, evaluate_node
from polydyn.schedules.expr import SMALL_FLOATS, Array
from polydyn.shapes.sizes import Dims

TOLERANCE = 1e-4
"""Maximum error of a float32 tensor relative to its largest value (or 1). Integers and booleans are exact."""
UNITS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, **dict.fromkeys(SMALL_FLOATS, 2.0 ** (-2))}
"""Unit in the last place of narrow floats: a number between two of them may be rounded to either."""


@dataclass(frozen=True)
class TensorCheck:
    """A tensor that a launch wrote: its maximum relative error, the element with this error, and both values there."""

    tensor: str
    shape: tuple[int, ...]
    error: float
    at: tuple[int, ...]
    got: float
    want: float
    ok: bool


def check_target(target: str) -> None:
    """Raise UnsupportedError for a CUDA target."""
    if target_of(target).on_device:
        raise UnsupportedError("programs for CUDA are not verified here", rule="targets", remedy="use a CPU target")


def verify_model(
    model: ModelLike, feeds: Mapping[str, Array], *, target: str = "cpu", dims: Dims | None = None,
    options: Options | None = None, tolerance: float = TOLERANCE,
) -> Sequence[TensorCheck]:  # fmt: skip
    """Check every tensor that the launches of a call write, in order of computation.

    ``feeds``: see ``Program.run``. Raises UnsupportedError for a CUDA target, CheckError for an invalid memory
    access.
    """
    check_target(target)
    options = options or Options()
    plan = plan_program(model, target=target, dims=dims, options=options)
    found = CheckedProgram(plan, target).tensors(feeds)
    return list(_checks(model, dims, options, feeds, found, tolerance))


def _checks(
    model: ModelLike, dims: Dims | None, options: Options, feeds: Mapping[str, Array], found: Mapping[str, Array],
    tolerance: float,
) -> Iterator[TensorCheck]:  # fmt: skip
    graph = rewrite_graph(import_model(model, dims), options.without)
    symbols = bind_symbols(graph, feeds)
    dtypes = {n: numpy_dtype(t.dtype) for n, t in graph.tensors.items()}
    given = {n: np.asarray(feeds[n]) for n in graph.inputs}
    arrays: dict[str, Array] = {**graph.constants, **{n: a.view(dtypes[n]) for n, a in given.items()}}
    for node in graph.nodes:
        want = evaluate_node(node, graph.tensors[node.output], symbols, arrays)
        got = found.get(node.output)
        if got is not None and got.size == want.size:
            got = got.view(dtypes[node.output]).reshape(want.shape)
            yield compare(node.output, got, want, tolerance)
            want = got
        arrays[node.output] = want


def compare(name: str, got: Array, want: Array, tolerance: float) -> TensorCheck:
    """Return the largest difference of two tensors of equal shape. NaN equals NaN."""
    a, b = got.astype(np.float64), want.astype(np.float64)
    if not a.size:
        return TensorCheck(name, got.shape, 0.0, (), 0.0, 0.0, True)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(a - b))
    error = np.where(np.isnan(error), np.inf, error)
    finite = b[np.isfinite(b)]
    is_float = got.dtype.kind == "f" or got.dtype.name in UNITS
    scale = max(float(np.abs(finite).max()) if finite.size else 0.0, 1.0) if is_float else 1.0
    at = np.unravel_index(int(error.argmax()), error.shape)
    worst = float(error[at]) / scale
    place = tuple(int(i) for i in at)
    limit = max(tolerance, UNITS.get(got.dtype.name, 0.0)) if is_float else 0.0
    return TensorCheck(name, got.shape, worst, place, float(a[at]), float(b[at]), worst <= limit)
