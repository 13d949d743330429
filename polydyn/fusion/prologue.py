"""Prologues: compute maps where their only reader, a product or window, reads them (TSCompiler 5.3).

A promotion statement copies the row operand of such a product, on a CPU to scratch, on a GPU to shared memory. The copy
computes the prologue's value instead (a guarded load for a padding), so the prologue's result never exists in memory.
Reductions other than contractions absorb only paddings: one comparison per tap replaces a padded copy.

A GPU copies rows that are contiguous along the reduction in 16-byte vectors or whole boxes, without arithmetic in the
threads. A map of such rows therefore stays a kernel if the product has many columns (``may_compute_rows``). Paddings
always join: a 16-byte copy is either inside the image or yields zeros.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from polydyn.fusion.places import is_guarded_view, reads_scattered
from polydyn.fusion.plan import FusedGroup, FusionPlan, Prologue
from polydyn.fusion.products import axes_of, is_reduction
from polydyn.graph.ir import Compute, Graph, Node, dim_name, iterators
from polydyn.graph.reference import evaluate_value
from polydyn.graph.rewriting import compose
from polydyn.schedules.expr import (
    INTEGERS,
    Const,
    Load,
    Op,
    Value,
    children,
    const,
    indices,
    loads,
    read_of,
    transform,
    walk,
)  # fmt: skip
from polydyn.schedules.index import product

MAX_OPERATIONS = 8
"""Maximum operations of a prologue that is computed again for every tap of a window."""
MOST_OPERATIONS = 64
"""Maximum operations of any prologue: it is one expression, and passes walk expressions recursively."""
EXPENSIVE_OPS = frozenset((
    "exp", "log", "tanh", "erf", "sin", "cos", "pow", "sigmoid", "sqrt", "div", "fmod", "mod", "expm1", "log1p", "erfc",
    "atan2",
))  # fmt: skip
FLOAT_PROLOGUE_DTYPES = ("float32", "float16", "bfloat16")
"""Dtypes that a prologue of a float product reads and computes."""
INTEGER_PROLOGUE_DTYPES = ("float32", "uint8", "int8")
"""Dtypes that a prologue of an integer product reads and computes."""
MAX_ROW_EVALUATIONS = 512
"""Maximum (columns of a product x taps) for which a GPU computes rows in its copies instead of in a separate kernel."""


def join_prologues(plan: FusionPlan, cuda: bool = False) -> FusionPlan:
    """Inline maps into the only product or window that reads them, if they are cheap enough.

    ``cuda``: build for a GPU. Maps of rows along the reduction must then pass ``may_compute_rows``.
    """
    once = _read_once(plan)
    chains = {
        g.outputs[0]: g.nodes for g in plan.groups
        if g.kind == "nest" and len(g.outputs) == 1 and g.outputs[0] in once and all(n.is_map for n in g.nodes)
    }  # fmt: skip
    new: dict[str, Node] = {}
    absorbed: set[str] = set()
    groups = []
    for g in plan.groups:
        core, maps = _joined(plan.graph, g, chains, cuda)
        if maps:
            new[core.output], absorbed = core, absorbed | {m.output for m in maps}
            reasons = (f"{m.output}: joins the promotion of {core.output}'s operand (prologue)" for m in maps)
            nodes = (core, *g.nodes[1:])
            g = replace(g, nodes=nodes, reasons=(*g.reasons, *reasons), prologue=Prologue(maps, g.nodes[0]))
        groups.append(g)
    graph_nodes = tuple(new.get(n.output, n) for n in plan.graph.nodes if n.output not in absorbed)
    remaining = tuple(g for g in groups if g.nodes[0].output not in absorbed)
    return replace(plan, graph=replace(plan.graph, nodes=graph_nodes), groups=remaining)


def _read_once(plan: FusionPlan) -> set[str]:
    """Return the tensors that are read by one node, at one load, and need not be in memory."""
    count: Counter[str] = Counter()
    for n in plan.graph.nodes:
        assert isinstance(n, Compute), "concatenations are windows by now"
        fetched = [a.name for i in indices(n.body) for a in i.fetches()]
        count.update([*(x.buffer for x in loads(n.body)), *fetched, *fetched])
    return {t for t, c in count.items() if c == 1 and t not in plan.stored}


def _joined(
    graph: Graph, g: FusedGroup, chains: Mapping[str, tuple[Compute, ...]], cuda: bool
) -> tuple[Compute, tuple[Compute, ...]]:
    """Return the first node of a group with all maps that may join its body, and these maps in order."""
    core, joined = g.nodes[0], tuple[Compute, ...]()
    if core.is_map:
        return core, joined
    more = True
    while more:
        more = False
        for t in (t for t in dict.fromkeys(x.buffer for x in loads(core.body)) if t in chains):
            maps = chains[t]
            if g.kind == "contract":
                operand = row_operand(core, t)
                fits = operand is not None and may_join(graph, core, operand, (*maps, *joined), cuda)
                fits = fits and (not cuda or may_compute_rows(graph, core, t, maps))
            else:
                fits = all(is_guarded_view(m) and not is_shuffled(graph, m) for m in maps)
            if fits:
                core, joined, more = lifted(compose(core, maps)), (*maps, *joined), True
                break
    return core, joined


def lies_along_reduction(n: Compute, tensor: str) -> bool:
    """Check whether consecutive elements of a tensor that a product reads are steps of its reduction only."""
    last = [x.index[-1].symbols() for x in loads(n.body) if x.buffer == tensor and x.index]
    return any(symbols and all(map(is_reduction, symbols)) for symbols in last)


def may_compute_rows(graph: Graph, n: Compute, tensor: str, maps: Sequence[Compute]) -> bool:
    """Check whether a GPU may compute the rows of a product in its copies, although it could copy ``tensor``
    unchanged.
    """
    if all(map(is_guarded_view, maps)) or not lies_along_reduction(n, tensor):
        return True
    operand = row_operand(n, tensor)
    other = _other_operand(n, operand) if operand else None
    if operand is None or other is None:
        return False
    sizes = dict(iterators(graph, n))
    taps = {s for x in loads(operand) for i in x.index[:-1] for s in i.symbols() if is_reduction(s)}
    times = product(sizes[x] for x in (*taps, *(axes_of(other) - axes_of(operand)))).constant
    return times is not None and times <= MAX_ROW_EVALUATIONS


def lifted(n: Compute) -> Compute:
    """Move a padding's guard to the outside of an operand: f(where(c, x, k)) = where(c, f(x), f(k)).

    This applies to integer products, and only if f(k) is a number: padding with the zero point becomes padding with
    zeros. Lanes and rows outside are then decided once, as for floats.
    """
    if n.body.dtype != "int32" or not isinstance(n.body, Op):
        return n

    def up(v: Value) -> Value:
        inside = [a for a in children(v) if _is_where(a)] if not _is_where(v) else []
        if not isinstance(v, Op) or len(inside) != 1:
            return v
        (guard,) = inside
        assert isinstance(guard, Op)
        then, orelse = (replace(v, args=tuple(guard.args[k] if a is guard else a for a in v.args)) for k in (1, 2))
        return Op(v.dtype, "where", (guard.args[0], then, _number(orelse)))

    args = tuple(transform(a, up) for a in n.body.args)
    arguments = (new if _is_where(new) and isinstance(children(new)[2], Const) else old for new, old in
            zip(args, n.body.args, strict=True))  # fmt: skip
    return replace(n, body=replace(n.body, args=tuple(arguments)))


def _is_where(v: Value) -> bool:
    return isinstance(v, Op) and v.name == "where"


def _number(v: Op) -> Value:
    """Return the value as a literal if it has no operands or is a difference of equal values, else the value."""
    if v.name == "sub" and v.dtype in INTEGERS and v.args[0] == v.args[1]:
        return const(0, v.dtype)
    fixed = not loads(v) and next(indices(v), None) is None
    return const(evaluate_value(v, {}, {}).item(), v.dtype) if fixed else v


def is_shuffled(graph: Graph, m: Compute) -> bool:
    """Check whether a subscript divides an iterator: an ordered copy serves vectors better than one read per tap.

    Sizes may be divided: ``d1*((W + 3) // 4) + d2`` walks an image.
    """
    moving = {dim_name(a) for a in range(len(graph.tensors[m.output].shape))}
    atoms = (a for x in loads(m.body) for i in x.index for a in i.atoms() if not isinstance(a, str))
    return any(not moving.isdisjoint(i.symbols()) for a in atoms for i in a.args)


def may_join(graph: Graph, n: Compute, operand: Value, maps: Sequence[Compute], cuda: bool) -> bool:
    """Check whether the maps are cheap enough to be computed where the product ``n`` reads them.

    ``operand`` is the part of ``n`` that reads them. Traffic falls because their results have no other reader. The
    number of evaluations grows: one for each tap of the window.
    """
    if any(i.fetches() for m in maps for i in indices(m.body)) or _divides_steps(operand, {m.output for m in maps}):
        return False
    taps = sum(is_reduction(s) for s in {s for x in loads(operand) for i in x.index for s in i.symbols()}) > 1
    if not cuda and any(reads_scattered(graph, m, taps) for m in maps):
        return False
    if all(is_guarded_view(m) for m in maps):
        return True
    other = _other_operand(n, operand)
    if other is None or other.buffer not in graph.constants:
        return False
    numbers = FLOAT_PROLOGUE_DTYPES if n.body.dtype == "float32" else INTEGER_PROLOGUE_DTYPES
    if any(x.dtype not in numbers for m in maps for x in (m.body, *loads(m.body))):
        return False
    work = [v for m in maps if not is_guarded_view(m) for v in walk(m.body) if isinstance(v, Op)]
    if not taps:
        return len(work) <= MOST_OPERATIONS
    return len(work) <= MAX_OPERATIONS and not any(v.name in EXPENSIVE_OPS for v in work)


def _divides_steps(operand: Value, tensors: Collection[str]) -> bool:
    """Check whether an operand reads tensors at quotients of a reduction's step.

    If such a tensor is stored, its elements are contiguous. A copy that computes them divides for each element.
    """
    atoms = (a for x in loads(operand) if x.buffer in tensors for i in x.index for a in i.atoms())
    return any(is_reduction(s) for a in atoms if not isinstance(a, str) for i in a.args for s in i.symbols())


def row_operand(n: Compute, tensor: str) -> Value | None:
    """Return the operand of the product ``n`` that reads a tensor, if the other operand has a column of its own."""
    assert isinstance(n.body, Op)
    for operand, other in (n.body.args, n.body.args[::-1]):
        if tensor in {x.buffer for x in loads(operand)}:
            if tensor in {x.buffer for x in loads(other)} or read_of(other) is None:
                return None
            return operand if axes_of(other) - axes_of(operand) else None
    return None


def _other_operand(n: Compute, operand: Value) -> Load | None:
    assert isinstance(n.body, Op)
    rest = [a for a in n.body.args if a is not operand]
    return read_of(rest[0]) if len(rest) == 1 else None
