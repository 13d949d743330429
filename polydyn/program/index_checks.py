"""Indices that a device checks, and those that are written down for the host.

On a device a small reduction looks for those outside their axis, and no host waits for it.

No access depends on what it finds: a subscript is the fetched integer modulo the size of its axis (ONNX counts negative
ones from the end), so a wrong one reads a wrong element, never one outside. What it finds decides whether the call is
an error, and that the host may learn when it waits anyway.

The reduction is a node like any other. Every ``SPAN`` integers give one word: ``NOTHING``, or of the first offender
among them the place, times ``2 ** VALUE_BITS``, plus its value (clamped to ``VALUE_BITS`` bits), moved so that none is
negative. So the least word is that of the first offender, and the message can be that of the host's check.
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
"""Integers of a word: few enough for one thread (no shuffles of 64 bits), and the words are few bytes to fetch."""
VALUE_BITS = 59
"""Of a word, for the value; four are for the place, the sign is never set."""
HALF = 2 ** (VALUE_BITS - 1)
"""What is added to a value."""
LARGEST = HALF - 2
"""The largest value, so that no word of an offender is ``NOTHING``; the least is ``-HALF``."""
NOTHING = neutral("min", "int64")
PLACE = Index.of(dim_name(0)) * SPAN + reduction_name(0)
"""Of an integer among those of a bound, in the node that looks at them."""


def with_index_checks(graph: Graph) -> Graph:
    """The graph with a node for every bound on integers that are no constants, right behind what makes them.

    The nodes' results are outputs of the graph, and the bounds name them (``status``). Equal bounds share one.
    """
    questions = [_Question(graph, b) for b in graph.bounds]
    read = graph.consumers()
    position = {n.output: k for k, n in enumerate(graph.nodes)}
    behind: dict[int, list[Node]] = {}
    tensors, outputs, bounds = dict(graph.tensors), list(graph.outputs), list[IndexBound]()
    statuses: dict[tuple[Value, Dim, Dim], str] = {}
    for q in questions:
        if q.value is None or not all(read[t] for t in q.sources):
            bounds.append(q.bound)
            continue
        key = (q.value, q.bound.size, q.bound.offset)
        if key not in statuses:
            node = q.node(_fresh(q.name, tensors))
            statuses[key] = node.output
            tensors[node.output] = Tensor(node.output, "int64", (q.count.ceildiv(SPAN),))
            outputs.append(node.output)
            behind.setdefault(max((position.get(t, -1) for t in q.sources), default=-1), []).append(node)
        bounds.append(replace(q.bound, status=statuses[key]))
    nodes = behind.get(-1, [])
    for k, n in enumerate(graph.nodes):
        nodes += [n, *behind.get(k, [])]
    return replace(graph, nodes=tuple(nodes), tensors=tensors, outputs=tuple(outputs), bounds=tuple(bounds))


def with_kept_indices(graph: Graph) -> Graph:
    """The graph with a node for every bound on integers that are nowhere in memory, as they are arithmetic or a part of
    others: it writes them down for the host. The nodes' results are outputs of the graph, and the bounds name them.
    """
    read, inputs = graph.consumers(), {*graph.inputs, *graph.outputs}
    tensors, nodes, bounds = dict(graph.tensors), list(graph.nodes), list[IndexBound]()
    kept: dict[tuple[Index, tuple[Dim, ...]], str] = {}
    for b in graph.bounds:
        sources = {f.name for f in b.formula.fetches()} if b.formula is not None else set()
        there = b.tensor in inputs or bool(read.get(b.tensor))
        if b.formula is None or there or not sources <= tensors.keys() or sources <= graph.constants.keys():
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


class _Question:
    """A bound, and the integers that it is about: ``value``, at the place ``PLACE`` among ``count`` of them.

    ``value`` is None where they are constants, or cannot be read.
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
        """The integers over ``d0`` and ``r0``."""
        bound = self.bound
        if bound.formula is None and self.name not in self.graph.tensors:
            return None
        shape = self.graph.tensors[self.name].shape if bound.formula is None else bound.shape
        places = shape if bound.part[1] == 1 else (*shape[:-1], ONE)
        self.count = product(places)
        at = reshape_subscripts(places, (self.count,), (PLACE,))
        if bound.formula is not None:
            return bound.formula.subs({dim_name(a): i for a, i in enumerate(at)})
        return fetch(self.name, at if bound.part[1] == 1 else (*at[:-1], Index.of(bound.part[0])))

    def _value(self, formula: Index) -> Value | None:
        """A sum of products of sizes, places and fetched integers, which are loads: a guard keeps those in range."""
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
        """The reduction."""
        b, value = self.bound, self.value
        assert value is not None
        outside = op("or", op("lt", value, _number(-b.size - b.offset)), op("ge", value, _number(b.size - b.offset)))
        moved = op("add", _clamped(value), _word(HALF))
        word = op("add", op("mul", _number(Index.of(reduction_name(0))), _word(2 * HALF)), moved)
        offender = op("where", outside, word, NOTHING)
        body = op("where", op("lt", _number(PLACE), _number(self.count)), offender, NOTHING)
        return Compute(output, body, (Index.of(SPAN),), "min", b.node)


def _fresh(name: str, tensors: dict[str, Tensor], what: str = "outside") -> str:
    fresh, count = f"{name}.{what}", 1
    while fresh in tensors:
        count += 1
        fresh = f"{name}.{what}.{count}"
    return fresh


def _word(x: int) -> Value:
    return const(x, "int64")


def _number(i: Index) -> Value:
    return FromIndex("int64", i)


def _clamped(v: Value) -> Value:
    """A value in ``VALUE_BITS`` bits. (Written so that it is read three times, not four.)"""
    if isinstance(v, Op) and v.name == "cast" and v.args[0].dtype != "uint64":  # of 32 bits or fewer
        return v
    least, most = _word(-HALF), _word(LARGEST)
    return op("where", op("lt", v, least), least, op("where", op("gt", v, most), most, v))
