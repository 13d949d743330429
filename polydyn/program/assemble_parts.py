"""Assemble the artifact of a graph from the artifacts of its parts (docs/adr/0027-parts.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import polydyn
from polydyn.build.compiler import architecture_of, build_library
from polydyn.build.features import architecture
from polydyn.graph.cut import Part, Parts
from polydyn.graph.ir import Graph, HostStep, Tensor
from polydyn.program.encoding import EncodedProgram
from polydyn.program.frame import Manifest, add_frame, waits
from polydyn.program.guards import guard_to_json
from polydyn.program.host import shape_text
from polydyn.runtime.artifact import ABI, ALIGN, FORMAT, Artifact, Bytes, aligned_bytes
from polydyn.runtime.c import sources
from polydyn.runtime.expressions import to_json
from polydyn.runtime.seal import SEAL, seal_weights
from polydyn.shapes.sizes import Sizes


def assemble_parts(
    parts: Parts, artifacts: Sequence[Artifact], bodies: Mapping[str, Artifact], dims: Mapping[str, Sizes], target: str
) -> Artifact:
    """Return the artifact of the whole. ``artifacts``: one per part, in order, compiled for
    ``target``. ``bodies``: one per model that a host step runs."""
    graph = parts.graph
    manifest = parts_manifest(
        parts, [a.manifest for a in artifacts], {n: a.manifest for n, a in bodies.items()}, dims, target
    )
    files = sources("parts")
    units = {n: t for n, t in files.items() if n.endswith(".c")}
    host = "cpu:baseline" if architecture_of(target) == architecture() else target
    library = build_library(units, {n: t for n, t in files.items() if n not in units}, host).data
    constants = {n: graph.constants[n] for n in parts.constants}
    return join_parts(manifest, [*artifacts, *bodies.values()], constants, files, library)


def parts_manifest(
    parts: Parts, manifests: Sequence[Manifest], bodies: Mapping[str, Manifest], dims: Mapping[str, Sizes], target: str
) -> dict[str, Any]:
    """Return the manifest of the whole before ``add_frame``. ``manifests``: one per part."""
    graph, numbers = parts.graph, {name: len(manifests) + k for k, name in enumerate(bodies)}
    count = iter(range(len(manifests)))
    order = [_part(s, next(count)) if isinstance(s, Part) else _step(s, numbers, graph) for s in parts.order]
    every = [*manifests, *bodies.values()]
    return {
        "format": FORMAT,
        "abi": ABI,
        "polydyn": polydyn.__version__,
        "name": graph.name,
        "target": target,
        "architecture": architecture_of(target),
        "compiler": next((m["compiler"] for m in every), "no compiler"),
        "features": sorted({f for m in every for f in m["features"]}),
        "inputs": [_io(graph.tensors[x]) for x in graph.inputs],
        "outputs": [_io(graph.tensors[x]) | {"of": parts.reshaped.get(x, x)} for x in graph.outputs],
        "appendable": [],
        "symbols": _symbols(graph),
        "dims": {name: sizes.to_json() for name, sizes in sorted(dims.items())},
        "guards": [guard_to_json(g) for g in graph.guards],
        "late_guards": [guard_to_json(g) for g in parts.guards],
        "order": order,
        "own_parts": len(manifests),
        "notes": [*graph.notes, *_notes(parts)],
        **next(({k: m[k] for k in ("cuda", "estimates")} for m in every if "cuda" in m), {}),
        **_launches(manifests),
        "kernels": list({k["name"]: k for m in every for k in m["kernels"]}.values()),
    }


def join_parts(
    manifest: Mapping[str, Any], parts: Sequence[Artifact], constants: Mapping[str, npt.NDArray[Any]],
    sources: Mapping[str, str], library: bytes,
) -> Artifact:  # fmt: skip
    """Join ``parts`` into one artifact, with constants, sources and a library of its own.

    ``manifest``: the entries that do not follow from the parts. The weights of the result contain, in order: a head
    that gives C the position of the encoded program (``pd_head``), the parts' weights, the constants, the parts'
    libraries, the encoded program, the seal.
    """
    arrays = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in constants.values()]
    libraries = list(dict.fromkeys(p.library for p in parts))
    blocks: list[Bytes] = [np.zeros(HEAD, np.uint8), *(p.weights for p in parts), *arrays]
    blocks += [np.frombuffer(x, np.uint8) for x in libraries]
    offsets = [0]
    for b in blocks:
        offsets.append(offsets[-1] + -(-b.size // ALIGN) * ALIGN)
    library_offsets = dict(zip(libraries, offsets[1 + len(parts) + len(arrays) :], strict=False))
    entries = [
        dict(p.manifest)
        | {
            "weights": {"offset": offset, "bytes": int(p.weights.size)},
            "library": {"offset": library_offsets[p.library], "bytes": len(p.library)},
        }
        for p, offset in zip(parts, offsets[1:], strict=False)
    ]
    places: dict[str, dict[str, Any]] = {
        n: {"offset": offset, "dtype": str(a.dtype), "shape": list(a.shape)}
        for (n, a), offset in zip(constants.items(), offsets[1 + len(parts) :], strict=False)
    }
    whole = add_frame(manifest, entries, {n: c["dtype"] for n, c in places.items()})
    whole["notes"] = [*whole["notes"], *waits(whole, entries)]
    ranges = [[*e["weights"].values(), *e["library"].values()] for e in entries]
    words = np.array(EncodedProgram(whole, entries, ranges, places).all, np.int64)
    weights = aligned_bytes(offsets[-1] + words.nbytes + SEAL)
    weights[:32] = np.array([MAGIC, ABI, weights.size, offsets[-1]], np.int64).view(np.uint8)
    for b, offset in zip([*blocks, words.view(np.uint8)], offsets, strict=True):
        if offset:
            weights[offset : offset + b.size] = b
    seal_weights(weights)
    files = dict(sources) | {f"{k}/{n}": t for k, p in enumerate(parts) for n, t in p.sources.items()}
    images = {f"{k}/{n}": i for k, p in enumerate(parts) for n, i in p.images.items()}
    return Artifact(whole | {"parts": entries, "constants": places}, files, library, weights, images)


HEAD = 64
"""Bytes before the first weights; ``pd_head`` uses part of them."""
MAGIC = 0x7374726170796470
"""``PD_MAGIC``."""


def _io(t: Tensor) -> dict[str, Any]:
    shape = [shape_text([d])[1:-1] for d in t.shape]
    return {"name": t.name, "dtype": t.dtype, "shape": shape, "strided": 0, "dims": [to_json(d) for d in t.shape]}


def _symbols(graph: Graph) -> list[dict[str, Any]]:
    early = [{"symbol": s.symbol, "input": s.input, "axis": s.axis} for s in graph.sources]
    return early + [{"symbol": x, "input": "", "axis": 0, "step": s.origin} for s in graph.steps for x in s.symbols]


def _part(part: Part, number: int) -> dict[str, Any]:
    inputs = [x for x in part.graph.inputs if x not in part.sizes]
    return {"part": number, "inputs": inputs, "sizes": dict(part.sizes)}


def _step(step: HostStep, bodies: Mapping[str, int], graph: Graph) -> dict[str, Any]:
    settings = dict(step.settings)
    if step.kind == "iterate":
        settings["scans"] = _row_shapes(step, graph)
    return {
        "step": step.kind, "origin": step.origin, "inputs": list(step.inputs), "outputs": list(step.outputs),
        "dims": [to_json(d) for d in step.dims], "settings": settings, "symbols": list(step.symbols),
        "bodies": {role: bodies[f"{step.origin}.{role}"] for role, _ in step.bodies},
    }  # fmt: skip


def _row_shapes(step: HostStep, graph: Graph) -> list[list[Any]]:
    """Return the row layouts of a loop, with row shapes as expressions. A size known only in an iteration is 0."""
    settings = dict(step.settings)
    forms = [list(x) for x in settings["scans"]]
    for form, name in zip(forms, step.outputs[settings["carried"] :], strict=False):
        if name:
            dims = [d for a, d in enumerate(graph.tensors[name].shape) if a != form[0]]
            form[2] = [0 if d.symbols() & {*step.symbols} else to_json(d) for d in dims]
    return forms


def _notes(parts: Parts) -> list[str]:
    steps = [s for s in parts.order if isinstance(s, HostStep)]
    sizes = [f", which determines {', '.join(s.symbols)}" if s.symbols else "" for s in steps]
    return [f"the host runs {s.kind} of {s.origin} between two parts{x}" for s, x in zip(steps, sizes, strict=True)]


def _launches(manifests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Concatenate the launches, decisions, waves, checks and memory slots of the parts."""
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
