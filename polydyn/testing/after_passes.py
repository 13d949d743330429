"""Evaluate a model by the reference after every pass, at small sizes, so that a pass with an error is named.

After the import and the passes over the graph, the graph is evaluated. After the passes over groups, the groups are
evaluated in launch order: a group reads only tensors that an earlier one stored in memory, and parts of concatenations
are written at the offsets of their windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from polydyn.backends import Options, target_of
from polydyn.errors import PolydynError
from polydyn.fusion.partition import join_groups
from polydyn.fusion.pipeline import FUSION, REWRITES, Pass
from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.fusion.prologue import join_prologues
from polydyn.fusion.separate import separate
from polydyn.graph.dtypes import numpy_dtype
from polydyn.graph.ir import Graph
from polydyn.graph.reference import bind_symbols, evaluate, evaluate_node
from polydyn.schedules.lanes import DEVICE_DTYPES, VECTOR_DTYPES
from polydyn.testing.authorities import Array, Arrays

Evaluation = Callable[[Arrays], Mapping[str, Array]]


@dataclass(frozen=True)
class Stage:
    """A model after a pass; ``run``: returns its outputs for some inputs. InputError: a guard rejects them."""

    name: str
    run: Evaluation


def stages(graph: Graph, target: str = "cpu", options: Options | None = None) -> Iterator[Stage]:
    """Yield the imported graph of one part and the result of every pass, except passes that change nothing.

    Errors of the passes are raised unchanged.
    """
    backend = target_of(target, options)
    device, rounded = backend.on_device, backend.rounded

    def runs(p: Pass) -> bool:
        other = p.cpu if device else p.cuda
        needs = (p.bf16 and not rounded) or (p.unit and not (rounded and backend.unit))
        return not (other or needs or p.name in backend.without)

    yield Stage("import", partial(evaluate, graph))
    for p in filter(runs, (*REWRITES, *FUSION)):
        if p.graph:
            before, graph = graph, p.graph(graph)
            if graph != before:
                yield Stage(f"pass {p.name}", partial(evaluate, graph))
    plan = separate(graph, DEVICE_DTYPES if device else VECTOR_DTYPES)
    yield Stage("groups", partial(evaluate_plan, plan))
    for p in filter(runs, FUSION):
        if p.groups or p.join:
            before_groups, plan = plan, _after(p, plan, device)
            if plan != before_groups:
                yield Stage(f"pass {p.name}", partial(evaluate_plan, plan))


def _after(p: Pass, plan: FusionPlan, device: bool) -> FusionPlan:
    if p.groups is join_prologues:
        return join_prologues(plan, cuda=device)
    return p.groups(plan) if p.groups else join_groups(plan, p.join) if p.join else plan


def evaluate_plan(plan: FusionPlan, feeds: Arrays) -> dict[str, Array]:
    """Return the outputs of the groups in launch order. PolydynError: a group reads a tensor that is not in memory."""
    graph = plan.graph
    symbols = bind_symbols(graph, feeds)
    memory: dict[str, Array] = {**graph.constants, **{n: np.asarray(feeds[n]) for n in graph.inputs}}
    for target in {w.target for w in plan.windows.values()}:
        t = graph.tensors[target]
        memory[target] = np.full([d.evaluate(symbols) for d in t.shape], _poison(t.dtype), numpy_dtype(t.dtype))
    for group in plan.groups:
        made = _run(plan, group, symbols, memory)
        for name in group.outputs:
            _store(plan, name, made[name], symbols, memory)
    return {n: memory[n] for n in graph.outputs}


def _poison(dtype: str) -> Any:
    """Return a number that is not an expected value."""
    kind = numpy_dtype(dtype)
    return 113 if kind.kind in "iu" else np.bool_(True) if kind == np.bool_ else 12345.0


def _run(plan: FusionPlan, group: FusedGroup, symbols: Mapping[str, int], memory: Arrays) -> dict[str, Array]:
    """Return the results of the nodes of a group."""
    made: dict[str, Array] = {}
    seen = {**memory}
    for n in group.nodes:
        missing = [x for x in n.inputs if x not in seen]
        if missing:
            raise PolydynError(
                f"a group reads {missing[0]}, which no earlier group left", node=n.origin, tensor=missing[0]
            )
        seen[n.output] = made[n.output] = evaluate_node(n, plan.graph.tensors[n.output], symbols, seen)
    return made


def _store(plan: FusionPlan, name: str, a: Array, symbols: Mapping[str, int], memory: dict[str, Array]) -> None:
    """Store a result in memory, through windows into concatenations."""
    memory[name] = a
    if name in plan.windows:
        w = plan.windows[name]
        low = w.offset.evaluate(symbols)
        at = tuple(slice(low, low + a.shape[w.axis]) if k == w.axis else slice(None) for k in range(a.ndim))
        whole = memory[w.target].copy()
        whole[at] = a
        _store(plan, w.target, whole, symbols, memory)


def without(graph: Graph, node: int) -> Graph:
    """Return the graph without one node, for tests: the node's readers read nothing."""
    return replace(graph, nodes=tuple(n for k, n in enumerate(graph.nodes) if k != node))
