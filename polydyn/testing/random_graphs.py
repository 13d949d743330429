"""Random graphs of primitives, for differential testing: shared symbols, any primitive after any other.

A graph is a function of its seed. ``random_feeds`` returns inputs for it at sizes that include 0, 1 and primes, small
enough for the reference evaluator. Values stay moderate, so that float32 results can be compared.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping, Sequence

import numpy as np

from polydyn.graph.ir import Compute, Graph, SymbolSource, Tensor, dim_name, reduction_name
from polydyn.schedules.expr import Array, FromIndex, Value, cast, const, op
from polydyn.schedules.index import ONE, ZERO, Index, fetch, maximum, product
from polydyn.testing.random_primitives import (
    LONG_EXTENTS,
    MAX_ELEMENTS,
    MAX_WORK,
    SIZES,
    TABLE,
    Primitives,
    TooLarge,
    random_array,
)


class Builder(Primitives):
    """Grows one graph by primitives and by chains that models have."""

    def step(self) -> None:
        """Add one primitive or chain."""
        kinds = {
            self.elementwise: 5, self.reduction: 3, self.contraction: 4, self.transpose: 2, self.reshape: 2,
            self.cut: 1.5, self.expand: 1, self.concat: 1.5, self.softmax: 2, self.normalise: 2, self.window: 1,
            self.gather: 0.7, self.mask: 1, self.integers: 0.7, self.attention: 1,
        }  # fmt: skip
        self.random.choices(list(kinds), list(kinds.values()))[0]()

    def softmax(self) -> None:
        """Add the four primitives of softmax over one axis."""
        t = self.pick()
        shape = self.shape(t)
        if not shape:
            return
        axis = len(shape) - 1 if self.random.random() < 0.75 else self.random.randrange(len(shape))
        top = self._reduce_plain(t, (axis,), "max")
        e = self.add(shape, op("exp", op("sub", self.own(t), self._load_with_ones(top, (axis,)))))
        s = self._reduce_plain(e, (axis,), "sum")
        self.add(shape, op("div", self.own(e), self._load_with_ones(s, (axis,))))

    def normalise(self) -> None:
        """Add a LayerNorm-like chain: mean and variance over trailing axes, scale and shift."""
        t = self.pick()
        shape = self.shape(t)
        if not shape:
            return
        axes = tuple(range(max(0, len(shape) - self.random.choice((1, 1, 2))), len(shape)))
        count = FromIndex("float32", product(shape[a] for a in axes))
        total = self._reduce_plain(t, axes, "sum")
        mean = self.add(self.shape(total), op("div", self.own(total), count))
        centred = self.add(shape, op("sub", self.own(t), self._load_with_ones(mean, axes)))
        squares = self.add(shape, op("mul", self.own(centred), self.own(centred)))
        variance = self._reduce_plain(squares, axes, "sum")
        eps = op("add", op("div", self._load_with_ones(variance, axes), count), const(1e-3, "float32"))
        y = op("div", self.own(centred), op("sqrt", eps))
        if self.random.random() < 0.6:
            tail = shape[axes[0] :]
            scale, shift = self.source(tail), self.source(tail)
            names = [dim_name(a) for a in axes]
            y = op("add", op("mul", y, self.at(scale, names)), self.at(shift, names))
        self.add(shape, y)

    def attention(self) -> None:
        """Add scores, softmax (perhaps masked), values: heads before or after the rows."""
        q = self.pick()
        shape = self.shape(q)
        if not 2 <= len(shape) <= 4:
            return
        batch, (rows, width) = shape[:-2], shape[-2:]
        keys = self.random.choice((rows, self.dim()))
        order = list(range(len(batch) + 2))
        if self.random.random() < 0.5:
            self.random.shuffle(order)
        names = [*(dim_name(a) for a in range(len(batch))), dim_name(len(batch) + 1), reduction_name(0)]
        sizes = [*batch, keys, width]
        k = self._operand([sizes[a] for a in order])
        product_ = op("mul", self.at(q, [*names[:-2], dim_name(len(batch)), reduction_name(0)]),
                      self.at(k, [names[a] for a in order]))  # fmt: skip
        scores = self.add((*batch, rows, keys), product_, (width,), "sum")
        if self.random.random() < 0.5:
            scaled = op("mul", self.own(scores), const(0.3, "float32"))
            scores = self.add(self.shape(scores), op("add", scaled, self.aligned(self.shape(scores))))
        axis = (len(batch) + 1,)
        top = self._reduce_plain(scores, axis, "max")
        e = self.add(self.shape(scores), op("exp", op("sub", self.own(scores), self._load_with_ones(top, axis))))
        s = self._reduce_plain(e, axis, "sum")
        weights = self.add(self.shape(scores), op("div", self.own(e), self._load_with_ones(s, axis)))
        columns = self.dim()
        sizes = [*batch, keys, columns]
        v = self._operand([sizes[a] for a in order])
        out = [*batch, rows, columns]
        places = list(range(len(out)))
        if self.random.random() < 0.5 and batch:
            places[len(batch) - 1], places[len(batch)] = places[len(batch)], places[len(batch) - 1]
        at = [dim_name(places.index(a)) for a in range(len(out))]
        read = [*at[:-2], reduction_name(0), at[-1]]
        body = op("mul", self.at(weights, [*at[:-1], reduction_name(0)]), self.at(v, [read[a] for a in order]))
        self.add([out[a] for a in places], body, (keys,), "sum")

    def _reduce_plain(self, t: str, axes: tuple[int, ...], reduce: str) -> str:
        shape = self.shape(t)
        index = [reduction_name(axes.index(a)) if a in axes else dim_name(a) for a in range(len(shape))]
        out = [ONE if a in axes else d for a, d in enumerate(shape)]
        return self.add(out, self.at(t, index), [shape[a] for a in axes], reduce)

    def _load_with_ones(self, t: str, axes: tuple[int, ...]) -> Value:
        return self.at(t, [ZERO if a in axes else dim_name(a) for a in range(len(self.shape(t)))])

    def window(self) -> None:
        """Add a convolution along the last axis with padding, or a pooling sum."""
        t = self.pick()
        shape = self.shape(t)
        if len(shape) < 2:
            return
        size, stride, pad = self.random.choice((1, 2, 3)), self.random.choice((1, 1, 2)), self.random.choice((0, 1))
        length = shape[-1]
        out_length = maximum(length + 2 * pad - size, -stride) // stride + 1
        if length.constant is not None and int(out_length) <= 0:
            return
        d = dim_name(len(shape) - 1)
        pool = self.random.random() < 0.3
        where = Index.of(d) * stride + reduction_name(0 if pool else 1) - pad
        before = [Index.of(dim_name(a)) for a in range(len(shape) - 1)]
        if not pool:
            before[-1] = Index.of(reduction_name(0))
        inside = op(
            "and",
            op("ge", FromIndex("int64", where), const(0, "int64")),
            op("lt", FromIndex("int64", where), FromIndex("int64", length)),
        )
        x = op("where", inside, self.at(t, [*before, where]), const(0, "float32"))
        if pool:
            self.add([*shape[:-1], out_length], x, [Index.of(size)], self.random.choice(("sum", "max")))
            return
        channels = self.dim()
        w = self.source([channels, shape[-2], Index.of(size)])
        y = self.at(w, [dim_name(len(shape) - 2), reduction_name(0), reduction_name(1)])
        out = [*shape[:-2], channels, out_length]
        self.add(out, op("mul", x, y), [shape[-2], Index.of(size)], "sum")

    def gather(self) -> None:
        """Gather rows of a table at positions that an integer tensor holds."""
        shape = [self.dim() for _ in range(self.random.randint(1, 2))]
        ids = self.source(shape, self.random.choice(("int64", "int32")), constant=0.1)
        table = self.source([Index.of(TABLE), self.dim()])
        row = fetch(ids, [dim_name(a) for a in range(len(shape))])
        self.add([*shape, self.shape(table)[1]], self.at(table, [row, dim_name(len(shape))]))

    def mask(self) -> None:
        """Keep elements by a bool input, by a comparison of an input, or below the diagonal."""
        t = self.pick()
        shape = self.shape(t)
        how = self.random.randrange(3)
        if how == 0 and len(shape) >= 2:
            a, b = (FromIndex("int64", Index.of(dim_name(len(shape) - k))) for k in (2, 1))
            cond = op(self.random.choice(("ge", "gt", "ne")), a, b)
        else:
            dims = [d if self.random.random() < 0.7 else ONE for d in shape]
            m = self.source(dims, "bool" if how == 1 else "int64", constant=0.2)
            cond = self.at(m, [dim_name(a) if d != ONE else ZERO for a, d in enumerate(dims)])
            if how != 1:
                cond = op(self.random.choice(("lt", "eq", "ge")), cond, const(5, "int64"))
        other = self.random.choice([const(-1e4, "float32"), const(0.5, "float32"), self.aligned(shape)])
        self.add(shape, op("where", cond, self.own(t), other))

    def integers(self) -> None:
        """Add integer arithmetic and the conversion back to float."""
        shape = [self.dim() for _ in range(self.random.randint(1, 3))]
        dtype = self.random.choice(("int64", "int32", "int64", "uint8", "int8"))
        t = self.source(shape, dtype, constant=0.2)
        v: Value = self.own(t)
        for _ in range(self.random.randint(1, 2)):
            name = self.random.choice(("add", "mul", "sub", "max", "min", "div", "mod"))
            v = op(name, v, const(self.random.choice((1, 2, 3)), dtype))
        if self.random.random() < 0.5:
            i = self.add(shape, v)
            if self.random.random() < 0.5:
                shape = [ONE, *shape[1:]]
                names = [reduction_name(0), *(dim_name(a) for a in range(1, len(shape)))]
                i = self.add(shape, self.at(i, names), [self.shape(i)[0]], self.random.choice(("sum", "max", "min")))
            v = self.own(i)
        self.add(shape, op("mul", cast(v, "float32"), const(0.125, "float32")))

    # -- the graph -----------------------------------------------------------------------------------------------

    def graph(self) -> Graph:
        """Return the graph; every symbol has a source, every unread tensor is an output."""
        read = {t for n in self.nodes for t in n.inputs}
        made = [n.output for n in self.nodes]
        outputs = [t for t in made if t not in read or self.random.random() < 0.12]
        used = {s for t in self.tensors.values() for d in t.shape for s in d.symbols()}
        sources: dict[str, SymbolSource] = {}
        for x in self.inputs:
            for a, d in enumerate(self.shape(x)):
                if d.is_symbol:
                    sources.setdefault(str(d), SymbolSource(str(d), x, a))
        for s in sorted(used - sources.keys()):
            name = f"{self.prefix}size_{s}"
            self.tensors[name] = Tensor(name, "float32", (Index.of(s),))
            self.inputs.append(name)
            sources[s] = SymbolSource(s, name, 0)
        name = f"seed{self.seed}"
        return Graph(
            name, tuple(self.inputs), tuple(outputs), self.tensors, self.constants, tuple(self.nodes),
            tuple(sources.values()),
        )  # fmt: skip


def random_graph(seed: int, prefix: str = "") -> Graph:
    """Return the graph of a seed; all its names start with ``prefix``."""
    b = Builder(seed, prefix)
    if b.random.random() < 0.15:  # a long reduction, independent of the following steps
        b.live.append(b.source([b.dim(), Index.of(b.random.choice(LONG_EXTENTS))], constant=0.0))
    steps = b.random.randint(2, 8)
    while len(b.nodes) < steps:
        with contextlib.suppress(TooLarge):
            b.step()
    return b.graph()


def union(graphs: Sequence[Graph]) -> Graph:
    """Join all graphs (their names must differ)."""
    return Graph(
        "union",
        tuple(x for g in graphs for x in g.inputs),
        tuple(x for g in graphs for x in g.outputs),
        {n: t for g in graphs for n, t in g.tensors.items()},
        {n: a for g in graphs for n, a in g.constants.items()},
        tuple(n for g in graphs for n in g.nodes),
        tuple(s for g in graphs for s in g.sources),
    )


# -- sizes and values ------------------------------------------------------------------------------------------------


def work(graph: Graph, sizes: Mapping[str, int]) -> int:
    """Return the largest iteration space of the graph's nodes; a tensor with over MAX_ELEMENTS elements is too large.
    """
    worst = 0
    for t in graph.tensors.values():
        elements = product(t.shape).evaluate(sizes)
        worst = max(worst, elements * MAX_WORK // MAX_ELEMENTS)
    for n in graph.nodes:
        if isinstance(n, Compute):
            worst = max(worst, product((*graph.tensors[n.output].shape, *n.reduction)).evaluate(sizes))
    return worst


def random_sizes(graph: Graph, seed: int) -> dict[str, int]:
    """Return sizes for all symbols, 0 and 1 among them, shrunk until the graph is small enough."""
    r = random.Random(seed)
    sizes = {s.symbol: r.choice(SIZES) for s in graph.sources}
    if r.random() < 0.25:
        sizes[r.choice(list(sizes))] = r.choice(LONG_EXTENTS) if r.random() < 0.5 else 0
    if r.random() < 0.5:
        sizes = {s: n or 1 for s, n in sizes.items()}
    while work(graph, sizes) > MAX_WORK and max(sizes.values()) > 1:
        s = r.choice([s for s in sizes if sizes[s] > 1])
        sizes[s] = sizes[s] // 2
    return sizes


def random_feeds(graph: Graph, seed: int) -> dict[str, Array]:
    """Return inputs for one call."""
    sizes, numbers = (random_sizes(graph, seed) if graph.sources else {}), np.random.default_rng(seed)
    return {
        x: random_array(numbers, graph.tensors[x].dtype, [d.evaluate(sizes) for d in graph.tensors[x].shape])
        for x in graph.inputs
    }
