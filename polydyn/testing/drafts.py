"""ONNX models that grow node by node; every tensor has arrays at three assignments of sizes.

A node is added only if an authority (``authorities``) runs it at all three, so no shape rule is written here, and any
operator with any attributes can be tried. A size that is equal at all three counts as fixed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import helper, numpy_helper

from polydyn.testing.authorities import Array, Arrays, Refused, Runtime

MAX_OPSET = 23
"""The newest opset for which ONNX Runtime has most kernels."""
MAX_ELEMENTS = 6000
MAX_RANK = 6
MAX_FLOAT = 1e4
"""Larger floats are not kept: later values would only be rounding."""
PLAIN = ("B", "L", "H", "W", "N")
STRANGE = (
    "i0", "i1", "i2", "j0", "j1", "k0", "k", "d", "l", "n", "m", "C", "x", "r0", "s0", "t0", "a0", "b0", "o0", "int",
    "for", "while", "register", "lambda", "None", "N", "I", "NULL", "double", "min", "max", "w", "h", "i", "j", "p",
    "task", "tasks", "thread", "threads", "scratch", "tile", "M", "K", "E", "static", "and", "def", "batch size",
    "seq+1",
    "2L", "x.1", "unk__0", "sum", "acc", "float", "main", "errno", "INT64_MAX", "in", "is", "_", "c0", "c1",
)  # fmt: skip
"""Names that a compiler may use itself (iterators, parameters, keywords, macros), and names that are not identifiers.
"""
SIZES = (1, 2, 3, 5, 7, 8, 13, 16, 17, 4, 6, 9, 12)


Dim: TypeAlias = "int | str"
"""A dim of an input: a number, or a name of ``PLAIN``."""
Dims: TypeAlias = "Sequence[Dim]"


class Rejected(Exception):
    """A node, or a motif, that does not fit the current model."""


@dataclass(frozen=True)
class Input:
    """An input of the model.

    ``limit``: integers are in [least, limit + least), a number or dim; 0 means small integers.
    """

    name: str
    dtype: str
    dims: tuple[int | str, ...]
    limit: int | str = 0
    least: int = 0


@dataclass
class Case:
    """A model with its calls; calls that no authority runs are removed later."""

    name: str
    model: onnx.ModelProto
    inputs: tuple[Input, ...]
    calls: list[dict[str, int]]
    special: bool = False
    seed: int = 0

    def feeds(self) -> Iterator[tuple[dict[str, int], dict[str, Array]]]:
        """Yield sizes and arrays of every call."""
        for k, sizes in enumerate(self.calls):
            yield sizes, feeds_of(self.inputs, sizes, np.random.default_rng([self.seed, k]), self.special)


def feeds_of(
    inputs: Sequence[Input], sizes: dict[str, int], numbers: np.random.Generator, special: bool
) -> dict[str, Array]:
    """Return arrays for inputs at the sizes."""
    return {x.name: _array(x, sizes, numbers, special) for x in inputs}


def _array(x: Input, sizes: dict[str, int], numbers: np.random.Generator, special: bool) -> Array:
    shape = [sizes[d] if isinstance(d, str) else d for d in x.dims]
    dtype = np.dtype(x.dtype)
    if x.limit:
        most = sizes[x.limit] if isinstance(x.limit, str) else x.limit
        return numbers.integers(min(x.least, most), max(1, most + x.least), shape).astype(dtype)
    return plain_array(dtype, shape, numbers, special)


def plain_array(dtype: np.dtype[Any], shape: Sequence[int], numbers: np.random.Generator, special: bool) -> Array:
    """Return moderate numbers, some integers large.

    ``special``: also NaN, infinities, a negative zero, subnormal numbers, and the ends of the type.
    """
    if dtype == np.bool_:
        return np.asarray(numbers.random(shape) < 0.5)
    if dtype.kind in "iu":
        low = 0 if dtype.kind == "u" else -5
        a = np.asarray(numbers.integers(low, 10, shape), dtype)
        if dtype.itemsize > 2 and a.size and numbers.random() < 0.5:  # more digits than a float32 has
            a.flat[::2] = numbers.choice([2**24 + 1, 46341, 2**31 - 1, 70000], a.flat[::2].shape)
        if special and a.size:
            a.flat[::3] = numbers.choice([np.iinfo(dtype).min, np.iinfo(dtype).max, 0], a.flat[::3].shape)
        return a
    values = numbers.standard_normal(shape)
    a = np.asarray(np.round(values * 8) / 8 if numbers.random() < 0.5 else values, dtype)
    if special and a.size:
        extremes = [np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal, -np.finfo(dtype).tiny / 2]
        every = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-30, 100.0, *extremes])
        a.flat[::4] = numbers.choice(every, a.flat[::4].shape).astype(dtype)
    return a


@dataclass
class Draft:
    """A model that grows. ``kind``: the type of its floats; ``opset``: the opset of all nodes."""

    seed: int
    opset: int
    kind: str = "float32"
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, Array] = field(default_factory=dict)
    inputs: list[Input] = field(default_factory=list)
    values: dict[str, tuple[Array, ...]] = field(default_factory=dict)
    extra: list[str] = field(default_factory=list)
    """Results that should be outputs."""
    uneven: dict[str, Array] = field(default_factory=dict)
    """Results whose rank depends on the sizes: outputs, and nothing else."""
    loose: bool = False
    """Whether values that are not finite are kept."""

    def __post_init__(self) -> None:
        self.random = random.Random(f"{self.seed} draft")
        self.numbers = np.random.default_rng(self.seed)
        names = list(PLAIN if self.random.random() < 0.5 else self.random.sample(STRANGE, len(PLAIN)))
        self.names = dict(zip(PLAIN, names, strict=True))
        primes = self.random.sample((2, 3, 5, 7, 11, 13), 5)
        self.samples = [{n: (primes[(i + k) % 5]) for i, n in enumerate(PLAIN)} for k in range(3)]
        self.count = 0

    # -- names and values --------------------------------------------------------------------------------------------

    def name(self, hint: str = "t") -> str:
        """Return a new name."""
        self.count += 1
        return f"{hint}{self.count}"

    def one_of(self, *dims: Dims) -> Dims:
        """Return some of these dims."""
        return self.random.choice(dims)

    def const(self, value: Any, dtype: str | None = None) -> str:
        """Add a constant; floats get the type of the model's floats."""
        a = np.asarray(value)
        if dtype is None and a.dtype == np.float64:
            dtype = self.kind
        name = self.name("c")
        self.constants[name] = a.astype(dtype) if dtype else a
        return name

    def ints(self, *values: int) -> str:
        """Add a constant vector of int64."""
        return self.const(np.array(values, np.int64))

    def weight(self, *shape: int, dtype: str | None = None) -> str:
        """Add a constant of moderate floats, smaller for larger constants."""
        scale = max(1, int(np.prod(shape[1:]))) ** -0.5
        return self.const(self.numbers.standard_normal(shape) * scale, dtype or self.kind)

    def input(self, dims: Dims, dtype: str | None = None, limit: int | str = 0, least: int = 0) -> str:
        """Add a new input; dims are numbers and names of ``PLAIN``."""
        x = Input(self.name("x"), dtype or self.kind, tuple(dims), limit, least)
        self.inputs.append(x)
        self.values[x.name] = tuple(_array(x, s, self.numbers, False) for s in self.samples)
        return x.name

    def shape(self, t: str) -> tuple[tuple[int, ...], ...]:
        """Return the dims of a tensor, each with its three sizes."""
        arrays = self.values[t] if t in self.values else (self.constants[t],) * len(self.samples)
        return tuple(zip(*(a.shape for a in arrays), strict=True))

    def fixed(self, t: str, axis: int) -> int | None:
        """Return the size of an axis if it is always equal, else None."""
        sizes = self.shape(t)[axis]
        return sizes[0] if len(set(sizes)) == 1 else None

    def rank(self, t: str) -> int:
        """Return the number of axes."""
        return int(self.array(t).ndim)

    def array(self, t: str) -> Array:
        """Return the tensor at the first assignment."""
        return self.values[t][0] if t in self.values else self.constants[t]

    def pick(self, test: Callable[[str], bool] = lambda t: True, dtype: str | None = "", recent: float = 0.7) -> str:
        """Return a tensor that passes a test, of the model's floats (``dtype``: of another type, or None for any)."""
        kind = self.kind if dtype == "" else dtype
        found = [t for t, a in self.values.items() if (kind is None or a[0].dtype == kind) and test(t)]
        if not found:
            raise Rejected("nothing fits")
        return self.random.choice(found[-4:] if self.random.random() < recent else found)

    def axis(self, t: str, test: Callable[[int], bool] = lambda a: True) -> int:
        """Return some axis of a tensor."""
        found = [a for a in range(self.rank(t)) if test(a)]
        if not found:
            raise Rejected("no such axis")
        return self.random.choice(found)

    def fixed_axis(self, t: str, least: int = 1) -> int:
        """Return some axis of a fixed size, at least this one."""
        return self.axis(t, lambda a: (self.fixed(t, a) or 0) >= least)

    # -- nodes -------------------------------------------------------------------------------------------------------

    def add(self, op: str, inputs: Sequence[str], outputs: int = 1, **attributes: Any) -> str:
        """Add a node and return the name of its first result.

        Rejected: no authority runs it, or its results are too large.
        """
        return self.add_all(op, inputs, outputs, **attributes)[0]

    def add_all(self, op: str, inputs: Sequence[str], outputs: int = 1, **attributes: Any) -> list[str]:
        """Add a node and return the names of all its results."""
        names = [self.name() for _ in range(outputs)]
        domain = attributes.pop("domain", "")
        try:
            made = helper.make_node(op, list(inputs), names, domain=domain, **attributes)
        except (ValueError, TypeError) as e:
            raise Rejected(str(e)) from e
        self.extend([made], names)
        return names

    def extend(self, nodes: Sequence[onnx.NodeProto], results: Sequence[str]) -> None:
        """Add nodes with the results that others may read."""
        read = dict.fromkeys(x for n in nodes for x in reads(n))
        made = {o for n in nodes for o in n.output}
        known = [x for x in read if x in self.values and x not in made]
        if any(x in self.uneven for x in read):
            raise Rejected("a rank that sizes decide")
        model = self._model(nodes, [Input(x, str(self.array(x).dtype), ()) for x in known], results, read, None)
        try:
            runtime = Runtime(model)
            runs = [runtime.run({x: self.values[x][k] for x in known}) for k in range(len(self.samples))]
        except Refused as e:
            raise Rejected(str(e)) from e
        for r in results:
            self._check([run[r] for run in runs])
        self.nodes += nodes
        for r in results:
            arrays = tuple(run[r] for run in runs)
            if len({a.ndim for a in arrays}) > 1:
                self.uneven[r] = arrays[0]
            else:
                self.values[r] = arrays

    def _check(self, arrays: Sequence[Any]) -> None:
        for a in arrays:
            if (
                not isinstance(a, np.ndarray)
                or a.size > MAX_ELEMENTS
                or a.ndim > MAX_RANK
                or a.dtype.kind not in "fiub"
            ):
                raise Rejected("too large, or no tensor")
            if a.dtype.kind == "f" and not self.loose and not (np.abs(a) < MAX_FLOAT).all():
                raise Rejected("values that are not finite")

    def _model(
        self, nodes: Sequence[onnx.NodeProto], inputs: Sequence[Input], outputs: Sequence[str], read: Any,
        types: Arrays | None,
    ) -> onnx.ModelProto:  # fmt: skip
        """Build a model of nodes. ``types``: arrays of the outputs; None leaves out their types and shapes."""

        def info(x: Input) -> onnx.ValueInfoProto:
            dims = None if types is None else [self.names[d] if isinstance(d, str) else d for d in x.dims]
            return helper.make_tensor_value_info(x.name, helper.np_dtype_to_tensor_dtype(np.dtype(x.dtype)), dims)

        def result(name: str) -> onnx.ValueInfoProto:
            if types is None:
                return onnx.ValueInfoProto(name=name)
            kind = helper.np_dtype_to_tensor_dtype(types[name].dtype)
            dims = None if name in self.uneven else [None] * types[name].ndim
            return helper.make_tensor_value_info(name, kind, dims)

        constants = [numpy_helper.from_array(self.constants[c], c) for c in read if c in self.constants]
        graph = helper.make_graph(
            list(nodes), f"seed{self.seed}", [info(x) for x in inputs], [result(o) for o in outputs], constants
        )
        domains = {n.domain for n in nodes} - {""}
        imports = [helper.make_opsetid("", self.opset), *(helper.make_opsetid(d, 1) for d in sorted(domains))]
        model = helper.make_model(graph, opset_imports=imports, ir_version=10 if self.opset > 8 else 3)
        if model.ir_version < 4:  # constants are inputs with a default there
            model.graph.input.extend(
                helper.make_tensor_value_info(c.name, c.data_type, list(c.dims)) for c in constants
            )
        return model

    # -- the whole ---------------------------------------------------------------------------------------------------

    def finish(self, name: str, outputs: Sequence[str], calls: list[dict[str, int]], special: bool = False) -> Case:
        """Build the model of these outputs, without unused nodes and inputs."""
        needed, kept = set(outputs), list[onnx.NodeProto]()
        for n in reversed(self.nodes):
            if needed & set(n.output):
                kept.insert(0, n)
                needed |= set(reads(n))
        inputs = tuple(x for x in self.inputs if x.name in needed)
        model = self._model(
            kept,
            inputs,
            outputs,
            sorted(needed),
            {o: self.uneven[o] if o in self.uneven else self.array(o) for o in outputs},
        )
        return Case(name, model, inputs, calls, special, self.seed)


def reads(node: onnx.NodeProto) -> list[str]:
    """Return the tensors that a node reads, bodies included (with names that bodies define)."""
    inner = [
        x for a in node.attribute for g in ([a.g] if a.HasField("g") else a.graphs) for n in g.node for x in reads(n)
    ]
    results = [o.name for a in node.attribute for g in ([a.g] if a.HasField("g") else a.graphs) for o in g.output]
    return [x for x in (*node.input, *inner, *results) if x]
