"""Rewrite an If whose branches differ in rank: nodes that read its results move into both branches.

A node that reads a tensor of unknown rank has no shape. Inside a branch the rank is known, so a copy of the node has a
shape there. Nodes move until the results of both branches have equal ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from polydyn.graph.importer import ImportedGraph, renamed
from polydyn.graph.operators.registry import OnnxNode
from polydyn.graph.regions import reads

BRANCHES = ("then_branch", "else_branch")


def with_readers(node: OnnxNode, moved: Sequence[OnnxNode], outputs: Sequence[str]) -> OnnxNode:
    """Return the If with copies of ``moved`` after both branches; ``outputs``: tensors that other nodes read."""
    branches = {role: _extended(node, role, moved, outputs) for role in BRANCHES}
    return replace(node, outputs=tuple(outputs), attributes={**node.attributes, **branches})


def _extended(node: OnnxNode, role: str, moved: Sequence[OnnxNode], outputs: Sequence[str]) -> ImportedGraph:
    """Return a branch followed by ``moved``. Tensors of the branch get names that ``moved`` cannot have."""
    branch = node.attribute(role)
    inner_names = {o for n in branch.nodes for o in n.outputs if o} | branch.constants.keys()
    branch = renamed(branch, {x: f"{node.name}/{role}/{x}" for x in inner_names})
    results = {o: x for o, x in zip(node.outputs, branch.outputs, strict=True) if o}
    last = renamed(ImportedGraph("", (), tuple(outputs), tuple(moved), {}), results)
    return replace(branch, nodes=(*branch.nodes, *last.nodes), outputs=last.outputs)


def readers_of(nodes: Sequence[OnnxNode], node: OnnxNode, tensors: Collection[str], depth: int) -> list[OnnxNode]:
    """Return the nodes that read ``tensors``, up to ``depth`` in a row, and those between ``node`` and these."""
    tensors_read = set[str](tensors)
    chosen = set[str]()
    for _ in range(depth):
        chosen |= {n.name for n in nodes if not tensors_read.isdisjoint(reads(n))}
        tensors_read |= {o for n in nodes if n.name in chosen for o in n.outputs if o}
    after, before = _reached(nodes, node), set[str]()
    for n in reversed(nodes):
        if n.name in chosen or not before.isdisjoint(n.outputs):
            before.update(reads(n))
            if n.name in after:
                chosen.add(n.name)
    return [n for n in nodes if n.name in chosen and n is not node]


def _reached(nodes: Sequence[OnnxNode], node: OnnxNode) -> set[str]:
    """Return the names of the nodes that depend on ``node``; ``nodes`` are in order."""
    tensors, names = {o for o in node.outputs if o}, set[str]()
    for n in nodes:
        if not tensors.isdisjoint(reads(n)):
            names.add(n.name)
            tensors.update(o for o in n.outputs if o)
    return names


def with_moved(
    nodes: Sequence[OnnxNode], node: OnnxNode, moved: Sequence[OnnxNode], results: Collection[str]
) -> tuple[list[OnnxNode], OnnxNode]:
    """Return all nodes after ``moved`` went into the branches of ``node``, in order, and the new node.

    ``results``: outputs of the graph.
    """
    names = {node.name, *(n.name for n in moved)}
    others = [n for n in nodes if n.name not in names]
    read = {x for n in others for x in reads(n)} | set(results)
    results_read = [o for n in (node, *moved) for o in n.outputs if o in read]
    new = with_readers(node, moved, list(dict.fromkeys(results_read)))
    after = _reached(nodes, node)
    first, last = ([n for n in others if (n.name in after) == late] for late in (False, True))
    return [*first, new, *last], new
