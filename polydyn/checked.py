"""Checked programs: the same kernels, with every memory access checked. They are slow, for tests.

The checks are: bounds; no element is read that was never written (scratch is new for every task); an element is written
by one task of a launch, and again only after that task has read it (as reductions in place and partial sums do); no
task reads elements that another task of its launch wrote; no value computed from an unset register is stored; different
numbers of threads and orders of tasks give the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

import numpy as np

from polydyn.build.cache import open_library
from polydyn.build.compiler import build_library
from polydyn.errors import InputError, PolydynError
from polydyn.program.assemble import kernel_units
from polydyn.program.plan import Buffer, Candidate, HostPlan, Launch
from polydyn.program.verify import verify_host_plan
from polydyn.runtime.program import numpy_dtype
from polydyn.runtime.symbols import THREADS, holds
from polydyn.schedules.decision import ONLY, choose
from polydyn.schedules.expr import Array

SCHEDULES = ((1, 1), (1, -1), (2, 1), (3, -1), (7, 1))
"""(threads, direction of the tasks); the first is the reference."""
MESSAGE = 600
LEAVES = ("pd_checked.h", "pd_checked.c")
DEFINED = "#define PD_CHECKED 1\n#define PD_AMX_EMULATED 1\n"
"""Definitions for compiling the leaf functions. A real matrix unit would not check memory."""


class CheckError(PolydynError, RuntimeError):
    """Raised if a kernel accesses memory that it must not access, or if its result depends on task order. A bug in
    polydyn.
    """


class _Region(ctypes.Structure):
    """Mirror of ``pdc_region``."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("state", ctypes.c_void_p),
        ("shared", ctypes.c_int64),
    )


def _taken(launch: Launch, env: Mapping[str, int]) -> Launch:
    """Return the launch with only the candidate that it selects on one thread."""
    taken = choose(launch.decision, {**env, THREADS: 1})
    return replace(launch, candidates=(launch.candidates[taken],), decision=ONLY)


@dataclass
class _Memory:
    """A buffer of a call: its elements, and the state of each (0 never written, 1 written, more during a launch)."""

    buffer: Buffer
    data: Array
    state: Array

    def region(self) -> _Region:
        d, s = self.data, self.state
        return _Region(self.buffer.name.encode(), d.ctypes.data, d.size, d.itemsize, s.ctypes.data, 1)

    def copy(self) -> tuple[Array, Array]:
        return self.data.copy(), self.state.copy()


class CheckedProgram:
    """A host plan whose kernels run checked. It is not thread-safe."""

    def __init__(self, plan: HostPlan, target: str = "cpu") -> None:
        verify_host_plan(plan)
        self.plan = plan
        leaf = files("polydyn.codegen") / "leaf"
        header, source = ((leaf / name).read_text() for name in LEAVES)
        headers = {n: f"{DEFINED}{t}" for n, t in plan.headers.items()}
        units = kernel_units(replace(plan, headers=headers)) | {"pd_checked.c": source, "table.c": self._table()}
        library = build_library(units, headers | {"pd_checked.h": header}, target)
        self._library = open_library(library.data)
        self._number = {k.name: i for i, k in enumerate(plan.kernels)}

    def _table(self) -> str:
        names = [k.name for k in self.plan.kernels]
        return "\n".join(
            [
                "#include <stdint.h>",
                "typedef void pd_kernel(void *const *, const int64_t *, int64_t, int64_t, void *);",
                *(f"pd_kernel {n};" for n in names),
                f"pd_kernel *const pdc_kernels[] = {{{', '.join([*names, '0'])}}};",
                f"const char *const pdc_names[] = {{{', '.join([*(chr(34) + n + chr(34) for n in names), '0'])}}};",
            ]
        )

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs. Raises CheckError, which names kernel, task, buffer and element, or InputError for a
        guard.
        """
        tensors = self.tensors(feeds)
        return {name: tensors[name] for name in self.plan.outputs}

    def tensors(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Return every buffer of a call except constants, in launch order. Raises the same errors as ``run``."""
        env = self._symbols(feeds)
        for b in self.plan.buffers.values():  # every buffer is dense here
            shape = [d.evaluate(env) for d in b.shape]
            env |= {s: int(np.prod(shape[axis + 1 :])) for axis, s in enumerate(b.strides)}
        memory = {n: self._memory(b, env, feeds) for n, b in self.plan.buffers.items()}
        for launch in self.plan.launches:
            if launch.elements.evaluate(env) > 0:  # like the run time
                self._launch(_taken(launch, env), env, memory)
        for name in self.plan.outputs:
            missing = np.flatnonzero(memory[name].state == 0)
            if missing.size:
                raise CheckError(f"element {missing[0]} of output {name} was never written", tensor=name)
        return {
            n: m.data.reshape([d.evaluate(env) for d in m.buffer.shape])
            for n, m in memory.items()
            if m.buffer.role != "constant"
        }

    def _symbols(self, feeds: Mapping[str, Array]) -> dict[str, int]:
        env = {s.symbol: int(feeds[s.input].shape[s.axis]) for s in self.plan.sources}
        for g in self.plan.guards:
            if not holds(g.left.evaluate(env), g.relation, g.right.evaluate(env)):
                raise InputError(g.message)
        for name in self.plan.inputs:
            shape = tuple(d.evaluate(env) for d in self.plan.buffers[name].shape)
            if shape != feeds[name].shape:
                raise InputError(f"input '{name}' has shape {feeds[name].shape}, not {shape}", tensor=name)
        return env

    def _memory(self, b: Buffer, env: Mapping[str, int], feeds: Mapping[str, Array]) -> _Memory:
        """Allocate separate memory for each buffer, one element longer so that no two buffers begin at the same
        address.
        """
        known = self.plan.constants.get(b.name) if b.role == "constant" else feeds.get(b.name)
        dtype = numpy_dtype(b.dtype)
        count = int(np.prod([d.evaluate(env) for d in b.shape])) if known is None else known.size
        data = np.frombuffer(b"\xaa" * ((count + 1) * dtype.itemsize), dtype).copy()[:count]
        if known is not None:
            data[:] = np.ascontiguousarray(known).reshape(-1).view(dtype)
        return _Memory(b, data, np.full(count + 1, known is not None, np.uint32)[:count])

    def _launch(self, launch: Launch, env: Mapping[str, int], memory: Mapping[str, _Memory]) -> None:
        """Run a launch under every distinct schedule, each from the same memory, and compare the bits."""
        (taken,) = launch.candidates
        used = [memory[n] for n in taken.buffers]
        before = [m.copy() for m in used]
        reference: list[Array] = []
        for (threads, direction), numbers, tasks, scratch in _schedules(taken, env):
            for m, (data, state) in zip(used, before, strict=True):
                m.data[:], m.state[:] = data, state
            self._call(launch.label, taken.kernel, used, numbers, range(tasks)[::direction], scratch)
            got = [m.data.view(np.uint8).copy() for m in used]
            reference = reference or got
            for m, a, b in zip(used, reference, got, strict=True):
                if not np.array_equal(a, b):
                    at = int(np.flatnonzero(a != b)[0]) // m.data.itemsize
                    way = "forwards" if direction > 0 else "backwards"
                    raise CheckError(
                        f"kernel {taken.kernel}: element {at} of {m.buffer.name} has other bits with {threads} "
                        f"threads, tasks {way}, than with one",
                        tensor=m.buffer.name,
                    )
        for m in used:
            np.minimum(m.state, 1, out=m.state)

    def _call(
        self, label: str, kernel: str, used: list[_Memory], numbers: list[int], order: range, scratch: int
    ) -> None:
        regions = (_Region * (len(used) + 1))(*(m.region() for m in used))
        message = ctypes.create_string_buffer(MESSAGE)
        wide = ctypes.c_int64
        symbols = (wide * (len(numbers) + 1))(*numbers)
        tasks = (wide * (len(order) + 1))(*order)
        failed = self._library.pdc_run(
            wide(self._number[kernel]), wide(len(used)), regions, symbols, wide(len(order)), tasks,
            wide(max(0, scratch)), message, wide(MESSAGE),
        )  # fmt: skip
        if failed:
            raise CheckError(f"{message.value.decode()}; launch {label}", rule="checked memory")


def _schedules(taken: Candidate, env: Mapping[str, int]) -> Iterator[tuple[tuple[int, int], list[int], int, int]]:
    """Yield (schedule, symbols, tasks, scratch); each distinct launch at most once forwards and once backwards."""
    seen: set[Any] = set()
    for threads, direction in SCHEDULES:
        here = {**env, THREADS: threads}
        numbers = [s.evaluate(here) for s in taken.symbols]
        tasks, scratch = (max(0, x.evaluate(here)) for x in (taken.tasks, taken.scratch))
        key = (tuple(numbers), tasks, direction if tasks > 1 else 1)
        if key not in seen:
            seen.add(key)
            yield (threads, direction), numbers, tasks, scratch
