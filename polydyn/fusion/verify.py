"""Verify the invariants of a FusionPlan."""

from __future__ import annotations

from collections.abc import Mapping

from polydyn.errors import PolydynError
from polydyn.fusion.plan import FusedGroup, FusionPlan


def verify_plan(plan: FusionPlan) -> None:
    """Check the invariants of a fusion plan:

    1. every node that something needs is in exactly one group, and groups list their nodes in topological order;
    2. the graph of groups has no cycle and the launch order respects it, so that every group is convex: a reader of a
       concatenation comes after the kernels of all its parts;
    3. the outputs of a group are exactly its tensors that are model outputs, parts of a concatenation, or inputs of
       other groups;
    4. the nodes of a group have rows of equal extents, and the rows of a reduction are all its axes.

    A violation is a bug in polydyn, raised as PolydynError that names the tensor.
    """
    position = {n.output: k for k, n in enumerate(plan.graph.nodes)}
    launch: dict[str, int] = {}
    readers = _readers(plan)
    for k, g in enumerate(plan.groups):
        at = [position[n.output] for n in g.nodes]
        if at != sorted(at):
            raise _bug("a group whose nodes are out of order", g.nodes[0].output)
        for n in g.nodes:
            if n.output in launch:
                raise _bug("a node in two groups", n.output)
            launch[n.output] = k
        if g.outputs != (found := _outputs(g, readers)):
            raise _bug(f"a group with the outputs {g.outputs}, not {found}", g.nodes[0].output)
        _verify_rows(plan, g)
    parts: dict[str, list[str]] = {}
    for t, w in plan.windows.items():
        parts.setdefault(w.target, []).append(t)
    for k, g in enumerate(plan.groups):
        for n in g.nodes:
            for t in plan.inputs[n.output]:
                for part in parts.get(t, [t] if t in position else []):
                    if part not in launch:
                        raise _bug("read, but no group makes it", part)
                    if launch[part] > k or (launch[part] == k and t in parts):
                        raise _bug(f"{n.output} reads it before it is whole", part)


CALLER = ""
"""Reader of the model's outputs, and of parts of a concatenation: no node has this name."""


def _readers(plan: FusionPlan) -> dict[str, set[str]]:
    """Map each tensor to the outputs of the nodes that read it, and CALLER, computed from the nodes alone."""
    readers: dict[str, set[str]] = {t: {CALLER} for t in (*plan.graph.outputs, *plan.windows)}
    for n in plan.graph.nodes:
        for t in n.inputs:
            readers.setdefault(t, set()).add(n.output)
    return readers


def _outputs(g: FusedGroup, readers: Mapping[str, set[str]]) -> tuple[str, ...]:
    """Return the tensors of a group that are needed outside it."""
    inside = {n.output for n in g.nodes}
    return tuple(n.output for n in g.nodes if readers.get(n.output, set()) - inside)


def _verify_rows(plan: FusionPlan, g: FusedGroup) -> None:
    shapes = {n.output: plan.graph.tensors[n.output].shape for n in g.nodes}
    first = g.nodes[0].output
    for n in g.nodes if g.kind == "nest" else ():
        t = n.output
        if [shapes[t][a] for a in g.rows[t]] != [shapes[first][a] for a in g.rows[first]]:
            raise _bug(f"its rows are not those of {first}", t)
        if not n.is_map and list(g.rows[t]) != [a for a, e in enumerate(shapes[t]) if e != 1]:
            raise _bug("a reduction that is not a row of its group", t)


def _bug(message: str, tensor: str) -> PolydynError:
    return PolydynError(f"the fusion plan broke an invariant: {message}", tensor=tensor)
