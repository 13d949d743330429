"""Plans in a notebook: kernels as a graph for queries, sizes as expressions of computer algebra.

Needs the extra ``polydyn[explore]``: networkx and sympy, which are imported on first use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from polydyn.errors import InputError, UnsupportedError
from polydyn.fusion.plan import FusionPlan
from polydyn.graph.ir import Compute, Guard, Tensor
from polydyn.lowering.place import flops
from polydyn.program.plan import Buffer, HostPlan
from polydyn.runtime.expressions import from_json
from polydyn.runtime.plain_expressions import Expression
from polydyn.schedules.expr import ITEMSIZE
from polydyn.schedules.index import ZERO, Atom, Index, product
from polydyn.schedules.names import given_back


def kernel_graph(plan: FusionPlan | HostPlan, sizes: Mapping[str, int] | None = None) -> Any:
    """Return a plan as a ``networkx.DiGraph``: an edge leads from the writer of a buffer to its reader.

    Nodes: the model's inputs and outputs by name, of kind ``input`` and ``output``, and between them, in launch order,
    kernels by label (``contract h``) with ``kind``, ``shapes`` (by buffer, of the buffers written), ``flops``,
    ``bytes`` (of the distinct buffers accessed) and ``reasons``. Edges: ``buffers`` (bytes by name), ``bytes`` (their
    sum) and ``flops`` (of the kernel at its start). Constants have no edges. Sizes are ``Index``, or numbers if
    ``sizes`` of the dims are given; ``networkx.dag_longest_path(graph, weight="flops")`` needs numbers. InputError: a
    size is missing. UnsupportedError: networkx is missing, or the writes of a host plan's launches are unknown.
    """

    def at(x: Index) -> Any:
        try:
            return x if sizes is None else x.evaluate(sizes)
        except KeyError as e:
            raise InputError(f"no size is given for {e.args[0]}", dim=e.args[0], remedy="give it, or no sizes") from e

    graph = _package("networkx").DiGraph()
    whole = plan if isinstance(plan, HostPlan) else plan.graph
    tensors: Mapping[str, Tensor | Buffer] = plan.buffers if isinstance(plan, HostPlan) else plan.graph.tensors
    nodes = [Step(n, "input", (), (n,)) for n in whole.inputs]
    nodes += steps(plan)
    nodes += [Step(n, "output", (n,), ()) for n in whole.outputs if n not in whole.inputs]
    writers: dict[str, list[str]] = {}
    for s in nodes:
        shapes = {n: tuple(map(at, tensors[n].shape)) for n in s.writes or s.reads}
        facts = {"kind": s.kind, "shapes": shapes, "flops": at(s.flops), "bytes": at(s.bytes), "reasons": s.reasons}
        graph.add_node(s.label, **facts)
        for n in s.writes:
            writers.setdefault(n, []).append(s.label)
    for reader, n, writer in [(s.label, b, w) for s in nodes for b in s.reads for w in writers.get(b, ())]:
        buffers = graph.edges[writer, reader]["buffers"] if graph.has_edge(writer, reader) else {}
        carried = buffers | {n: at(_bytes(tensors[n]))}
        total = sum(carried.values(), at(ZERO))
        graph.add_edge(writer, reader, buffers=carried, bytes=total, flops=graph.nodes[writer]["flops"])
    return graph


APART = ": apart from "
"""Separates the reader and the tensor in the reason why two groups are not fused (``FusionPlan.why_apart``)."""


@dataclass(frozen=True)
class Step:
    """A future kernel, or a launch: the buffers it reads and writes, its work over the model's symbols.

    ``reasons``: one line per primitive that joined, and for a launch also its other decisions. ``apart``: one line per
    tensor that it reads from another step. ``alike``: equal for steps of the same form. ``primitives``: one line per
    primitive of a fused group.
    """

    label: str
    kind: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    flops: Index = ZERO
    bytes: Index = ZERO
    reasons: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    alike: tuple[object, ...] = ()
    primitives: tuple[str, ...] = ()


def steps(plan: FusionPlan | HostPlan) -> list[Step]:
    """Return the groups of a fusion plan, or the launches of a host plan, in order.

    UnsupportedError: the writes of a host plan's launches are unknown.
    """
    return list(_launches(plan) if isinstance(plan, HostPlan) else _groups(plan))


def _launches(plan: HostPlan) -> Iterator[Step]:
    for x in plan.launches:
        if x.writes is None:
            raise UnsupportedError(
                f"the writes of launches in the host plan for {plan.place} are unknown",
                node=x.label, remedy="draw the fusion plan",
            )  # fmt: skip
        reads = tuple(b for b in dict.fromkeys(x.buffers) if b not in x.writes)
        apart = tuple(r for r in x.reasons if APART in r)
        alike = tuple(dict.fromkeys(c.kernel for c in x.candidates))
        yield Step(x.label, x.kind, reads, x.writes, x.flops, x.bytes, x.reasons, apart, alike)


def _groups(plan: FusionPlan) -> Iterator[Step]:
    for g in plan.groups:
        written = {n.output for n in g.nodes}
        reads = tuple(dict.fromkeys(t for n in g.nodes for t in n.inputs if t not in written))
        writes = list(g.outputs)
        for t in writes:  # a part of a concatenation also writes the concatenation
            if t in plan.windows and plan.windows[t].target not in writes:
                writes.append(plan.windows[t].target)
        touched = sum((_bytes(plan.graph.tensors[t]) for t in (*reads, *g.outputs)), ZERO)
        alike = (g.kind, *((n.reduce, plan.graph.tensors[n.output].shape, len(n.inputs)) for n in g.nodes))
        yield Step(
            f"{g.kind} {g.outputs[0]}", g.kind, reads, tuple(writes), flops(plan, g), touched, g.reasons,
            plan.why_apart(g), alike, tuple(_primitive(plan, n) for n in g.nodes),
        )  # fmt: skip


def _primitive(plan: FusionPlan, n: Compute) -> str:
    t = plan.graph.tensors[n.output]
    kind = f"{n.reduce} over {', '.join(map(str, n.reduction))}" if n.reduce else "map"
    return f"{n.output}: {t.dtype}[{', '.join(map(str, t.shape))}], {kind}, reads {', '.join(n.inputs) or 'nothing'}"


def _bytes(t: Tensor | Buffer) -> Index:
    return product(t.shape) * ITEMSIZE[t.dtype]


def symbol(name: str) -> Any:
    """Return the ``sympy.Symbol`` of a dim: an integer >= 0."""
    return _package("sympy").Symbol(given_back(name), integer=True, nonnegative=True)


def to_sympy(x: Index | Expression) -> Any:
    """Convert a size (``Index``, or from a program's manifest) to a ``sympy.Expr`` with the same value at all sizes.

    ``x // c`` becomes ``floor``, or ``ceiling`` if it rounds up; ``x - c * (x // c)`` becomes ``Mod``. Division by a
    size that may be 0 becomes a ``Piecewise`` with value 0 there. UnsupportedError: sympy is missing, or a tensor is
    read.
    """
    return _expression(_package("sympy"), x if isinstance(x, Index) else from_json(x))


def condition(guard: Guard | Mapping[str, Any]) -> Any:
    """Convert a guard (of a graph or plan, or from a program's manifest) to a sympy condition."""
    g = (guard.left, guard.relation, guard.right) if isinstance(guard, Guard) else (
        from_json(guard["left"]), guard["relation"], from_json(guard["right"])
    )  # fmt: skip
    left, right = (g[0] % g[2], ZERO) if g[1] == "%==" else (g[0], g[2])
    compare = _package("sympy").Le if g[1] == "<=" else _package("sympy").Eq
    return compare(to_sympy(left), to_sympy(right))


def _expression(sp: Any, x: Index) -> Any:
    for a in x.atoms():
        c = a.args[1].constant if isinstance(a, Atom) and a.kind == "floordiv" else None
        if isinstance(a, Atom) and c:
            terms = ((m, m.index(a), v) for m, v in x.terms.items() if a in m and v % c == 0)
            q = Index({m[:i] + m[i + 1 :]: -v // c for m, i, v in terms})
            rest = x - q * (a.args[0] % c)
            if len(rest.terms) < len(x.terms):
                return _expression(sp, rest) + _expression(sp, q) * sp.Mod(_expression(sp, a.args[0]), c)
    return sp.Add(*(sp.Mul(v, *(_factor(sp, a) for a in m)) for m, v in x.terms.items()))


def _factor(sp: Any, a: str | Atom) -> Any:
    if isinstance(a, str):
        return symbol(a)
    if a.kind == "fetch":
        raise UnsupportedError(f"{a} is read from a tensor", tensor=a.name, rule="sizes of dims only")
    args = [_expression(sp, i) for i in a.args]
    if a.kind != "floordiv":
        return (sp.Min if a.kind == "min" else sp.Max)(*args)
    c = a.args[1].constant
    if c and c > 1 and a.args[0].terms.get((), 0) == c - 1:
        return sp.ceiling((args[0] - (c - 1)) / c)
    quotient = sp.floor(args[0] / args[1])
    return quotient if args[1].is_positive else sp.Piecewise((0, sp.Eq(args[1], 0)), (quotient, True))


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as e:
        raise UnsupportedError(
            f"exploring needs {name}, which is not installed",
            rule="extra [explore]", remedy="pip install 'polydyn[explore]'",
        ) from e  # fmt: skip
