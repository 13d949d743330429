"""The compiler: the stages from a model to a program, one named call each."""

from __future__ import annotations

import ctypes
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from polydyn.arguments import check_threads
from polydyn.backends import Options, target_of
from polydyn.backends.base import Target
from polydyn.backends.launches import distinct_kernels, host_plan
from polydyn.build.compiler import why_elsewhere
from polydyn.clock import measuring, section
from polydyn.codegen.pipeline import Loops, loops_kept
from polydyn.debug import Stage, Verify, needing_sources, stages, verifying
from polydyn.errors import FallbackWarning, PolydynError, UnsupportedError, planning
from polydyn.fusion.plan import FusionPlan
from polydyn.fusion.show import show_plan
from polydyn.graph.culprits import planned
from polydyn.graph.cut import Part, cut, verify_parts
from polydyn.graph.dynamic import Symbols
from polydyn.graph.expand import import_model, import_parts
from polydyn.graph.fallback import fallback_notes
from polydyn.graph.importer import ModelLike
from polydyn.graph.ir import Dim, Graph
from polydyn.graph.regions import FallbackNodes
from polydyn.graph.show import show_graph
from polydyn.logs import note, progress
from polydyn.program.assemble import KernelsAhead, build_artifact
from polydyn.program.assemble_parts import assemble_parts
from polydyn.program.plan import HostPlan
from polydyn.program.show import show_host_plan
from polydyn.runtime.artifact import Artifact, write_artifact
from polydyn.runtime.composite import with_general
from polydyn.runtime.explain import refused_sizes
from polydyn.runtime.expressions import to_json
from polydyn.runtime.opening import open_program
from polydyn.runtime.overrides import with_overrides
from polydyn.runtime.program import Program
from polydyn.schedules.expr import Array
from polydyn.schedules.handmade.document import Written
from polydyn.schedules.names import given_back_everywhere
from polydyn.search.records import Records
from polydyn.shapes.sizes import Dims, sizes_by_name
from polydyn.timing import IMPORT

__all__ = ["Options", "compile", "compile_artifact", "plan_graph", "plan_program"]

log = logging.getLogger("polydyn")

MAX_FREE_BYTES = 1 << 20
"""Maximum total bytes of initializers that are inputs too, so that calls may override them. Otherwise they are
constants.
"""

Build: TypeAlias = Callable[[], tuple[Artifact, int]]
"""Builds an artifact and returns it with the number of compiled units."""


def compile(
    model: ModelLike,
    *,
    target: str = "cpu",
    dims: Dims | None = None,
    threads: int | None = None,
    options: Options | None = None,
    records: str | os.PathLike[str] | None = None,
    symbols: Symbols | None = None,
    schedules: Sequence[Written] = (),
) -> Program:
    """Compile a model without the program cache. Arguments and errors are those of ``polydyn.compile``."""
    check_threads(threads)
    _refuse_elsewhere(target)
    with measuring() as clock:
        artifact, compiled = compile_artifact(
            model, target=target, dims=dims, options=options, records=records, symbols=symbols, schedules=schedules
        )
        progress("opening")
        with section("opening"):
            program = open_program(artifact, threads=threads, compilations=compiled)
            del artifact
            _return_memory()
    program.read_timing = clock.reading()
    return program


def _refuse_elsewhere(target: str) -> None:
    """Raise UnsupportedError if code for the target does not run on this machine."""
    if why := why_elsewhere(target):
        remedy = f"polydyn compile MODEL --target {target} -o FILE writes it without opening it (docs/c.md)"
        raise UnsupportedError(why, rule="a program is opened", remedy=remedy)


def compile_to(
    path: str | os.PathLike[str], model: ModelLike, *, threads: int | None = None, **arguments: Any
) -> tuple[Artifact, int]:
    """Write the artifact of a target that may not run here, without opening it. Return what ``compile_artifact`` does.

    ``arguments``: those of ``compile_artifact``. The file is the one that ``Program.save`` would write there.
    """
    artifact, compiled = compile_artifact(model, **arguments)
    if threads and "cuda" not in artifact.manifest:
        artifact = replace(artifact, manifest={**artifact.manifest, "threads": check_threads(threads)})
    write_artifact(artifact, path)
    return artifact, compiled


def compile_artifact(
    model: ModelLike,
    *,
    target: str = "cpu",
    dims: Dims | None = None,
    options: Options | None = None,
    records: str | os.PathLike[str] | None = None,
    symbols: Symbols | None = None,
    schedules: Sequence[Written] = (),
) -> tuple[Artifact, int]:
    """Return the artifact, which ``compile`` then opens, and the number of compiled units.

    It also compiles for another architecture if ``CC`` names a compiler for it.
    """
    backend = target_of(target, options, schedules)
    left = None if backend.options.fallback is None else FallbackNodes()
    read = partial(import_parts, model, dims, symbols, left=left)
    with stages(_name(model)) as stage, _opened(records) as tiles, _decided_again():
        while True:
            try:
                with ExitStack() as begun:
                    return _artifact(stage, read, backend, tiles, dims, begun)
            except PolydynError as e:
                if left is None:
                    raise
                left.leave(e, *e.origins)


def _artifact(
    stage: Stage, read: Callable[..., Graph], backend: Target, records: Records | None, dims: Dims | None,
    begun: ExitStack,
) -> tuple[Artifact, int]:  # fmt: skip
    """Return the artifact of one attempt and the number of compiled units. An error names what could not be planned."""
    progress("reading the model")
    with section(IMPORT):
        graph = stage("import", read(), show_graph)
    for sentence in fallback_notes(graph):
        warnings.warn(sentence, FallbackWarning, stacklevel=4)
    build = _prepare(stage, graph, backend, records, dims, begun)
    guessed, copies, optional = graph.guessed, graph.copies, graph.optional
    said = {"metadata": dict(graph.metadata)} | ({"host": dict(graph.host)} if graph.host else {})
    del graph  # its constants are packed by now
    artifact, compiled = build()
    for sentence in refused_sizes(artifact.manifest).values():
        log.warning(sentence)
    for g in artifact.manifest["guards"]:
        note("guards", "%s: %s", g["rule"], g["message"])
    artifact = _named(artifact, copies)
    if guessed and not backend.on_device:
        general = partial(read, general=True)
        artifact, compiled = _with_general(stage, general, guessed, artifact, compiled, backend, records, begun)
    if optional:
        artifact, compiled = _with_overrides(stage, read, optional, artifact, compiled, backend, records, begun)
    said |= backend.finished()
    return replace(artifact, manifest={**given_back_everywhere(artifact.manifest), **said}), compiled


def _named(artifact: Artifact, copies: Mapping[str, str]) -> Artifact:
    """Rename the outputs that are copies of inputs to the inputs' names."""
    outputs = [o | {"name": copies.get(o["name"], o["name"])} for o in artifact.manifest["outputs"]]
    return replace(artifact, manifest={**artifact.manifest, "outputs": outputs}) if copies else artifact


def _with_general(
    stage: Stage, general: Callable[[], Graph], guessed: Sequence[tuple[Dim, Dim]], artifact: Artifact, compiled: int,
    backend: Target, records: Records | None, begun: ExitStack,
) -> tuple[Artifact, int]:  # fmt: skip
    """Add a second version, for calls in which one of two sizes that are assumed equal is 1."""
    try:
        other = stage("import for sizes of 1", general(), show_graph)
        if not _has_common_sizes(other):  # other facts make them equal
            return artifact, compiled
        second, more = _prepare(stage, other, backend, records, None, begun)()
        second = _named(second, other.copies)
    except PolydynError as e:
        note = f"calls in which one of two sizes that are taken to be equal is 1 are refused: {e}"
        notes = {"notes": [*artifact.manifest["notes"], note]}
        return replace(artifact, manifest=dict(artifact.manifest) | notes), compiled
    pairs = [(to_json(a), to_json(b)) for a, b in guessed]
    return with_general(artifact, second, pairs), compiled + more


def _has_common_sizes(graph: Graph) -> bool:
    """Check whether a step finds the size of a broadcast, also in the models that steps run."""
    bodies = [b for s in graph.steps for _, b in s.bodies if isinstance(b, Graph)]
    return any(s.kind == "common" for s in graph.steps) or any(map(_has_common_sizes, bodies))


def _with_overrides(
    stage: Stage, read: Callable[..., Graph], optional: Mapping[str, tuple[tuple[int | str | None, ...], Array]],
    artifact: Artifact, compiled: int, backend: Target, records: Records | None, begun: ExitStack,
) -> tuple[Artifact, int]:  # fmt: skip
    """Add a second version, for calls that override initializers."""
    values = {n: a for n, (_, a) in optional.items()}
    fixed = dict.fromkeys(values, "programs for a device have no second version" if backend.on_device else "")
    if sum(a.nbytes for a in values.values()) > MAX_FREE_BYTES:  # many exporters list weights as inputs
        fixed = dict.fromkeys(values, f"the initializers that are inputs take more than {MAX_FREE_BYTES} bytes")
    names, second = [n for n, why in fixed.items() if not why], None
    try:
        graph = read(overridden=names) if names else None
    except PolydynError:
        fixed |= {n: why for n in names if (why := _needed(read, n))}
        names, graph = [n for n, why in fixed.items() if not why], None
    try:
        graph = graph or (read(overridden=names) if names else None)
        if graph is not None:
            stage("import with other initializers", graph, show_graph)
            second, more = _prepare(stage, graph, backend, records, None, begun)()
            second, compiled = _named(second, graph.copies), compiled + more
            if graph.guessed:
                general = partial(read, general=True, overridden=names)
                second, compiled = _with_general(
                    stage, general, graph.guessed, second, compiled, backend, records, begun
                )
    except PolydynError as e:
        fixed |= dict.fromkeys(names, e.message)
    rows = [
        {"name": n, "dtype": str(a.dtype), "shape": ["" if d is None else str(d) for d in dims], "fixed": fixed[n]}
        for n, (dims, a) in optional.items()
    ]  # fmt: skip
    return with_overrides(artifact, second, rows, values), compiled


def _needed(read: Callable[..., Graph], name: str) -> str:
    """Return the reason why an initializer must be a constant, or "" if it can be an input."""
    try:
        read(overridden=[name])
    except PolydynError as e:
        return e.message
    return ""


def _prepare(
    stage: Stage, graph: Graph, backend: Target, records: Records | None, dims: Dims | None, begun: ExitStack,
    inner: bool = False,
) -> Build:  # fmt: skip
    """Plan a graph of one part, or of several with the host's steps. Return a function that builds the artifact.

    ``inner``: the graph is the body of a step. The function for one part does not use the graph, so a caller that drops
    the graph frees one copy of the constants. Compilation of CPU kernels begins before the call (``begun``).
    """
    if not graph.steps:
        ahead = None if backend.on_device else begun.enter_context(KernelsAhead(backend.name, backend.headers))
        plan = replace(_plan(stage, graph, backend, records, ahead), dims=sizes_by_name(dims))
        return lambda: stage("build", build_artifact(plan, backend.name, ahead.building if ahead else None))
    with planning("parts"):
        parts = cut(graph, inner)
        verify_parts(parts)
    bodies = {f"{s.origin}.{role}": (s.origin, g) for s in graph.steps for role, g in s.bodies}

    def build() -> tuple[Artifact, int]:
        prepare = partial(_prepare, stage, backend=backend, records=records, dims=None, begun=begun)
        made = [prepare(p.graph)() for p in parts.order if isinstance(p, Part)]
        made_inside = {name: _inside(node, partial(prepare, g, inner=True)) for name, (node, g) in bodies.items()}
        inside = {n: a for n, (a, _) in made_inside.items()}
        whole = assemble_parts(parts, [a for a, _ in made], inside, sizes_by_name(dims), backend.name)
        if verifying(Verify.PLANS) and not backend.on_device:
            with needing_sources():
                from polydyn.testing.plan.live import verify_frame  # only needed here

            stage("interpreted between parts", verify_frame(parts, whole))
        return whole, sum(n for _, n in (*made, *made_inside.values()))

    return build


def _inside(node: str, prepare: Callable[[], Build]) -> tuple[Artifact, int]:
    """Return the artifact of a body of ``node``. Another runtime would compute the node as a whole."""
    try:
        return prepare()()
    except PolydynError as e:
        e.origins = (node,)
        raise


def _plan(
    stage: Stage, graph: Graph, backend: Target, records: Records | None, ahead: KernelsAhead | None = None
) -> HostPlan:
    """Run the stages that need no C compiler. ``ahead`` receives kernels as soon as they are generated."""
    rewritten = stage("rewrite", planned(graph, backend.rewrite, "rewrite"), show_graph)

    def fuse(some: Graph) -> FusionPlan:
        return backend.fuse(rewritten if some is graph else backend.rewrite(some))

    fused = stage("fuse", planned(graph, fuse, "fuse"), show_plan)
    with planning("kernels", (n.origin for n in graph.nodes)):
        builder = backend.builder(fused, records)
        nothing: AbstractContextManager[Loops] = nullcontext(Loops())
        with loops_kept() if verifying(Verify.PLANS) else nothing as loops:
            placed = backend.place(builder, lambda some: ahead(distinct_kernels(some)) if ahead else None)
        kernels = stage("kernels", placed)
    with planning("host plan", (n.origin for n in graph.nodes)), section("host plan"):
        plan = host_plan(replace(rewritten, outputs=graph.outputs), kernels, backend)
    plan = stage("host plan", plan, show_host_plan)
    if verifying(Verify.PLANS):
        with needing_sources():
            from polydyn.testing.plan.live import verify_by_running  # only needed here

        stage("interpreted", verify_by_running(graph, rewritten, builder, kernels, plan, backend, loops))
    return plan


def plan_program(
    model: ModelLike,
    *,
    target: str = "cpu",
    dims: Dims | None = None,
    options: Options | None = None,
    records: str | os.PathLike[str] | None = None,
    symbols: Symbols | None = None,
    schedules: Sequence[Written] = (),
) -> HostPlan:
    """Run the part of ``compile`` that needs no C compiler: kernels as text, packed constants, the host plan."""
    backend = target_of(target, options, schedules)
    with stages(_name(model)) as stage, _opened(records) as tiles, _decided_again():
        plan = _plan(stage, stage("import", import_model(model, dims, symbols), show_graph), backend, tiles)
    backend.finished()
    return replace(plan, dims=sizes_by_name(dims))


def plan_graph(
    graph: Graph, *, target: str = "cpu", options: Options | None = None, records: Records | None = None
) -> HostPlan:
    """Return the host plan of a graph of primitives."""
    with stages(graph.name) as stage:
        return _plan(stage, graph, target_of(target, options), records)


def _decided_again() -> AbstractContextManager[object]:
    """Recheck the decisions about sizes on exit if ``POLYDYN_VERIFY`` requests it."""
    if not verifying(Verify.PLANS):
        return nullcontext()
    with needing_sources():
        from polydyn.testing.foreign.arithmetic import checked  # only needed here

    return checked()


@contextmanager
def _opened(path: str | os.PathLike[str] | None) -> Iterator[Records | None]:
    """Open a file of records read-only."""
    if path is None:
        yield None
    else:
        with Records.open(path, readonly=True) as records:
            yield records


def _name(model: ModelLike) -> str:
    """Return the name of a compilation before its model is read."""
    return Path(model).stem if isinstance(model, (str, os.PathLike)) else "model"


def _return_memory() -> None:
    """Return the heap used for compiling to the system. glibc would keep it, 80 MB after BERT-base."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
