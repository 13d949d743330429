"""Select the nodes of a graph that polydyn compiles, and group them into sets.

Every set becomes one node of ONNX Runtime's graph. A set is convex: no path leaves it and returns. The import with
``fallback`` decides which nodes are left to ONNX Runtime, as for ``polydyn.compile`` (docs/adr/0030-fallback.md).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx

from polydyn.errors import PolydynError, planning
from polydyn.graph.expand import expand
from polydyn.graph.importer import load_model
from polydyn.graph.propagate import propagate
from polydyn.graph.regions import FallbackNodes, RepropagationNeeded, members
from polydyn.graph.typed import Typed
from polydyn.schedules.names import given_back
from polydyn.shapes.sizes import Dims

CROSSING_DTYPES = (
    "float32", "float64", "float16", "bfloat16", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16",
    "uint32", "uint64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
)  # fmt: skip
"""Dtypes of tensors between a set and ONNX Runtime, which stores elements of 4 bits in another way."""
MARK = re.compile(r"pd(\d+)pd")
"""The part of a node's name that is the position of its top-level node."""
MIN_NODES = 2
"""Default minimum nodes of a set, unless it is the whole graph."""


@dataclass
class Partition:
    """The set of every node, -1 for a node that is left; the reasons; the known shapes of tensors by name."""

    sets: list[int]
    reasons: dict[int, str] = field(default_factory=dict)
    shapes: dict[str, list[int | str]] = field(default_factory=dict)

    def text(self) -> str:
        """Return the content of the file that ``c/sets.c`` reads."""
        count = max(self.sets, default=-1) + 1
        left = [f"left {self.reasons[k]}" for k, s in enumerate(self.sets) if s < 0]
        lines = [f"polydyn-sets 1 {len(self.sets)} {count} {len(left)}", " ".join(map(str, self.sets)), *left]
        return "\n".join([*lines, f"shapes {json.dumps(self.shapes)}", ""])


def shapes_in(text: str) -> dict[str, list[int | str]]:
    """Return the shapes in the text of a partition."""
    line = next((x for x in text.splitlines() if x.startswith("shapes ")), "shapes {}")
    shapes: dict[str, list[int | str]] = json.loads(line.removeprefix("shapes "))
    return shapes


def partition(
    model: onnx.ModelProto, dims: Dims | None = None, exclude: Collection[str] = (), min_nodes: int = MIN_NODES
) -> Partition:
    """Return the sets of a model's nodes, which are in topological order. The names of its nodes are changed.

    ``exclude``: operators, and names of nodes, that are left. Raises PolydynError if the model cannot be imported.
    """
    nodes = list(model.graph.node)
    written = [_title(n) for n in nodes]
    excluded = [k for k, n in enumerate(nodes) if n.op_type in exclude or n.name in exclude]
    for k, node in enumerate(nodes):
        _mark(node, f"pd{k}pd")
    left = FallbackNodes()
    left.nodes.update((nodes[k].name, "the option exclude names it") for k in excluded)
    typed = _imported(model, dims, left)
    reasons = _reasons(typed, left)
    known = {x: typed.tensor(x) for x in typed.inferred}
    dtypes = {x: t.dtype for x, t in known.items()}
    _leave_foreign(model.graph, dtypes, reasons)
    sets = stages(nodes, reasons.keys())
    for small in _small(sets, min_nodes):
        for k in (k for k, s in enumerate(sets) if s == small):
            reasons[k], sets[k] = f"its set has fewer than {min_nodes} nodes", -1
    order = sorted({s for s in sets if s >= 0})
    crossing = {x for k, n in enumerate(nodes) for x in reads(n)} | {x for n in nodes for x in n.output}
    shapes = {x: [_size(d) for d in t.shape] for x, t in known.items() if x in crossing}
    titled = {k: f"{written[k]}: {why}" for k, why in reasons.items()}
    return Partition([order.index(s) if s >= 0 else -1 for s in sets], titled, shapes)


def stages(nodes: Sequence[onnx.NodeProto], left: Collection[int]) -> list[int]:
    """Return the set of every node, -1 for the nodes in ``left``. A node after a left one is in a later set."""
    stage: dict[str, int] = {}  # 2 s: computed in set s; 2 s + 1: computed after set s
    sets = []
    for k, node in enumerate(nodes):
        own = max((stage.get(x, 0) for x in reads(node)), default=0)
        own = own | 1 if k in left else own + own % 2
        stage |= dict.fromkeys(node.output, own)
        sets.append(-1 if k in left else own // 2)
    return sets


def reads(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the tensors that a node and the graphs inside it read."""
    yield from filter(None, node.input)
    for a in node.attribute:
        for g in (*a.graphs, *([a.g] if a.HasField("g") else [])):
            yield from (o.name for o in g.output)
            for inner in g.node:
                yield from reads(inner)


def _imported(model: onnx.ModelProto, dims: Dims | None, left: FallbackNodes) -> Typed:
    """Import a model; nodes that are rejected are added to ``left``."""
    read = load_model(model)
    while True:
        try:
            with planning("import"), contextlib.suppress(RepropagationNeeded):
                typed = propagate(read, dims, left=left)
                expand(typed, left)
                return typed
        except PolydynError as e:
            left.leave(e, *e.origins)


def _reasons(typed: Typed, left: FallbackNodes) -> dict[int, str]:
    """Return the positions of the nodes that are left, with the reasons."""
    found = {m.name: m.fallback for n in typed.nodes if n.fallback for m in members(n)} | left.nodes
    reasons = {}
    for name, why in found.items():
        mark = MARK.search(name)
        if mark:
            reasons[int(mark[1])] = MARK.sub("another node", given_back(" ".join(why.split())))
    return reasons


def _leave_foreign(graph: onnx.GraphProto, dtypes: Mapping[str, str], reasons: dict[int, str]) -> None:
    """Leave the nodes that would pass a tensor of another dtype to ONNX Runtime, or take one from it."""
    foreign = {x: d for x, d in dtypes.items() if d not in CROSSING_DTYPES}
    if not foreign:
        return
    constant = {t.name for t in graph.initializer}
    maker = {o: k for k, n in enumerate(graph.node) for o in n.output if o}
    readers: dict[str, set[int]] = {}
    for k, n in enumerate(graph.node):
        for x in reads(n):
            readers.setdefault(x, set()).add(k)
    again = True
    while again:
        again = False
        sets = stages(list(graph.node), reasons.keys())
        for x, dtype in foreign.items():
            ends = [*readers.get(x, ()), *([maker[x]] if x in maker else [])]
            outside = x not in maker or x in {o.name for o in graph.output}
            if x in constant or not ends or (not outside and len({sets[k] for k in ends}) == 1):
                continue
            new = set(ends) - reasons.keys()
            reasons.update((k, f"{x} is {dtype}, which does not pass between polydyn and ONNX Runtime") for k in new)
            again |= bool(new)


def _small(sets: Sequence[int], min_nodes: int) -> list[int]:
    """Return the sets with too few nodes. A set that is the whole graph is never too small."""
    if all(s == 0 for s in sets):
        return []
    return [s for s in set(sets) - {-1} if sets.count(s) < min_nodes]


def _size(size: Any) -> int | str:
    text = given_back(str(size))
    return int(text) if text.isdecimal() else text


def _title(node: onnx.NodeProto) -> str:
    operator = f"{node.domain}::{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
    return f"{node.name or next(filter(None, node.output), '?')} ({operator})".replace("\n", " ")


def _mark(node: onnx.NodeProto, mark: str) -> None:
    """Give a node and the nodes in its bodies names that contain the position of the top-level node."""
    node.name = mark
    for a in node.attribute:
        for g in (*a.graphs, *([a.g] if a.HasField("g") else [])):
            for j, inner in enumerate(g.node):
                _mark(inner, f"{mark}_{j}")
