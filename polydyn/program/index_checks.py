"""Index checks on a device, and integers that are written to memory for a check by the host.

On a device a small reduction finds the integers outside their axis. The host does not wait for it.

No access depends on the result. A subscript is the fetched integer modulo the size of its axis (ONNX counts negative
indices from the end), so a wrong index reads a wrong element, never memory outside. The result only decides whether the
call is an error. The host reads it when it waits anyway.

The reduction is an ordinary node. Every ``SPAN`` integers produce one word. It is ``NO_OFFENDER``, or it encodes the
first offender: its position times ``2 ** VALUE_BITS``, plus its value, clamped to ``VALUE_BITS`` bits and shifted to be
non-negative. So the first offender has the minimum word, and the message can equal that of the host's check.
``runtime/cuda_indices.c`` reads it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial, reduce

from polydyn.graph.ir import Compute, Dim, Graph, IndexBound, Node, Tensor, dim_name, reduction_name
from polydyn.graph.subscripts import reshape_subscripts
from polydyn.program.bounds import integers_of
from polydyn.schedules.expr import FromIndex, Op, Value, cast, const, load, neutral, op
from polydyn.schedules.index import ONE, Atom, Index, fetch, product

SPAN = 16
"""Integers per word. One thread handles them (no shuffles of 64 bits), and the words are few bytes to fetch."""
VALUE_BITS = 59
"""Bits of a word for the value. Four bits are for the position; the sign bit is never set."""
BIAS = 2 ** (VALUE_BITS - 1)
"""Added to a value to make it non-negative."""
MAX_VALUE = BIAS - 2
"""Maximum value, so that no offender's word is ``NO_OFFENDER``; the minimum is ``-BIAS``."""
NO_OFFENDER = neutral("min", "int64")
POSITION = Index.of(dim_name(0)) * SPAN + reduction_name(0)
"""Position of an integer in the list of a bound, in the node that checks it."""


def with_index_checks(graph: Graph) -> Graph:
    """Return the graph with a node for every bound on integers that are not constant, directly after their producer.

    The results of the nodes are outputs of the graph, and the bounds name them (``status``). Equal bounds share a node.
    """
    checks = [_BoundsCheck(graph, b) for b in graph.bounds]
    read = graph.consumers()
    position = {n.output: k for k, n in enumerate(graph.nodes)}
    after: dict[int, list[Node]] = {}
    tensors, outputs, bounds = dict(graph.tensors), list(graph.outputs), list[IndexBound]()
    statuses: dict[tuple[Value, Dim, Dim], str] = {}
    for q in checks:
        if q.value is None or not all(read[t] for t in q.sources):
            bounds.append(q.bound)
            continue
        key = (q.value, q.bound.size, q.bound.offset)
        if key not in statuses:
            node = q.node(_fresh(q.name, tensors))
            statuses[key] = node.output
            tensors[node.output] = Tensor(node.output, "int64", (q.count.ceildiv(SPAN),))
            outputs.append(node.output)
            after.setdefault(max((position.get(t, -1) for t in q.sources), default=-1), []).append(node)
        bounds.append(replace(q.bound, status=statuses[key]))
    nodes = after.get(-1, [])
    for k, n in enumerate(graph.nodes):
        nodes += [n, *after.get(k, [])]
    return replace(graph, nodes=tuple(nodes), tensors=tensors, outputs=tuple(outputs), bounds=tuple(bounds))


def with_kept_indices(graph: Graph) -> Graph:
    """Return the graph with a node for every bound on integers that are not in memory, because they are arithmetic or
    part of a larger tensor. The node writes them to memory for the host. Its result is an output of the graph, and the
    bound names it.
    """
    read, inputs = graph.consumers(), {*graph.inputs, *graph.outputs}
    tensors, nodes, bounds = dict(graph.tensors), list(graph.nodes), list[IndexBound]()
    kept: dict[tuple[Index, tuple[Dim, ...]], str] = {}
    for b in graph.bounds:
        sources = {f.name for f in b.formula.fetches()} if b.formula is not None else set()
        in_memory = b.tensor in inputs or bool(read.get(b.tensor))
        if b.formula is None or in_memory or not sources <= tensors.keys() or sources <= graph.constants.keys():
            bounds.append(b)
            continue
        key = (b.formula, b.shape)
        if key not in kept:
            name = kept[key] = _fresh(b.tensor, tensors, "kept")
            tensors[name] = Tensor(name, "int64", b.shape)
            nodes.append(Compute(name, FromIndex("int64", b.formula), origin=b.node))
        bounds.append(replace(b, kept=kept[key]))
    outputs = (*graph.outputs, *kept.values())
    return replace(graph, nodes=tuple(nodes), tensors=tensors, outputs=outputs, bounds=tuple(bounds))


class _BoundsCheck:
    """A bound and its integers: ``value`` is the integer at ``POSITION`` among ``count`` integers.

    ``value`` is None if the integers are constants, or cannot be read.
    """

    def __init__(self, graph: Graph, bound: IndexBound) -> None:
        self.graph, self.bound, self.name = graph, bound, integers_of(graph, bound)
        formula = self._formula()
        self.sources = sorted({f.name for f in formula.fetches()}) if formula is not None else []
        readable = bool(self.sources) and all(t in graph.tensors for t in self.sources)
        self.value = self._value(formula) if formula is not None and readable else None
        if all(t in graph.constants for t in self.sources):
            self.value = None

    def _formula(self) -> Index | None:
        """Return the integers as an expression over ``d0`` and ``r0``."""
        bound = self.bound
        if bound.formula is None and self.name not in self.graph.tensors:
            return None
        shape = self.graph.tensors[self.name].shape if bound.formula is None else bound.shape
        positions = shape if bound.part[1] == 1 else (*shape[:-1], ONE)
        self.count = product(positions)
        coords = reshape_subscripts(positions, (self.count,), (POSITION,))
        if bound.formula is not None:
            return bound.formula.subs({dim_name(a): i for a, i in enumerate(coords)})
        return fetch(self.name, coords if bound.part[1] == 1 else (*coords[:-1], Index.of(bound.part[0])))

    def _value(self, formula: Index) -> Value | None:
        """Return a sum of products of sizes, positions and fetched integers. The integers are loads, kept in range by
        a guard."""
        total: Value | None = None
        for m, c in formula.terms.items():
            fetched = [a for a in m if isinstance(a, Atom) and a.kind == "fetch"]
            rest = Index({tuple(a for a in m if a not in fetched): c})
            if rest.fetches():
                return None
            factors = [cast(load(a.name, a.args, self.graph.tensors[a.name].dtype), "int64") for a in fetched]
            term = reduce(partial(op, "mul"), factors if factors and rest == ONE else [_number(rest), *factors])
            total = term if total is None else op("add", total, term)
        return total

    def node(self, output: str) -> Compute:
        """Return the reduction that finds the first offender."""
        b, value = self.bound, self.value
        assert value is not None
        outside = op("or", op("lt", value, _number(-b.size - b.offset)), op("ge", value, _number(b.size - b.offset)))
        shifted = op("add", _clamped(value), _word(BIAS))
        word = op("add", op("mul", _number(Index.of(reduction_name(0))), _word(2 * BIAS)), shifted)
        offender = op("where", outside, word, NO_OFFENDER)
        body = op("where", op("lt", _number(POSITION), _number(self.count)), offender, NO_OFFENDER)
        return Compute(output, body, (Index.of(SPAN),), "min", b.node)


def _fresh(name: str, tensors: dict[str, Tensor], suffix: str = "outside") -> str:
    fresh, count = f"{name}.{suffix}", 1
    while fresh in tensors:
        count += 1
        fresh = f"{name}.{suffix}.{count}"
    return fresh


def _word(x: int) -> Value:
    return const(x, "int64")


def _number(i: Index) -> Value:
    return FromIndex("int64", i)


def _clamped(v: Value) -> Value:
    """Return a value clamped to ``VALUE_BITS`` bits. (The form reads it three times instead of four.)"""
    if isinstance(v, Op) and v.name == "cast" and v.args[0].dtype != "uint64":  # it has 32 bits or fewer
        return v
    low, high = _word(-BIAS), _word(MAX_VALUE)
    return op("where", op("lt", v, low), low, op("where", op("gt", v, high), high, v))
