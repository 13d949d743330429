"""Build the plans of a model for the interpreter: the compilation stages that need no C compiler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from polydyn.backends import Options, target_of
from polydyn.backends.base import Kernels, Target
from polydyn.backends.cpu import Cpu
from polydyn.backends.launches import host_plan
from polydyn.backends.options import BF16
from polydyn.codegen.ir import Body
from polydyn.codegen.pipeline import loops_kept
from polydyn.fusion.pipeline import prepared_graph
from polydyn.graph.cut import Part, cut
from polydyn.graph.dynamic import Symbols
from polydyn.graph.expand import import_parts
from polydyn.graph.importer import ModelLike
from polydyn.graph.ir import Graph, Node
from polydyn.lowering.place import Builder, PlacedGroup
from polydyn.lowering.place_cpu import KernelBuilder
from polydyn.program.host import host_program
from polydyn.program.memory import Slot
from polydyn.program.plan import HostPlan, Launch
from polydyn.schedules.model import Group
from polydyn.shapes.sizes import Dims
from polydyn.testing.plan.tensors import LIMITS

T = TypeVar("T")


class Edit:
    """Base class of edits that plant faults between stages. This one changes nothing.

    ``stage``: ``fuse`` (FusionPlan), ``place`` (Kernels), ``plan`` (HostPlan) or ``slots`` (tuple of Slot).
    """

    def __call__(self, stage: str, value: T) -> T:
        """Return the value of a stage, changed or not."""
        return value


@dataclass(frozen=True)
class Planned:
    """A host plan with its kernels and the graphs that define its tensors.

    ``source``: the imported graph. ``later``: the rewritten graph, the graph before grouping, and the fused graph;
    they define the tensors in memory. ``forms``: the source form of each group, by key. ``groups``: groups of kernels
    that differ from the placed group, by kernel name. ``loops``: loop IR of kernels, by name. ``slots``: arena slots.
    ``text``: C text of the host program. ``width``: float32 lanes of a vector. ``rounding``: maximum relative error
    that the options permit, 0 by default.
    """

    source: Graph
    later: tuple[Graph, ...]
    kernels: Kernels
    forms: Mapping[str, object]
    groups: Mapping[str, Group]
    plan: HostPlan
    loops: Mapping[str, Body] = field(default_factory=dict, repr=False)
    slots: tuple[Slot, ...] = ()
    text: str = field(default="", repr=False)
    width: int = 0
    rounding: float = 0.0

    @cached_property
    def places(self) -> Mapping[str, PlacedGroup]:
        """Placed groups by the label of their launch."""
        return {f"{p.fused.kind} {p.fused.outputs[0]}": p for p in self.kernels.placed}

    @cached_property
    def inside(self) -> tuple[Node, ...]:
        """Nodes that occur only in groups, such as the maps of prologues."""
        groups = [g for p in self.kernels.placed for g in (p.fused, *p.fused.parts)]
        return tuple(n for g in groups for n in (*(g.prologue.maps if g.prologue else ()), *g.nodes))

    def place_of(self, launch: Launch) -> tuple[PlacedGroup | None, bool]:
        """Return the placed group of a launch, and whether the launch adds its split-K partial sums."""
        for p in self.kernels.placed:
            if launch.label == f"shares of {p.fused.outputs[0]}, added":
                return p, True
        return self.places.get(launch.label), False

    @property
    def appends(self) -> bool:
        """Whether the caller may keep an input and an output in one cache."""
        return any(x.skip_if_same for x in self.plan.launches)


def planned_of(graph: Graph, target: Target, edit: Edit | None = None) -> Planned:
    """Return the plan of a graph without steps. Raises PolydynError if the compiler rejects it."""
    edit = edit or Edit()
    rewritten = target.rewrite(graph)
    side = target.options.winograd
    before = prepared_graph(rewritten, target.without, target.on_device, side, target.rounded, target.unit)
    fused = edit("fuse", target.fuse(rewritten))
    builder = target.builder(fused, None)
    with loops_kept() as loops:
        kernels = edit("place", target.place(builder))
    return planned_from(graph, (rewritten, before), builder, kernels, target, loops, edit)


def planned_from(
    source: Graph, later: tuple[Graph, ...], builder: Builder, kernels: Kernels, target: Target,
    loops: Mapping[str, Body], edit: Edit | None = None,
) -> Planned:  # fmt: skip
    """Return the host plan of compiled kernels."""
    edit = edit or Edit()
    plan = edit("plan", host_plan(replace(later[0], outputs=source.outputs), kernels, target))
    graphs = (*later, kernels.plan.graph)
    made = Planned(
        source, graphs, kernels, *forms_of(builder), plan, loops, width=width_of(target), rounding=rounding_of(target)
    )
    return with_text(made, edit)


def forms_of(builder: Builder) -> tuple[Mapping[str, object], Mapping[str, Group]]:
    """Return ``forms`` and ``groups`` of a plan. Device plans have none."""
    return (builder.forms, builder.groups) if isinstance(builder, KernelBuilder) else ({}, {})


def rounding_of(target: Target) -> float:
    """Return the permitted rounding error of products whose operands are narrowed by the options, else 0."""
    return LIMITS["bfloat16"] if target.options.tf32 or target.options.precision == BF16 else 0.0


def width_of(target: Target) -> int:
    """Return the float32 lanes of a CPU vector, 0 for a device."""
    return target.processor.width if isinstance(target, Cpu) else 0


def with_text(planned: Planned, edit: Edit | None = None) -> Planned:
    """Return the plan with the slots and the C text of its host program."""
    host = host_program(planned.plan, dict.fromkeys(planned.plan.constants, 0), 0)
    return replace(planned, slots=(edit or Edit())("slots", host.slots), text=host.text)


def plans_of(
    model: ModelLike, *, target: str = "cpu", dims: Dims | None = None, symbols: Symbols | None = None,
    options: Options | None = None, edit: Edit | None = None,
) -> list[Planned]:  # fmt: skip
    """Return the plans of a model: a single plan, or one for each part and each body of a step."""
    backend = target_of(target, options)
    graph = import_parts(model, dims, symbols)
    return [planned_of(g, backend, edit) for g in graphs_of(graph)]


def graphs_of(graph: Graph, inner: bool = False) -> Iterator[Graph]:
    """Yield the step-free graphs of a graph: its parts, then its bodies. ``inner``: the graph is itself a body."""
    if not graph.steps:
        yield graph
        return
    yield from (p.graph for p in cut(graph, inner).order if isinstance(p, Part))
    for step in graph.steps:
        for _, body in step.bodies:
            yield from graphs_of(body, inner=True)
