"""Prepare a graph for grouping: inline views into their readers and scalars into bodies, push permutations into
producers.

A view renames elements, so reading it means reading its base at other subscripts (``Views are strides``). A permutation
that is the only reader of a computed tensor is absorbed by the producer, which then writes the permuted order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from polydyn.errors import CodegenError
from polydyn.fusion.places import is_better_copied
from polydyn.graph.ir import Compute, Concat, Graph, Node, Tensor, dim_name, iterators, value_size
from polydyn.schedules.expr import (
    INTEGERS,
    Const,
    FromIndex,
    Load,
    Op,
    Value,
    loads,
    map_index,
    transform,
    walk,
)
from polydyn.schedules.index import Atom, Index, fetch
from polydyn.schedules.ranges import simplify

BYTE_DTYPES = ("int8", "uint8")
PARAMETER_DTYPES = (*BYTE_DTYPES, "int16", "uint16", "float32")
"""Dtypes of scales and zero points. One-element 8-bit constants always stay operands, because the padding around 8-bit
data holds a zero point. So do numbers that are combined into one number, such as a product of two scales.
"""
MAX_INLINE_OPERATIONS = 6
"""Maximum operations of a map without loads (iota, sizes) that its readers recompute."""


MAX_DEPTH = 32
"""Maximum views and maps, one before the other, through which a permutation looks for rows."""


def inline_views(graph: Graph, cuda: bool = False) -> Graph:
    """Remove views and trivial maps from the graph. Those that are graph outputs stay as copies.

    On a CPU those stay too that a product or window reads better in order (``is_better_copied``).

    A note records each broadcast that the shape facts prove to change nothing (BladeDISC 3.2). An undecided broadcast
    stays in the subscripts of its readers, as a remainder by the source's size.
    """
    remaining: list[Node] = []
    notes: list[str] = []
    sources: dict[str, Compute] = {}
    consumers = graph.consumers()
    for n in graph.nodes:
        if isinstance(n, Concat):
            remaining.append(n)
            continue
        n = _rewrite(graph, n, sources)
        if n.output in graph.outputs or not (n.is_view or _trivial(n)):
            remaining.append(n)
        elif n.is_view and not cuda and is_better_copied(graph, n, consumers):
            remaining.append(n)
            notes.append(f"{n.output} is copied: its elements are not evenly apart, and a product or window reads it")
        else:
            sources[n.output] = n
            notes += _unnecessary(graph, n)
    needed = {t for n in remaining if isinstance(n, Concat) for t in n.parts}
    extra = [sources[t] for t in sources if t in needed]
    order = {n.output: i for i, n in enumerate(graph.nodes)}
    nodes = tuple(sorted([*remaining, *extra], key=lambda n: order[n.output]))
    return replace(graph, nodes=nodes, notes=(*graph.notes, *notes))


def _unnecessary(graph: Graph, n: Compute) -> list[str]:
    """Return a note for a view that changes nothing, or an empty list."""
    if not isinstance(n.body, Load) or graph.tensors[n.output].shape != graph.tensors[n.body.buffer].shape:
        return []
    same = all(i == Index.of(dim_name(a)) for a, i in enumerate(n.body.index))
    return [f"{n.output} is {n.body.buffer}: the shapes are proven equal, nothing is broadcast"] if same else []


def _trivial(n: Compute) -> bool:
    small = n.is_map and not n.inputs and value_size(n.body) <= MAX_INLINE_OPERATIONS
    return small and (n.body.dtype not in INTEGERS or as_index(n.body) is not None)


def as_index(v: Value) -> Index | None:
    """Return the value as an Index if it is integer arithmetic over iterators and sizes, or None."""
    if isinstance(v, FromIndex):
        return v.index
    if isinstance(v, Const) and v.dtype in INTEGERS:
        return Index.of(int(v.value))
    if not isinstance(v, Op) or v.dtype not in INTEGERS or v.name not in ("add", "sub", "mul", "cast"):
        return None
    args = [as_index(a) for a in v.args]
    if any(a is None for a in args):
        return None
    a, *b = (x for x in args if x is not None)
    return a if v.name == "cast" else a + b[0] if v.name == "add" else a - b[0] if v.name == "sub" else a * b[0]


def _rewrite(graph: Graph, n: Compute, sources: Mapping[str, Compute]) -> Compute:
    """Redirect reads of views and trivial maps to their sources, and turn one-element constants into literals.

    Scales and zero points stay operands: their numbers differ between layers, and layers share kernels.
    """
    ranges = dict(iterators(graph, n))
    quantizes = _quantizes(n.body) or graph.tensors[n.output].shape == ()

    def value(v: Value) -> Value:
        if not isinstance(v, Load):
            return v
        array = graph.constants.get(v.buffer)
        if array is not None and array.size == 1:
            parameter = array.ndim <= 1 and (v.dtype in BYTE_DTYPES or (quantizes and v.dtype in PARAMETER_DTYPES))
            return v if parameter else Const(v.dtype, array.reshape(-1)[0].item())
        source = sources.get(v.buffer)
        if source is None:
            return v
        return source.at(v.index)

    def atom(a: Atom) -> Index:
        source = sources.get(a.name) if a.kind == "fetch" else None
        if source is None:
            return Index({(a,): 1})
        env = {dim_name(k): x for k, x in enumerate(a.args)}
        if isinstance(source.body, Load):
            return fetch(source.body.buffer, (i.subs(env) for i in source.body.index))
        index = as_index(source.body)
        if index is None:
            raise CodegenError(f"{a.name} was inlined but is not an Index", tensor=a.name)
        return index.subs(env)

    body = transform(n.body, value)
    body = map_index(body, lambda i: simplify(i.rebuild(atom), ranges))
    return replace(n, body=body)


def _quantizes(v: Value) -> bool:
    """Check whether a node rounds, or casts int32 to float32. Quantizing and dequantizing consist of these
    operations.
    """
    return any(
        isinstance(x, Op)
        and (x.name == "rint" or (x.name == "cast" and x.dtype == "float32" and x.args[0].dtype == "int32"))
        for x in walk(v)
    )


def absorb_permutations(graph: Graph) -> Graph:
    """Compute a tensor in the axis order that its only reader uses, and repeat for its producers.

    A transpose that is the only reader is replaced by its producer. A map may also be the only reader and read at
    permuted subscripts (for example, the cast after a sum in 16 bits). Its operand is then written in the map's own
    order. The last axis moves only if maps between two transposes then read what is before them along rows.
    """
    tensors, consumers = dict(graph.tensors), graph.consumers()
    nodes: dict[str, Node] = {n.output: n for n in graph.nodes}
    fixed = {*graph.outputs, *(b.tensor for b in graph.bounds)}

    def movable(name: str) -> Compute | None:
        source = nodes.get(name)
        own = isinstance(source, Compute) and not source.is_view and name not in fixed and len(consumers[name]) == 1
        return source if own and isinstance(source, Compute) else None

    def straight(x: Load, last: str, depth: int = 0) -> bool:
        """Check whether a load reads rows of the last axis, seen through at most MAX_DEPTH views and maps before it."""
        node = nodes.get(x.buffer)
        source = node if isinstance(node, Compute) and node.is_view else movable(x.buffer)
        if source is not None and source.is_map:
            inside = dict.fromkeys(loads(source.at(x.index)))
            return depth < MAX_DEPTH and all(straight(y, last, depth + 1) for y in inside)
        return all(last not in i.symbols() for i in x.index[:-1])

    def absorbed(n: Compute, x: Load) -> bool:
        """Check whether the producer of a load should write the order of its reader."""
        last, source = dim_name(len(tensors[n.output].shape) - 1), nodes.get(x.buffer)
        kept = x.index[-1:] == (Index.of(last),)
        return _is_permutation(tensors, n, x) and (
            kept or (isinstance(source, Compute) and source.is_map and straight(x, last))
        )

    for name in reversed([n.output for n in graph.nodes]):  # readers before producers
        n = nodes.get(name)
        if not isinstance(n, Compute) or not n.is_map:
            continue
        view = n.body if n.is_view and isinstance(n.body, Load) else None
        source = movable(view.buffer) if view and absorbed(n, view) else None
        if view and source:
            n = nodes[name] = replace(source, output=name, body=source.at(view.index))
            del nodes[source.output]
        for x in dict.fromkeys(loads(n.body)) if n.is_map and not n.is_view else ():
            source, alone = movable(x.buffer), all(y == x for y in loads(n.body) if y.buffer == x.buffer)
            if source and alone and x.index != _in_order(x).index and absorbed(n, x):
                nodes[x.buffer] = replace(source, body=source.at(x.index))
                tensors[x.buffer] = replace(tensors[x.buffer], shape=tensors[name].shape)
                n = nodes[name] = replace(n, body=transform(n.body, partial(_replace_load, x, _in_order(x))))
    return replace(graph, tensors=tensors, nodes=tuple(nodes[m.output] for m in graph.nodes if m.output in nodes))


def _in_order(x: Load) -> Load:
    """Return the load at a node's own iterators, in order."""
    return replace(x, index=tuple(Index.of(dim_name(a)) for a in range(len(x.index))))


def _replace_load(old: Value, new: Value, v: Value) -> Value:
    """Replace ``old`` by ``new``."""
    return new if v == old else v


def _is_permutation(tensors: Mapping[str, Tensor], n: Compute, x: Load) -> bool:
    """Check whether a node reads a tensor through a permutation of its axes."""
    axes = [dim_name(a) for a in range(len(tensors[n.output].shape))]
    names = [str(i) for i in x.index if i.is_symbol]
    return len(names) == len(x.index) and sorted(names) == sorted(axes)
