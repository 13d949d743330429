"""Schedules in a notebook: change the tree of a fused group by hand, prove, compile, check and time it.

    group = polydyn.explore.groups("model.onnx")[0]
    t = group.start()                                  # the solved schedule matrix as a tree
    t = tile(t, "i", (b, "B_i"), (p, 8))               # any transformation of polydyn.schedules.tree
    prove(t)                                           # or a LegalityError with a witness
    kernel = group.compile(t)                          # C text, compiled
    kernel.check(M=33, N=65), kernel.seconds(M=512, N=512)
    group.cuda(t).check(M=33, N=65)                    # its CUDA text, if blocks and threads are assigned

``group.compiled()`` returns the kernel of the group's own kernel family (packing, register tiles, uneven shares).
Hand-written schedules use the plain ``codegen.scheduled``, which does only what the tree says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from polydyn.backends import target_of
from polydyn.backends.options import Options
from polydyn.codegen.cpu.scheduled import ScheduledKernel
from polydyn.codegen.cuda.scheduled import ScheduledCudaKernel
from polydyn.explore.compiled import Compiled, cpu_of
from polydyn.explore.cuda import CompiledCuda
from polydyn.explore.handmade import Schedule, rebuilt, start
from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.graph.expand import import_model
from polydyn.graph.importer import ModelLike
from polydyn.lowering.argsort import lower_argsort
from polydyn.lowering.contract import ContractGroup, lower_contract
from polydyn.lowering.group import LoweredGroup
from polydyn.lowering.nest import lower_nest
from polydyn.lowering.pack import pack
from polydyn.lowering.serial import lower_serial
from polydyn.runtime.tables import Table
from polydyn.schedules import model as polyhedral
from polydyn.schedules.group.dependence import analyse
from polydyn.schedules.group.polyhedra import context
from polydyn.schedules.handmade.document import Source
from polydyn.schedules.handmade.draft import start as begin
from polydyn.schedules.proof.prove import prove
from polydyn.schedules.show import show_choice, show_group
from polydyn.schedules.solution.patterns import Choice, choose
from polydyn.schedules.solution.schedule import schedule_contract, schedule_nest
from polydyn.schedules.tiling import Roles
from polydyn.schedules.tree.nodes import show as show_tree
from polydyn.schedules.tree.scheduled import Scheduled, flat
from polydyn.schedules.tree.strategies import nest
from polydyn.shapes.sizes import Dims


@dataclass(frozen=True, repr=False)
class Group:
    """A fused group of a model, lowered: statements over iterators, arrays with addresses.

    ``label``: its kind and first output; ``polyhedral``: the statements. ``roles``: the roles of a product's iterators,
    None for element-wise groups and rows.
    """

    label: str
    fused: FusedGroup
    plan: FusionPlan
    lowered: LoweredGroup
    roles: Roles | None

    @property
    def polyhedral(self) -> polyhedral.Group:
        """The statements and arrays."""
        return self.lowered.group

    def __str__(self) -> str:
        return f"{self.label}\n{show_group(self.polyhedral)}"

    def choice(self) -> Choice:
        """Return the pattern of the schedule, its matrix, and the solution of its unknowns."""
        group = self.polyhedral
        return choose(group, analyse(group, positive=False).under(context(group)))

    def matrix(self) -> str:
        """Return the schedule matrix with its ``?``, their solutions, and why other patterns declined."""
        return show_choice(self.choice())

    def _repr_html_(self) -> str:
        from polydyn.explore.pictures.trees import matrix

        return matrix(self.polyhedral, self.choice())._repr_html_()

    def start(self) -> Scheduled:
        """Return the solved matrix as a tree, the start of all transformations.

        A product has the axes ``i`` (rows), ``j`` (columns), ``k`` (the blocked reduction); the others have the names
        of their iterators.
        """
        group = self.polyhedral
        dependences = analyse(group, positive=False).under(context(group))
        if self.roles is not None:
            roles, _ = schedule_contract(group, self.roles, dependences)
            return begin(group, roles, None).scheduled
        schedule = schedule_nest(group, dependences)
        return nest(group, schedule.band, schedule.phases, tiled=False)

    def schedule(self, written: Source | None = None) -> Schedule:
        """Return the schedule of this group without a step; or the one for it among those ``written``, such as a file.

        UnsupportedError: its kernel has a schedule of its own. InputError: none is for this group.
        """
        return start(self) if written is None else rebuilt(self, written)

    def __repr__(self) -> str:
        return self.label

    def row(self) -> dict[str, Any]:
        """Return the columns of a table of groups."""
        nodes = ", ".join(dict.fromkeys(n.origin for n in self.fused.nodes))
        return {"kind": self.fused.kind, "output": self.fused.outputs[0], "sizes": ", ".join(self.polyhedral.params),
                "statements": len(self.polyhedral.statements), "nodes": nodes}  # fmt: skip

    def compile(self, t: Scheduled, sizes: Mapping[str, int] | None = None, target: str = "cpu") -> Compiled:
        """Compile a schedule of this group for the CPU, exactly as in the tree.

        ``sizes``: values of tile sizes that the schedule has as symbols. LegalityError: it does not compute the group.
        ScheduleError: it needs the passes of a kernel family. BuildError: the compiler fails.
        """
        prove(t)
        processor = cpu_of(target).processor
        kernel = ScheduledKernel("explored", t, processor, sizes).build()
        return Compiled(self.polyhedral, kernel, processor, target, None, self.lowered.params)

    def cuda(self, t: Scheduled, sizes: Mapping[str, int] | None = None) -> CompiledCuda:
        """Generate the CUDA kernel of a schedule of this group, exactly as in the tree: tasks are blocks, units
        threads.

        LegalityError: it does not compute the group. ScheduleError: it assigns no blocks and threads, or needs the
        passes of a kernel family.
        """
        prove(t)
        return CompiledCuda(self.polyhedral, ScheduledCudaKernel("explored", t, sizes).build()[-1])

    def compiled(self, target: str = "cpu") -> Compiled:
        """Return the kernel that ``polydyn.compile`` uses on a CPU, with its default tile, for comparison.

        UnsupportedError: the target is unknown, or not a CPU.
        """
        cpu = cpu_of(target)
        placed = cpu.builder(self.plan).build_group(self.fused)
        packs, constants = placed.lowered.packs, self.plan.graph.constants
        arrays = {a: pack(packs[b], constants) for a, b in placed.lowered.buffers.items() if b in packs}
        packed = {a: np.ascontiguousarray(x).reshape(-1) for a, x in arrays.items()}
        params = {n: placed.lowered.params[n] for n in placed.lowered.group.params}
        return Compiled(placed.lowered.group, placed.kernels[0], cpu.processor, target, packed, params)


def groups(
    model: ModelLike, dims: Dims | None = None, options: Options | None = None, target: str = "cpu"
) -> Table[Group]:
    """Return the fused groups of an ONNX model in launch order, as a CPU ``target`` has them; an attention as its three
    parts.

    Constants keep the layout of the model, because packing belongs to a kernel family. Raises the errors of
    ``polydyn.compile``.
    """
    cpu = target_of(target, options)
    plan = cpu.fuse(cpu.rewrite(import_model(model, dims)))
    parts = [x for g in plan.groups for x in (g.parts if g.kind == "attention" else (g,))]
    return Table((_lowered(plan, g) for g in parts), f"groups of {plan.graph.name or 'a model'}", "group")


def _lowered(plan: FusionPlan, g: FusedGroup) -> Group:
    product = lower_contract(plan, g, 0) if g.kind == "contract" else None
    form = product if isinstance(product, ContractGroup) else None
    if g.kind in ("scatter", "scan"):
        lowered = lower_serial(plan, g).lowered
    elif g.kind == "order":
        lowered = lower_argsort(plan, g).lowered
    else:
        lowered = form.lowered if form else lower_nest(plan, g)
    return Group(f"{g.kind} {g.outputs[0]}", g, plan, lowered, form.roles if form else None)


def tree(t: Scheduled) -> str:
    """Return a schedule's tree as text."""
    return show_tree(flat(t.tree))
