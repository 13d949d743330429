"""From the parts of a graph, each compiled to an artifact, to the artifact of the whole (docs/adr/0027-parts.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polydyn
from polydyn.build.compiler import build_library
from polydyn.build.features import architecture
from polydyn.graph.cut import Part, Parts
from polydyn.graph.ir import Graph, HostStep, Tensor
from polydyn.program.guards import guard_to_json
from polydyn.program.host import shape_text
from polydyn.runtime.artifact import ABI, FORMAT, Artifact
from polydyn.runtime.c import step_sources
from polydyn.runtime.composite import join
from polydyn.runtime.expressions import to_json
from polydyn.shapes.sizes import Sizes


def assemble_parts(
    parts: Parts, made: Sequence[Artifact], bodies: Mapping[str, Artifact], dims: Mapping[str, Sizes], target: str
) -> Artifact:
    """``made``: the artifacts of the parts in order, for ``target``. ``bodies``: those of the models that steps run."""
    graph, numbers = parts.graph, {name: len(made) + k for k, name in enumerate(bodies)}
    count = iter(range(len(made)))
    order = [_part(s, next(count)) if isinstance(s, Part) else _step(s, numbers) for s in parts.order]
    manifests = [a.manifest for a in made]
    inside = [a.manifest for a in bodies.values()]
    manifest = {
        "format": FORMAT,
        "abi": ABI,
        "polydyn": polydyn.__version__,
        "name": graph.name,
        "target": target,
        "architecture": architecture(),
        "compiler": next((a.manifest["compiler"] for a in (*made, *bodies.values())), "no compiler"),
        "features": sorted({f for a in (*made, *bodies.values()) for f in a.manifest["features"]}),
        "inputs": [_io(graph.tensors[x]) for x in graph.inputs],
        "outputs": [_io(graph.tensors[x]) | {"of": parts.reshaped.get(x, x)} for x in graph.outputs],
        "appendable": [],
        "symbols": _symbols(graph),
        "dims": {name: sizes.to_json() for name, sizes in sorted(dims.items())},
        "guards": [guard_to_json(g) for g in graph.guards],
        "late_guards": [guard_to_json(g) for g in parts.guards],
        "order": order,
        "own_parts": len(made),
        "notes": [*graph.notes, *_notes(parts)],
        **_launches(manifests),
        "kernels": list({k["name"]: k for m in (*manifests, *inside) for k in m["kernels"]}.values()),
    }
    files = step_sources()
    units = {n: t for n, t in files.items() if n.endswith(".c")}
    library = build_library(units, {n: t for n, t in files.items() if n not in units}, "cpu:baseline").data
    return join(manifest, [*made, *bodies.values()], {n: graph.constants[n] for n in parts.constants}, files, library)


def _io(t: Tensor) -> dict[str, Any]:
    shape = [shape_text([d])[1:-1] for d in t.shape]
    return {"name": t.name, "dtype": t.dtype, "shape": shape, "strided": 0, "dims": [to_json(d) for d in t.shape]}


def _symbols(graph: Graph) -> list[dict[str, Any]]:
    early = [{"symbol": s.symbol, "input": s.input, "axis": s.axis} for s in graph.sources]
    return early + [{"symbol": x, "input": "", "axis": 0, "step": s.origin} for s in graph.steps for x in s.symbols]


def _part(part: Part, number: int) -> dict[str, Any]:
    inputs = [x for x in part.graph.inputs if x not in part.sizes]
    return {"part": number, "inputs": inputs, "sizes": dict(part.sizes)}


def _step(step: HostStep, bodies: Mapping[str, int]) -> dict[str, Any]:
    return {
        "step": step.kind, "origin": step.origin, "inputs": list(step.inputs), "outputs": list(step.outputs),
        "dims": [to_json(d) for d in step.dims], "settings": dict(step.settings), "symbols": list(step.symbols),
        "bodies": {role: bodies[f"{step.origin}.{role}"] for role, _ in step.bodies},
    }  # fmt: skip


def _notes(parts: Parts) -> list[str]:
    steps = [s for s in parts.order if isinstance(s, HostStep)]
    said = [f", which says {', '.join(s.symbols)}" if s.symbols else "" for s in steps]
    return [f"the host runs {s.kind} of {s.origin} between two parts{x}" for s, x in zip(steps, said, strict=True)]


def _launches(manifests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the parts have, one behind the other: launches keep their decisions."""
    launches: list[Any] = []
    decisions: list[Any] = []
    for m in manifests:
        launches += [x | {"decision": x["decision"] + len(decisions)} for x in m["launches"]]
        decisions += m["decisions"]
    return {
        "launches": launches,
        "decisions": decisions,
        "waves": [n for m in manifests for n in m["waves"]],
        "index_checks": [c for m in manifests for c in m["index_checks"]],
        "memory": [x for m in manifests for x in m["memory"]],
    }
