"""Compare the loop IR of kernels with the statements of their groups, at small sizes.

A case is a kernel, with the kernels after it, at one assignment of sizes. Both sides get the same random inputs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations

import numpy as np

from polydyn.codegen.cpu.streaming import CACHE
from polydyn.codegen.ir import Body
from polydyn.codegen.kernel import COUNTERS, WORKERS, WORKSPACE, Kernel
from polydyn.graph.dtypes import numpy_dtype
from polydyn.lowering.place import PlacedGroup
from polydyn.schedules.expr import Array
from polydyn.schedules.model import SHARES, Group
from polydyn.testing.loops.cpu import CpuRun
from polydyn.testing.loops.cuda import CudaRun
from polydyn.testing.loops.rooms import Broken, Unbound, poisoned
from polydyn.testing.loops.statements import FLOATS_OF_SEED, Flat, Floats, arrays_of, expected
from polydyn.testing.plan.arithmetic import size_of
from polydyn.testing.plan.planned import Planned
from polydyn.testing.plan.tensors import difference

SIZES: tuple[Mapping[str, int], ...] = (
    {"M": 5, "K": 7, "B": 2, "N": 2, "H": 6}, {"M": 19, "K": 3, "B": 1, "N": 1, "H": 11},
    {"M": 37, "K": 21, "B": 3, "N": 2, "H": 9}, {"M": 70, "K": 50, "B": 17, "N": 3, "H": 18},
)  # fmt: skip
"""Sizes of the dims of ``kernel_graphs``; every other dim is 3."""
OTHER_DIMS = 3
CACHE_BYTES = 1 << 20
THREADS = 2
BELOW = (70, 16, 9, 4, 2, 1)
"""Ends of random integers: the first one at which all subscripts that are data are in range is taken."""
MAX_BYTES = 1 << 24
FEW_SHARES = 3
"""Number of slices of a split reduction at sizes where the kernel would take none."""
MAX_WORK = 150_000
"""Maximum number of multiplications of a case: larger ones take longer than they are worth."""
SYMBOLS_OF_CPU = {str(CACHE): CACHE_BYTES}


@dataclass(frozen=True)
class Case:
    """A kernel at some sizes. ``arrays``: inputs, and poison for outputs. ``values``: symbols of the kernel.

    ``width``: float32 lanes of a CPU vector, 0 on a device. ``expected``: memory after the statements.
    """

    kernel: Kernel
    group: Group
    values: Mapping[str, int]
    arrays: Mapping[str, Array] = field(repr=False)
    expected: Flat = field(repr=False)
    width: int = 0

    @property
    def name(self) -> str:
        """The name of the kernel, with its version."""
        return f"{self.kernel.name} {self.kernel.version}".strip()

    def run(self, bodies: Mapping[str, Body], executed: set[Hashable] | None = None) -> str:
        """Return what is wrong with the results of the bodies, or "". ``bodies``: by kernel name.

        ``executed`` receives the identities of the nodes that are executed, on a CPU also the events at each node
        (``CpuRun.executed``). Raises Unbound if a name has no value.
        """
        for reverse in (False,) if self.width else (False, True):  # many missing barriers show in one order only
            try:
                memory = self._memory()
                for kernel in (self.kernel, *self.kernel.after):
                    done = self._execute(kernel, bodies[kernel.name], memory, reverse)
                    if executed is not None:
                        executed |= done
            except Unbound:
                raise
            except Broken as e:
                return str(e)
            if error := self._difference(memory):
                return error
        return ""

    def _memory(self) -> dict[str, tuple[str, Array]]:
        memory = {n: (self.group.arrays[n].dtype, a.copy()) for n, a in self.arrays.items()}
        words = max([0, *(k.workspace.evaluate(self.values) for k in (self.kernel, *self.kernel.after))]) // 4
        memory[WORKSPACE] = ("float32", poisoned(words, "float32"))
        memory[COUNTERS] = ("uint32", np.zeros(1024, np.uint32))
        return memory

    def _execute(
        self, kernel: Kernel, body: Body, memory: Mapping[str, tuple[str, Array]], reverse: bool
    ) -> set[Hashable]:
        env = {**self.values, WORKERS: THREADS}
        values = {**self.values, **{n: i.evaluate(env) for n, i in kernel.launch.items() if n not in self.values}}
        tasks = kernel.tasks.evaluate(values)
        named = {n: memory[n] for n in kernel.buffers} | ({} if self.width else dict(memory))
        if self.width:
            ends = sorted({0, (tasks + 1) // 3, (tasks + 1) // 2, tasks})
            parts = [CpuRun(named, self.width) for _ in ends[1:] or ends]
            for run, begin, end in zip(parts, ends, ends[1:] or ends, strict=False):
                run.run(body, {**values, **SYMBOLS_OF_CPU, "begin": begin, "end": end})
            _check_races(parts)
            return {f"parts: {len(parts)}"}.union(*(p.executed for p in parts))
        device = CudaRun(named, kernel, values, reverse)
        device.run(body, tasks)
        return set[Hashable](device.executed)

    def _difference(self, memory: Mapping[str, tuple[str, Array]]) -> str:
        for n, (_, got) in memory.items():
            if n not in self.arrays or self.group.arrays[n].role != "output":
                continue
            written = self.expected.written[n]
            error = difference(got[written], self.expected.arrays[n][written])
            if error:
                return f"{n}: {error}"
            if not np.array_equal(got[~written].view(np.uint8), self.arrays[n][~written].view(np.uint8)):
                return f"{n}: elements that no statement writes are written"
        return ""


@dataclass(frozen=True)
class Skipped:
    """A kernel that is not executed at some sizes, with the reason."""

    kernel: str
    reason: str


def cases_of(planned: Planned, sizes: Mapping[str, int], seed: int = 0) -> Iterator[Case]:
    """Yield the kernels of a plan that are executed at some sizes."""
    return (x for x in cases_or_reasons(planned, sizes, seed) if isinstance(x, Case))


def cases_or_reasons(planned: Planned, sizes: Mapping[str, int], seed: int = 0) -> Iterator[Case | Skipped]:
    """Yield every kernel of a plan as a case, or with the reason why it is not executed at these sizes."""
    dims = dims_of(planned, sizes)
    for p in planned.kernels.placed:
        names = {k.name for k in p.kernels}
        for kernel in p.kernels:
            if kernel.name.removesuffix("_long") in names - {kernel.name}:
                continue  # the same loops with wider indices
            case = case_of(planned, p, kernel, dims, seed)
            yield Skipped(kernel.name, case) if isinstance(case, str) else case


def names_of(planned: Planned) -> list[str]:
    """Return the names of the dims of a plan, sorted."""
    return sorted({s for b in planned.plan.buffers.values() for d in b.shape for s in d.symbols()})


def dims_of(planned: Planned, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the values of all dims of a model and of the strides of its inputs and outputs."""
    buffers = planned.plan.buffers.values()
    dims = {n: sizes.get(n, OTHER_DIMS) for n in names_of(planned)}
    for b in buffers:
        for k, symbol in enumerate(b.strides):
            dims[symbol] = math.prod(size_of(d, dims) for d in b.shape[k + 1 :])
    return dims


def values_of(p: PlacedGroup, kernel: Kernel, dims: Mapping[str, int]) -> dict[str, int]:
    """Return the values of a kernel's symbols at some dims."""
    values = kernel.values({n: size_of(e, dims) for n, e in p.lowered.params.items()}, THREADS)
    if values.get(SHARES) == 0:  # the decision takes it at larger sizes only
        values[SHARES] = FEW_SHARES
    return values


def case_of(
    planned: Planned, p: PlacedGroup, kernel: Kernel, dims: Mapping[str, int], seed: int,
    values: Mapping[str, int] | None = None, max_work: int = MAX_WORK, floats: Floats | None = None,
) -> Case | str:  # fmt: skip
    """Return the case of a kernel, or why there is none. ``values``: symbol -> value, by default as at a launch.

    ``max_work``: maximum number of instances of a statement. ``floats`` draws random inputs; the default depends on
    the seed.
    """
    values = values_of(p, kernel, dims) if values is None else values
    group = planned.groups.get(kernel.name, p.lowered.group)
    if error := reason(p, kernel, group, values, max_work):
        return error
    shapes = {n: planned.plan.buffers[b].shape for n, b in p.lowered.buffers.items()}
    elements = {n: math.prod(size_of(d, dims) for d in shape) for n, shape in shapes.items()}
    constants = constants_of(planned, p, group)
    elements |= {n: len(a) for n, a in constants.items()}
    for below in BELOW:
        numbers = np.random.default_rng(seed)
        arrays = arrays_of(group, elements, numbers, below, floats or FLOATS_OF_SEED[seed % 2]) | constants
        if sum(a.nbytes for a in arrays.values()) > MAX_BYTES:
            return "too much memory"
        with contextlib.suppress(IndexError):  # integers that are subscripts out of range
            memory = expected(group, planned.forms.get(p.key), arrays, values)
            return Case(kernel, group, values, arrays, memory, kernel.lanes or planned.width)
    return "no random integers are subscripts in range"


def reason(
    p: PlacedGroup, kernel: Kernel, group: Group, values: Mapping[str, int], max_work: int = MAX_WORK
) -> str:
    """Return why a kernel is not executed at some values of its symbols, or ""."""
    whole = all(i.evaluate(values) % n == 0 for i, n in kernel.multiples)
    if not whole or not all(c.holds(values) for c in kernel.conditions):
        return "its conditions do not hold"
    if work_of(group, values) > max_work:
        return "too much work"
    return "" if set(p.lowered.buffers) <= set(group.arrays) else "its statements have other operands"


def _check_races(parts: Sequence[CpuRun]) -> None:
    """Check that no part of a launch writes what another one accesses: they run at the same time on several threads."""
    for one, other in permutations(parts, 2):
        for n, stored in one.stored.items():
            if (stored & (other.stored[n] | other.loaded[n])).any():
                raise Broken(f"two tasks access {n}, and one of them writes it")


def constants_of(planned: Planned, p: PlacedGroup, group: Group) -> dict[str, Array]:
    """Return the elements of a group's constants."""
    return {
        n: np.ascontiguousarray(planned.plan.constants[b]).reshape(-1).view(numpy_dtype(group.arrays[n].dtype))
        for n, b in p.lowered.buffers.items()
        if b in planned.plan.constants
    }


def work_of(group: Group, values: Mapping[str, int]) -> int:
    """Return the number of instances of the largest statement."""
    return max((math.prod(size_of(e, values) for _, e in s.iters) for s in group.statements), default=0)
