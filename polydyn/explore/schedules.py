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

import ctypes
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from polydyn.backends.cpu import Cpu
from polydyn.backends.options import Options
from polydyn.build.cache import open_library
from polydyn.build.compiler import build_library
from polydyn.codegen.cpu.scheduled import ScheduledKernel
from polydyn.codegen.cpu.target import CpuTarget, leaf_headers
from polydyn.codegen.cuda.scheduled import ScheduledCudaKernel
from polydyn.codegen.kernel import Kernel
from polydyn.errors import UnsupportedError
from polydyn.explore.checks import Checked, check_sizes, draw
from polydyn.explore.cuda import CompiledCuda
from polydyn.fusion.pipeline import fusion_plan, rewrite_graph
from polydyn.fusion.plan import FusedGroup, FusionPlan
from polydyn.gpu.targets import is_cuda
from polydyn.graph.expand import import_model
from polydyn.graph.importer import ModelLike
from polydyn.lowering.argsort import lower_argsort
from polydyn.lowering.contract import ContractGroup, lower_contract
from polydyn.lowering.group import LoweredGroup
from polydyn.lowering.nest import lower_nest
from polydyn.lowering.pack import pack
from polydyn.lowering.serial import lower_serial
from polydyn.schedules import model as polyhedral
from polydyn.schedules.group.dependence import analyse
from polydyn.schedules.group.polyhedra import context
from polydyn.schedules.proof.prove import prove
from polydyn.schedules.show import show_choice, show_group
from polydyn.schedules.solution.patterns import Choice, choose
from polydyn.schedules.solution.schedule import schedule_contract, schedule_nest
from polydyn.schedules.tiling import Roles
from polydyn.schedules.tree.nodes import show as show_tree
from polydyn.schedules.tree.scheduled import Scheduled, flat
from polydyn.schedules.tree.strategies import nest, start_product
from polydyn.shapes.sizes import Dims


@dataclass(frozen=True)
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
            return start_product(group, roles)
        schedule = schedule_nest(group, dependences)
        return nest(group, schedule.band, schedule.phases, tiled=False)

    def compile(self, t: Scheduled, sizes: Mapping[str, int] | None = None, target: str = "cpu") -> Compiled:
        """Compile a schedule of this group for the CPU, exactly as in the tree.

        ``sizes``: values of tile sizes that the schedule has as symbols. LegalityError: it does not compute the group.
        ScheduleError: it needs the passes of a kernel family. BuildError: the compiler fails.
        """
        prove(t)
        processor = _cpu(target).processor
        kernel = ScheduledKernel("explored", t, processor, sizes).build()
        return Compiled(self.polyhedral, kernel, processor, target)

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
        cpu = _cpu(target)
        placed = cpu.builder(self.plan).build_group(self.fused)
        packs, constants = placed.lowered.packs, self.plan.graph.constants
        arrays = {a: pack(packs[b], constants) for a, b in placed.lowered.buffers.items() if b in packs}
        packed = {a: np.ascontiguousarray(x).reshape(-1) for a, x in arrays.items()}
        return Compiled(placed.lowered.group, placed.kernels[0], cpu.processor, target, packed)


def groups(model: ModelLike, dims: Dims | None = None, options: Options | None = None) -> list[Group]:
    """Return the fused groups of an ONNX model in launch order; an attention as its three parts.

    Constants keep the layout of the model, because packing belongs to a kernel family. Raises the errors of
    ``polydyn.compile``.
    """
    without = (options or Options()).without
    plan = fusion_plan(rewrite_graph(import_model(model, dims), without), without)
    parts = [x for g in plan.groups for x in (g.parts if g.kind == "attention" else (g,))]
    return [_lowered(plan, g) for g in parts]


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


def _cpu(target: str) -> Cpu:
    if is_cuda(target):
        raise UnsupportedError(
            f"target {target} is not a CPU", rule="kernels of notebooks run on this processor",
            remedy="group.cuda(t) generates the CUDA kernel of a schedule and runs it in the emulation",
        )  # fmt: skip
    return Cpu(target, Options())


def tree(t: Scheduled) -> str:
    """Return a schedule's tree as text."""
    return show_tree(flat(t.tree))


@dataclass(frozen=True)
class _Call:
    """A launch of all tasks, with the memory of its arguments."""

    function: Callable[..., None]
    arguments: tuple[Any, ...]
    memory: dict[str, npt.NDArray[Any]]
    scratch: npt.NDArray[Any]

    def __call__(self) -> None:
        self.function(*self.arguments)


@dataclass(frozen=True)
class Compiled(Checked):
    """A compiled kernel of one group. ``text``: its C; ``notes``: the decisions of its code generator.

    ``packed``: constants in the kernel's layout, by array.
    """

    group: polyhedral.Group
    kernel: Kernel
    processor: CpuTarget
    target: str
    packed: Mapping[str, npt.NDArray[Any]] | None = None

    @property
    def text(self) -> str:
        """The C text."""
        return self.kernel.text

    @property
    def notes(self) -> tuple[str, ...]:
        """The decisions of the code generator."""
        return self.kernel.notes

    def run(self, inputs: Mapping[str, npt.NDArray[Any]], **sizes: int) -> dict[str, npt.NDArray[Any]]:
        """Return flat outputs. ``inputs``: flat arrays by the group's names (``draw``); ``sizes``: its parameters."""
        call = self._call(inputs, sizes)
        call()
        return {n: call.memory[n] for n, a in self.group.arrays.items() if a.role == "output"}

    def seconds(self, repeat: int = 20, **sizes: int) -> float:
        """Return the median time of a launch on one thread, with random inputs that stay in place."""
        call = self._call(draw(self.group, sizes) | dict(self.packed or {}), sizes)
        call()
        times = []
        for _ in range(repeat):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return float(np.median(times))

    def _call(self, inputs: Mapping[str, npt.NDArray[Any]], sizes: Mapping[str, int]) -> _Call:
        """Prepare a launch of all tasks."""
        check_sizes(self.group, sizes)
        memory = self.memory(self.kernel.buffers, inputs, sizes)
        env = self.kernel.values(sizes, 1)
        symbols = (ctypes.c_int64 * max(1, len(self.kernel.symbols)))(*(env[s] for s in self.kernel.symbols))
        pointers = (ctypes.c_void_p * max(1, len(memory)))(*(x.ctypes.data for x in memory.values()))
        scratch = np.zeros(self.kernel.scratch.evaluate(env) + 256, np.uint8)
        start = scratch.ctypes.data + (-scratch.ctypes.data) % 64
        return _Call(self._function, (pointers, symbols, 0, self.kernel.tasks.evaluate(env), start), memory, scratch)

    @cached_property
    def _function(self) -> Any:
        headers = leaf_headers(self.processor.width)
        includes = "".join(f'#include "{h}"\n' for h in headers)
        run = "void explored_run(void *const *b, const int64_t *s, int64_t t, int64_t e, void *m)"
        unit = (
            f"#include <stdint.h>\n{includes}{self.text}\n"
            f'__attribute__((visibility("default"))) {run} {{ {self.kernel.name}(b, s, t, e, m); }}\n'
        )
        function = open_library(build_library({"explored.c": unit}, headers, self.target).data).explored_run
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
        function.restype = None
        return function
