"""Encode and decode the programs of several parts of a model, without a C compiler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polydyn.backends.base import Target
from polydyn.graph.cut import Part, Parts, cut
from polydyn.graph.ir import Graph, HostStep
from polydyn.program.assemble import manifest_of
from polydyn.program.assemble_parts import parts_manifest
from polydyn.program.encoding import EncodedProgram
from polydyn.program.frame import add_frame
from polydyn.program.host import host_program
from polydyn.testing.plan.frame_words import FrameWords, frame_words
from polydyn.testing.plan.planned import Planned, planned_of

Manifest = Mapping[str, Any]


@dataclass(frozen=True)
class Model:
    """A part or a body, as its frame sees it. ``several``: its tensors are numbered and stored in its own rooms.

    ``grows``: pairs (output, input) that may share one memory in which the first axis grows.
    """

    graph: Graph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    grows: frozenset[tuple[str, str]] = frozenset()
    several: bool = False


@dataclass(frozen=True)
class Framed:
    """A frame and its graph. ``words``: the decoded frame. ``order``: parts and steps as the graph was cut.
    ``names``: tensor names by number. ``models``: parts, then bodies. ``outputs``: tensor name of each output.
    """

    name: str
    words: FrameWords
    order: tuple[Part | HostStep, ...]
    names: tuple[str, ...]
    models: tuple[Model, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Programs:
    """All plans of a model, and all frames."""

    plans: list[Planned]
    frames: list[Framed]


def programs_of(graph: Graph, backend: Target) -> Programs:
    """Return the plans and frames of a graph. Raises PolydynError if the compiler rejects it."""
    programs = Programs([], [])
    _manifest(graph, backend, programs)
    return programs


def _manifest(graph: Graph, backend: Target, programs: Programs, inner: bool = False) -> Manifest:
    """Return the manifest of a graph as a program, and add its plans and frame to ``programs``."""
    if not graph.steps:
        made = planned_of(graph, backend)
        programs.plans.append(made)
        host = host_program(made.plan, dict.fromkeys(made.plan.constants, 0), 0)
        return manifest_of(made.plan, host) | {"compiler": "", "features": []}
    parts = cut(graph, inner)
    of_parts = [_manifest(p.graph, backend, programs) for p in parts.order if isinstance(p, Part)]
    bodies = {
        f"{s.origin}.{role}": _manifest(g, backend, programs, inner=True) for s in graph.steps for role, g in s.bodies
    }
    models = [*of_parts, *bodies.values()]
    constants = {n: graph.constants[n] for n in parts.constants}
    own = parts_manifest(parts, of_parts, bodies, {}, backend.name)
    whole = add_frame(own, models, {n: str(a.dtype) for n, a in constants.items()})
    places = {n: {"offset": 0, "shape": a.shape} for n, a in constants.items()}
    words = EncodedProgram(whole, models, [[0] * 4 for _ in models], places).all
    programs.frames.append(framed_of(parts, whole, models, words))
    return whole


def framed_of(parts: Parts, whole: Manifest, models: Sequence[Manifest], words: Sequence[int]) -> Framed:
    """Return the frame of a program.

    ``whole`` is its manifest; ``models`` are the manifests of its parts and bodies.
    """
    graphs = [p.graph for p in parts.order if isinstance(p, Part)]
    graphs += {f"{s.origin}.{role}": g for s in parts.graph.steps for role, g in s.bodies}.values()
    return Framed(
        parts.graph.name, frame_words(words), parts.order, tuple(t["name"] for t in whole["tensors"]),
        tuple(map(_model, graphs, models)), tuple(parts.reshaped.get(x, x) for x in parts.graph.outputs),
    )  # fmt: skip


def _model(graph: Graph, m: Manifest) -> Model:
    several = "tensors" in m
    inputs, outputs = (tuple(x["name"] for x in m["tensors" if several else w]) for w in ("inputs", "outputs"))
    strided = {o["name"] for o in m["outputs"] if o["strided"]}
    pairs = ((a["output"], a["input"]) for a in m["appendable"])
    return Model(graph, inputs, outputs, frozenset(p for p in pairs if p[0] not in strided), several)
