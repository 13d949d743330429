"""Compute the tensors of a graph with the reference evaluator, and compare arrays with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from polydyn.errors import PolydynError
from polydyn.graph.dtypes import numpy_dtype
from polydyn.graph.ir import Graph, Node
from polydyn.graph.reference import evaluate_node
from polydyn.schedules.expr import Array
from polydyn.testing.plan.arithmetic import size_of

LIMITS = {"float16": 2e-2, "bfloat16": 6e-2, "float32": 1e-3, "float64": 1e-3}
"""Rounding tolerance of a float type, relative to the largest value. The tolerance of 8-bit floats is 0.3."""


class OutOfRange(Exception):
    """The reference cannot evaluate a call because input data are subscripts out of range."""


class Tensors:
    """Tensors of graphs, computed lazily. The last definition of a tensor wins."""

    def __init__(
        self, graphs: Iterable[Graph], sizes: Mapping[str, int], given: Mapping[str, Array], more: Iterable[Node] = ()
    ) -> None:
        """Set the inputs. ``more``: nodes for tensors that no graph defines."""
        graphs = tuple(graphs)
        self.sizes = sizes
        self.found: dict[str, Array] = {n: a for g in graphs for n, a in g.constants.items()}
        self.types = {n: t for g in graphs for n, t in g.tensors.items()}
        self.nodes = {n.output: n for n in more} | {n.output: n for g in graphs for n in g.nodes}
        for name, a in given.items():
            t = self.types[name]
            self.found[name] = a.astype(numpy_dtype(t.dtype)).reshape([size_of(d, sizes) for d in t.shape])

    def __getitem__(self, name: str) -> Array:
        waiting = [name]
        while waiting:
            x = waiting[-1]
            missing = [] if x in self.found else [y for y in self.nodes[x].inputs if y not in self.found]
            if not missing and x not in self.found:
                try:
                    self.found[x] = evaluate_node(self.nodes[x], self.types[x], self.sizes, self.found)
                except PolydynError as e:
                    raise OutOfRange(x) from e
            waiting = waiting + missing if missing else waiting[:-1]
        return self.found[name]

    def __contains__(self, name: str) -> bool:
        return name in self.found or name in self.nodes


def difference(got: Array, expected: Array, least: float = 0.0) -> str:
    """Describe how two arrays differ beyond rounding, or return "". ``least`` is the minimum relative tolerance."""
    got, expected = np.asarray(got).reshape(-1), np.asarray(expected).reshape(-1)
    if got.size != expected.size:
        return f"{got.size} elements instead of {expected.size}"
    if expected.dtype.kind in "iub":  # a rounding to 8 bits may fall the other way
        slack = int(expected.dtype.itemsize == 1 and expected.dtype.kind != "b")
        wrong = np.abs(got.astype(np.int64) - expected.astype(np.int64)) > slack
    else:
        a, b = got.astype(np.float64), expected.astype(np.float64)
        limit = max(least, LIMITS.get(expected.dtype.name, 0.3)) * float(np.abs(b[np.isfinite(b)]).max(initial=1e-3))
        with np.errstate(invalid="ignore"):
            wrong = ~((np.abs(a - b) <= limit) | (np.isnan(a) & np.isnan(b)) | (a == b))
    if not wrong.any():
        return ""
    k = int(np.argmax(wrong))
    return f"{int(wrong.sum())} of {got.size} elements are wrong, element {k} is {got[k]} and not {expected[k]}"
