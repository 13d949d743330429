"""Flatten primitives into statements: one iterator space per node, memory addressed by polynomials.

Axes of extent 1 disappear. Global tensors (everything in memory) are read and written at flat addresses, so reshapes of
dense tensors cost nothing. Only tensors inside the group keep subscripts. A guard whose loads provably stay in range
becomes a ``select``, which vector code may evaluate on both sides.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from polydyn.errors import UnsupportedError
from polydyn.fusion.guards import is_eager
from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.fusion.rows import rest_of
from polydyn.graph.ir import Compute, dim_name, reduction_name
from polydyn.schedules.expr import (
    C_FUNCTIONS,
    DTYPES,
    FLOAT8,
    SMALL,
    Load,
    Op,
    Value,
    map_index,
    substitute,
    transform,
    walk,
)  # fmt: skip
from polydyn.schedules.index import ONE, ZERO, Atom, Index, fetch
from polydyn.schedules.ranges import simplify

CPU_DTYPES = DTYPES
CUDA_DTYPES = tuple(t for t in DTYPES if t not in SMALL or t in FLOAT8)


@dataclass(frozen=True)
class FlatNode:
    """One flattened primitive.

    ``shared``: iterators of the group's common rows. ``inner``: its other output axes. ``reduction``: reduction
    iterators. Each is (name, extent). ``body``: loads of global buffers have one subscript, the address; loads of group
    tensors have only their inner subscripts. ``address``: the address of the result if it is written to memory.
    """

    output: str
    dtype: str
    shared: tuple[tuple[str, Index], ...]
    inner: tuple[tuple[str, Index], ...]
    reduction: tuple[tuple[str, Index], ...]
    reduce: str | None
    body: Value
    buffer: str
    address: Index


def flatten(plan: FusionPlan, group: FusedGroup, node: Compute, rows: frozenset[str] = frozenset()) -> FlatNode:
    """Return the flat form of one node of a group.

    ``rows``: tensors of which the kernel holds whole rows. Their loads keep only the last subscript.
    """
    graph = plan.graph
    tensor = graph.tensors[node.output]
    own, named = group.rows[node.output], group.rows[group.nodes[-1].output]
    own_axes = rest_of(graph, node.output, group.rows)
    shared = [(f"i{name}", tensor.shape[a]) for a, name in zip(own, named, strict=True)]
    inner = [(f"j{n}", tensor.shape[a]) for n, a in enumerate(own_axes)]
    count = len(inner)
    red = [(j, e) for j, e in enumerate(node.reduction) if e != ONE]
    reduction = [(f"j{count + n}", e) for n, (j, e) in enumerate(red)]
    env: dict[str, Index] = {dim_name(a): ZERO for a in range(len(tensor.shape))}
    env |= {reduction_name(j): ZERO for j in range(len(node.reduction))}
    env |= {dim_name(a): Index.of(n) for a, (n, _) in zip((*own, *own_axes), (*shared, *inner), strict=True)}
    env |= {reduction_name(j): Index.of(n) for (j, _), (n, _) in zip(red, reduction, strict=True)}
    ranges = dict([*shared, *inner, *reduction])
    local = {m.output for m in group.nodes}
    body = _eager(plan, substitute(node.body, env), ranges)
    body = transform(body, lambda v: _flat_load(plan, group, v, local, rows, ranges))
    body = map_index(body, lambda i: simplify(i.rebuild(lambda a: _flat_fetch(plan, a)), ranges))
    subscripts = tuple(env[dim_name(a)] for a in range(len(tensor.shape)))
    buffer, address = plan.address_of(node.output, subscripts)
    return FlatNode(
        node.output, tensor.dtype, tuple(shared), tuple(inner), tuple(reduction), node.reduce, body, buffer, address
    )


def check_dtypes(node: Compute, dtypes: Collection[str], target: str) -> None:
    """Raise UnsupportedError if a node computes with a dtype that the target's kernels do not support."""
    for v in walk(node.body):
        if target != "CPU" and isinstance(v, Op) and v.name in C_FUNCTIONS:
            raise UnsupportedError(
                f"the C function {v.name} runs on CPUs only", node=node.origin, tensor=node.output,
                remedy="register the operator by primitives (docs/extending.md)",
            )  # fmt: skip
        if v.dtype not in dtypes:
            raise UnsupportedError(
                f"{target} kernels do not support dtype {v.dtype}",
                node=node.origin,
                tensor=node.output,
                remedy="cast the model to float32",
            )


def _flat_load(
    plan: FusionPlan, group: FusedGroup, v: Value, local: set[str], rows: frozenset[str], ranges: Mapping[str, Index]
) -> Value:
    if not isinstance(v, Load):
        return v
    if v.buffer in rows:
        return replace(v, index=v.index[-1:])
    if v.buffer in local:
        return replace(v, index=tuple(v.index[a] for a in rest_of(plan.graph, v.buffer, group.rows)))
    buffer, address = plan.address_of(v.buffer, v.index)
    return Load(v.dtype, buffer, (simplify(address, ranges),))


def _flat_fetch(plan: FusionPlan, a: Atom) -> Index:
    if a.kind != "fetch":
        return Index({(a,): 1})
    buffer, address = plan.address_of(a.name, a.args)
    return fetch(buffer, (address,))


def _eager(plan: FusionPlan, body: Value, ranges: Mapping[str, Index]) -> Value:
    """Turn ``where`` into ``select`` if every load of its branches is provably in range."""

    def f(v: Value) -> Value:
        if isinstance(v, Op) and v.name == "where" and is_eager(plan.graph, v, ranges):
            return replace(v, name="select")
        return v

    return transform(body, f)


def map_addresses(node: FlatNode, env: Mapping[str, Index]) -> FlatNode:
    """Substitute iterators in all addresses of a node."""
    return replace(node, body=substitute(node.body, env), address=node.address.subs(env))
