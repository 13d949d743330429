"""polydyn.compile: the stages from a model to a program, one named call each."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from polydyn.backends import Options, Target, target_of
from polydyn.backends.launches import host_plan
from polydyn.debug import Stage, stages
from polydyn.fusion.show import show_plan
from polydyn.graph.expand import import_model
from polydyn.graph.importer import ModelLike
from polydyn.graph.ir import Graph
from polydyn.graph.show import show_graph
from polydyn.program.assemble import build_program
from polydyn.program.plan import HostPlan
from polydyn.program.program import Program, check_threads
from polydyn.program.show import show_host_plan
from polydyn.search.records import Records
from polydyn.shapes.sizes import Dims, sizes_by_name

__all__ = ["Options", "compile", "plan_graph", "plan_program"]


def compile(
    model: ModelLike,
    *,
    target: str = "cpu",
    dims: Dims | None = None,
    threads: int | None = None,
    options: Options | None = None,
    records: str | os.PathLike[str] | None = None,
) -> Program:
    """Compiles an ONNX model once, for every shape.

    ``model``: path, bytes or ``onnx.ModelProto``. ``target``: ``cpu`` (this machine), ``cpu:avx512``, ``cpu:avx2``;
    ``cuda:sm_80`` (86, 89, 90a, 100), ``cuda`` (all of them), ``cuda:emulated`` (docs/adr/0011-cuda-runtime.md).
    ``dims``: what is known of dynamic dims by name, an inclusive range (low, high) or ``polydyn.Sizes`` with a multiple
    and likely sizes; ranges and multiples are checked on every call; no range means [0, inf).
    ``threads``: of every call, default all cores of this process. ``records``: a file of ``polydyn.tune``, only
    read; equal records give equal programs. What was tuned for several numbers of threads is chosen by that of a
    call; for a GPU the records of its architecture count. Raises PolydynError, see ``polydyn.errors``.
    """
    check_threads(threads)
    backend = target_of(target, options)
    with stages(_name(model)) as stage, _opened(records) as tiles:
        plan = _plan(stage, stage("import", import_model(model, dims), show_graph), backend, tiles)
        plan = replace(plan, dims=sizes_by_name(dims))
        program = stage("build", build_program(plan, target=target, threads=threads))
    del plan
    _return_memory()
    return program


def _plan(stage: Stage, graph: Graph, backend: Target[Any], records: Records | None) -> HostPlan:
    """The stages that need no C compiler."""
    rewritten = stage("rewrite", backend.rewrite(graph), show_graph)
    fused = stage("fuse", backend.fuse(rewritten), show_plan)
    kernels = stage("kernels", backend.place(backend.builder(fused, records)))
    return stage("host plan", host_plan(replace(rewritten, outputs=graph.outputs), kernels, backend), show_host_plan)


def plan_program(
    model: ModelLike,
    *,
    target: str = "cpu",
    dims: Dims | None = None,
    options: Options | None = None,
    records: str | os.PathLike[str] | None = None,
) -> HostPlan:
    """Everything of ``compile`` that needs no C compiler: kernels as text, packed constants, the host plan."""
    backend = target_of(target, options)
    with stages(_name(model)) as stage, _opened(records) as tiles:
        plan = _plan(stage, stage("import", import_model(model, dims), show_graph), backend, tiles)
    return replace(plan, dims=sizes_by_name(dims))


def plan_graph(
    graph: Graph, *, target: str = "cpu", options: Options | None = None, records: Records | None = None
) -> HostPlan:
    """The host plan of a graph of primitives."""
    with stages(graph.name) as stage:
        return _plan(stage, graph, target_of(target, options), records)


@contextmanager
def _opened(path: str | os.PathLike[str] | None) -> Iterator[Records | None]:
    """The records of a file, only read."""
    if path is None:
        yield None
    else:
        with Records.open(path, readonly=True) as records:
            yield records


def _name(model: ModelLike) -> str:
    """What a compilation is called before its model is read."""
    return Path(model).stem if isinstance(model, (str, os.PathLike)) else "model"


def _return_memory() -> None:
    """Gives the heap that compiling took back to the system; glibc would keep it, 80 MB after BERT-base."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
