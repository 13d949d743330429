"""Which reader may join which producer: the rules of the epilogue, element-wise and stitch passes.

A rule answers for two groups: a ``Join``, the reason against it in one line, or None when the pair is another pass's.
BladeDISC's words: *group-dims* are the leading axes that all nodes of a group share (its ``prefix``), *tile-dims* the
others; reductions and outputs are *dominant*; *locality* holds between two of them when what one reads of the other has
the same group-dims. Equality is that of dims in normal form, so that equalities learned anywhere count.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from polydyn.codegen.passes.vectorise import has_lanes, is_affine_in_lanes
from polydyn.fusion.guards import needs_guard
from polydyn.fusion.partition import Join
from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.graph.ir import Compute, Graph, dim_name, reduction_name
from polydyn.schedules.expr import ITEMSIZE, Load, Op, loads
from polydyn.schedules.index import ONE, ZERO, Index, product

WIDEST = 16
"""Lanes of the widest vectors: what is affine in them is so in narrower ones."""


def is_tileable(graph: Graph, n: Compute) -> bool:
    """Whether a register tile can compute the node: in vector lanes, which evaluate all branches.

    Halves count: a target without them refuses the model by name.
    """
    return has_lanes(n.body, ("float16", "bfloat16")) and not needs_guard(graph, n)


def own_prefix(graph: Graph, n: Compute) -> int:
    """The axes of a node up to the last that is not constant 1."""
    shape = graph.tensors[n.output].shape
    while shape and shape[-1] == ONE:
        shape = shape[:-1]
    return len(shape)


# -- the passes ------------------------------------------------------------------------------------------------------


def epilogue(plan: FusionPlan, a: FusedGroup, b: FusedGroup) -> Join | str | None:
    """Element-wise readers join the contraction whose output they read element by element (TSCompiler 4.2)."""
    if b.kind == "contract":
        if a.kind == "contract":
            return "fusion stops at another backbone's group; its operands come from memory"
        if any(_narrows(n) and n.output in plan.inputs[b.nodes[0].output] for n in a.nodes):
            return "a cast stays with what makes the operand: inside, the product's inputs would be wider in memory"
        return "a backbone begins its group; its operands come from memory"
    if a.kind != "contract":
        return None
    graph = plan.graph
    shape = graph.tensors[a.nodes[0].output].shape
    for n in b.nodes:
        if not n.is_map:
            return "it reduces; only element-wise readers are epilogues of a contraction"
        if graph.tensors[n.output].shape != shape:
            return f"its shape {_dims(graph, n)} is not the contraction's ({', '.join(map(str, shape))})"
        if not _aligned(graph, n, a.nodes):
            return "it does not read the contraction's output element by element"
        if not is_tileable(graph, n):
            return "it has no form in the register tile's vector lanes"
        if (scattered := _scattered(plan, n)) is not None:
            return f"it reads {scattered} at addresses that are not affine along a vector of columns"
    return Join(len(shape), "element-wise on the contraction's output (epilogue)", "contract")


def elementwise(plan: FusionPlan, a: FusedGroup, b: FusedGroup) -> Join | str | None:
    """Element-wise groups join element-wise groups (BladeDISC 4.1)."""
    if not all(n.is_map for g in (a, b) for n in g.nodes) or a.kind != "nest" or b.kind != "nest":
        return None
    made = list(a.nodes)
    for n in b.nodes:
        why = _shares_rows(plan.graph, n, made, a.prefix)
        if why:
            return why
        made.append(n)
    return Join(a.prefix, "element-wise on shared rows")


def stitch(plan: FusionPlan, a: FusedGroup, b: FusedGroup) -> Join | str | None:
    """Groups around reductions become one where locality holds between their dominants (BladeDISC 4.2)."""
    if a.kind != "nest" or b.kind != "nest" or all(n.is_map for g in (a, b) for n in g.nodes):
        return None
    graph, prefix, made = plan.graph, a.prefix, list(a.nodes)
    for n in b.nodes:
        if n.is_map:
            why = _shares_rows(graph, n, made, prefix)
        else:
            found = _group_dims(graph, n, made, prefix)
            why, prefix = (found, prefix) if isinstance(found, str) else (None, found)
        if why:
            return why
        made.append(n)
    reduces = any(not n.is_map for n in b.nodes)
    return Join(prefix, "reduces rows that the group makes (stitch)" if reduces else "element-wise on shared rows")


def _scattered(plan: FusionPlan, n: Compute) -> str | None:
    """A tensor that vectors along the node's last axis would have to gather."""
    ranges = {dim_name(a): e for a, e in enumerate(plan.graph.tensors[n.output].shape)}
    column = dim_name(own_prefix(plan.graph, n) - 1)
    for x in loads(n.body):
        _, address = plan.address_of(x.buffer, x.index)
        if not is_affine_in_lanes(address, column, WIDEST, ranges):
            return x.buffer
    return None


def _narrows(n: Compute) -> bool:
    """Whether a node stores its result in fewer bytes than it computes with."""
    return isinstance(n.body, Op) and n.body.name == "cast" and ITEMSIZE[n.body.args[0].dtype] > ITEMSIZE[n.body.dtype]


# -- locality --------------------------------------------------------------------------------------------------------


def _shares_rows(graph: Graph, n: Compute, made: list[Compute], p: int) -> str | None:
    """Why a map cannot run with ``p`` group-dims among the nodes ``made``."""
    shape, rows = graph.tensors[n.output].shape, graph.tensors[made[0].output].shape[:p]
    if shape[:p] != rows:
        return f"group-dims differ: {_dims(graph, n)} does not begin with ({', '.join(map(str, rows))})"
    if not _aligned(graph, n, made):
        return "no locality: it reads other rows of the group than its own"
    inner = product(shape[p:])
    if inner != ONE and inner not in {_tile_dims(graph, m, p) for m in made}:
        return f"tile-dims differ: no node of the group runs over {inner} elements of a row"
    return None


def _group_dims(graph: Graph, n: Compute, made: list[Compute], prefix: int) -> int | str:
    """The group-dims that a reduction and the nodes ``made`` share, or why there are none."""
    own = {m.output for m in made}
    counts = []
    for x in loads(n.body):
        if x.buffer in own:
            k = 0
            while k < len(x.index) and k < len(graph.tensors[n.output].shape) and _identity(graph, x, k):
                k += 1
            counts.append(k)
    shape, rows = graph.tensors[n.output].shape, graph.tensors[made[0].output].shape
    p = min([own_prefix(graph, n), *counts]) if counts else own_prefix(graph, n)
    if not prefix and all(own_prefix(graph, m) == 0 for m in (n, *made)):
        return 0  # single elements: each is one task, whatever it reduces
    if not p or any(e != ONE for e in shape[p:]) or shape[:p] != rows[:p]:
        return "no locality: the reduction does not keep the leading axes of what the group makes"
    if p == prefix:
        return p
    pure = all(m.is_map for m in made) and prefix == own_prefix(graph, made[0])
    if counts and pure and p < prefix and _trailing(n, own, p):
        return p
    return f"group-dims differ: the reduction keeps {p} axes, the group shares {prefix}"


def _trailing(n: Compute, own: Collection[str], p: int) -> bool:
    """Whether every group tensor read is reduced over all its axes from ``p`` on, in order."""
    wanted = [reduction_name(j) for j in range(len(n.reduction))]
    return all([str(i) for i in x.index[p:]] == wanted for x in loads(n.body) if x.buffer in own)


def _tile_dims(graph: Graph, m: Compute, p: int) -> Index:
    """The product of the tile-dims: how many elements of a row a node runs over."""
    return product((*graph.tensors[m.output].shape[p:], *m.reduction))


def _aligned(graph: Graph, n: Compute, made: Iterable[Compute]) -> bool:
    """Every read of the nodes' tensors is at the reader's own subscripts; none is fetched from."""
    own = {m.output for m in made}
    fetched = {a.name for x in loads(n.body) for i in x.index for a in i.fetches()}
    return not fetched & own and all(
        all(_identity(graph, x, a) for a in range(len(x.index))) for x in loads(n.body) if x.buffer in own
    )


def _identity(graph: Graph, x: Load, axis: int) -> bool:
    i = x.index[axis]
    return i == Index.of(dim_name(axis)) or (i == ZERO and graph.tensors[x.buffer].shape[axis] == ONE)


def _dims(graph: Graph, n: Compute) -> str:
    return f"({', '.join(map(str, graph.tensors[n.output].shape))})"
