"""verify_graph: the invariants of a Graph."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from math import lcm
from random import Random

from polydyn.errors import PolydynError, failed_plan
from polydyn.graph.ir import Compute, Concat, Graph, Guard, Node, dim_name, reduction_name
from polydyn.schedules.expr import OPS, REDUCTIONS, FromIndex, Op, indices, loads, symbols_of, walk
from polydyn.schedules.index import Index

DRAWS, SIZE_LIMIT = 2000, 130
"""Draws of sizes, and their bound, in the search for a call for which two sizes differ."""


def free_symbols(node: Node) -> frozenset[str]:
    """Return the symbols of a node's body and reduction extents that are not its iterators."""
    if isinstance(node, Concat):
        return frozenset()
    symbols = symbols_of(node.body) | {s for e in node.reduction for s in e.symbols()}
    return frozenset(s for s in symbols if not (s[:1] in "dr" and s[1:].isdigit()))


def verify_graph(graph: Graph) -> None:
    """Check that

    1. every tensor is defined once: an input, a constant or a node's output; nodes read only earlier definitions
       (topological order); every output is a node's output;
    2. every symbol in shapes, bodies and guards has exactly one source: an axis of an input (so every dim is
       arithmetic on sources), and the source's axis exists;
    3. iterators in a body are bound: ``d<i>`` by the output's rank, ``r<j>`` by the reductions; no symbol has the
       name of an iterator;
    4. loads and fetches have as many subscripts as the tensor has axes; constants have the shape of their tensor;
    5. dtypes agree: loads with tensors, bodies with outputs, operands with each other, fetched tensors are integers;
       conditions are bool;
    6. reduction dims need an operation; parts of a Concat agree except on its axis.

    A violation is a bug in polydyn, raised as PolydynError that names node and tensor.
    """
    defined = [*graph.inputs, *graph.constants, *(n.output for n in graph.nodes)]
    if len(defined) != len(set(defined)):
        twice = sorted({t for t in defined if defined.count(t) > 1})
        raise _bug(f"defined twice: {', '.join(twice)}")
    known = {*graph.inputs, *graph.constants}
    for t in (*known, *graph.outputs):
        if t not in graph.tensors:
            raise _bug("a tensor without a type", tensor=t)
    _verify_sources(graph)
    for name, array in graph.constants.items():
        if tuple(d.constant for d in graph.tensors[name].shape) != array.shape:
            raise _bug(f"a constant of shape {array.shape} is declared {graph.tensors[name].shape}", tensor=name)
    sources = frozenset(s.symbol for s in graph.sources)
    for n in graph.nodes:
        if n.output not in graph.tensors:
            raise _bug("a tensor without a type", n, n.output)
        for t in n.inputs:
            if t not in known:
                raise _bug("read before it is computed", n, t)
        if isinstance(n, Compute):
            _verify_compute(graph, sources, n)
        else:
            _verify_concat(graph, n)
        known.add(n.output)
    for t in graph.outputs:
        if t not in known or t in graph.inputs or t in graph.constants:
            raise _bug("an output that no node computes", tensor=t)


def _bug(message: str, node: Node | None = None, tensor: str | None = None) -> PolydynError:
    place = None if node is None else f"{node.origin or node.output}"
    return failed_plan(
        PolydynError(f"the graph broke an invariant: {message}", node=place, tensor=tensor), "the graph",
        (node.origin,) if node is not None and node.origin else (),
    )  # fmt: skip


def _verify_sources(graph: Graph) -> None:
    names = [s.symbol for s in graph.sources]
    if len(names) != len(set(names)):
        raise _bug("a symbol with two sources")
    for s in graph.sources:
        if s.input not in graph.inputs or s.axis >= len(graph.tensors[s.input].shape):
            raise _bug(f"the source of {s.symbol} does not exist", tensor=s.input)
        if s.symbol[:1] in "dr" and s.symbol[1:].isdigit():
            raise _bug(f"the symbol {s.symbol} is called like an iterator", tensor=s.input)
    known = frozenset(names)
    for t in graph.tensors.values():
        for d in t.shape:
            _known_symbols(d, known, None, t.name)
    for g in graph.guards:
        _known_symbols(g.left, known, None, g.message)
        _known_symbols(g.right, known, None, g.message)


def _known_symbols(d: Index, sources: frozenset[str], node: Node | None, tensor: str) -> None:
    unknown = d.symbols() - sources
    if unknown:
        raise _bug(f"{', '.join(sorted(unknown))} in {d} has no source", node, tensor)


def _verify_compute(graph: Graph, sources: frozenset[str], n: Compute) -> None:
    """Check a node, unless it was checked with these tensors: most passes leave most nodes as they are."""
    tensors = (sources, *(graph.tensors[t] for t in (n.output, *n.inputs)))
    if n.__dict__.get("_verified") != tensors:
        _check_compute(graph, sources, n)
        n.__dict__["_verified"] = tensors


def _check_compute(graph: Graph, sources: frozenset[str], n: Compute) -> None:
    out = graph.tensors[n.output]
    bound = sources.union(map(dim_name, range(len(out.shape))), map(reduction_name, range(len(n.reduction))))
    for i in indices(n.body):
        _known_symbols(i, bound, n, n.output)
        for a in i.fetches():
            t = graph.tensors[a.name]
            if len(a.args) != len(t.shape) or "int" not in t.dtype:
                raise _bug(f"{a} does not fit {t.dtype}{list(t.shape)}", n, a.name)
    for e in n.reduction:
        _known_symbols(e, sources, n, n.output)
    for x in loads(n.body):
        t = graph.tensors[x.buffer]
        if len(x.index) != len(t.shape) or x.dtype != t.dtype:
            raise _bug(f"a load of {x.dtype} with {len(x.index)} subscripts from {t.dtype}{list(t.shape)}", n, x.buffer)
    if n.body.dtype != out.dtype:
        raise _bug(f"a body of {n.body.dtype} for an output of {out.dtype}", n, n.output)
    if (n.reduce is None and n.reduction) or (n.reduce is not None and n.reduce not in REDUCTIONS):
        raise _bug(f"reduction {n.reduce} over {list(n.reduction)}", n, n.output)
    for v in walk(n.body):
        if isinstance(v, Op):
            _verify_op(v, n)
        if isinstance(v, FromIndex) and v.dtype == "bool":
            raise _bug("an index used as bool", n, n.output)


def _verify_op(v: Op, n: Compute) -> None:
    info = OPS.get(v.name)
    if info is None or info.arity != len(v.args):
        raise _bug(f"{v.name} with {len(v.args)} arguments", n, n.output)
    args = v.args[1:] if v.name == "where" else v.args
    if v.name == "where" and v.args[0].dtype != "bool":
        raise _bug(f"a condition of {v.args[0].dtype}", n, n.output)
    if len({a.dtype for a in args}) != 1:
        raise _bug(f"{v.name} of {', '.join(a.dtype for a in args)}", n, n.output)
    expected: Mapping[str, str] = {"bool": "bool", "same": args[-1].dtype, "given": v.dtype}
    if v.dtype != expected[info.result]:
        raise _bug(f"{v.name} gives {expected[info.result]}, not {v.dtype}", n, n.output)


def _differ(graph: Graph, a: Index, b: Index) -> bool:
    """Return whether two sizes differ in a call that every guard allows: sizes below ``SIZE_LIMIT`` are drawn,
    and multiples that guards need."""
    if a == b or any(g.relation == "==" and {g.left, g.right} == {a, b} for g in graph.guards):
        return False
    if a.fetches() or b.fetches():
        return True
    guards = [g for g in graph.facts if not (g.left.fetches() or g.right.fetches())]
    symbols = sorted({s for i in (a, b, *(x for g in guards for x in (g.left, g.right))) for s in i.symbols()})
    equal = {str(g.left): g.right for g in guards if g.relation == "==" and g.left.is_symbol}
    scale = lcm(*(n for g in guards if g.relation == "%==" and (n := g.right.constant)))
    draw = Random(0)
    for _ in range(DRAWS):
        env = {s: draw.randrange(SIZE_LIMIT) * draw.choice((1, scale)) for s in symbols}
        with suppress(KeyError):
            env |= {s: i.evaluate(env) for s, i in equal.items()}
        if all(_holds(g, env) for g in guards) and a.evaluate(env) != b.evaluate(env):
            return True
    return False


def _holds(g: Guard, env: Mapping[str, int]) -> bool:
    left, right = g.left.evaluate(env), g.right.evaluate(env)
    if g.relation == "%==":
        return right != 0 and left % right == 0
    return left == right if g.relation == "==" else left <= right


def _verify_concat(graph: Graph, n: Concat) -> None:
    out = graph.tensors[n.output]
    for p in n.parts:
        t = graph.tensors[p]
        pairs = [p for i, p in enumerate(zip(t.shape, out.shape, strict=False)) if i != n.axis]
        if t.dtype != out.dtype or len(t.shape) != len(out.shape) or any(_differ(graph, a, b) for a, b in pairs):
            raise _bug(f"a part {t.dtype}{list(t.shape)} of {out.dtype}{list(out.shape)}", n, p)
