"""A compiled kernel of one group: run it, check it against the reference, time it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from polydyn.backends.cpu import Cpu
from polydyn.backends.options import Options
from polydyn.build.cache import open_library
from polydyn.build.compiler import build_library
from polydyn.codegen.cpu.target import CpuTarget, leaf_headers
from polydyn.codegen.kernel import Kernel
from polydyn.errors import InputError, UnknownNameError, UnsupportedError
from polydyn.explore.checks import Checked, check_sizes, draw
from polydyn.gpu.targets import is_cuda
from polydyn.schedules import model as polyhedral
from polydyn.schedules.index import Index
from polydyn.schedules.names import given_back

MOST_PARTS = 256
"""Maximum parts of a launch that ``Compiled.run`` executes one by one."""


def cpu_of(target: str) -> Cpu:
    """Return the CPU of that name. UnsupportedError: the target is unknown, or not a CPU."""
    if is_cuda(target):
        raise UnsupportedError(
            f"target {target} is not a CPU", rule="kernels of notebooks run on this processor",
            remedy="group.cuda(t) generates the CUDA kernel of a schedule and runs it in the emulation",
        )  # fmt: skip
    return Cpu(target, Options())


def parameters(params: Mapping[str, Index], dims: Mapping[str, int]) -> dict[str, int]:
    """Return a group's parameters (``n0`` and so on) for sizes of the model's dims.

    UnknownNameError: the group has no such dim. InputError: a dim has no size.
    """
    known = {given_back(x): x for e in params.values() for x in sorted(e.symbols())}
    for name in dims.keys() - known.keys():
        has = ", ".join(known) or "none"
        raise UnknownNameError(f"the group has no dim {name}", dim=name, rule="schedules", remedy=f"it has {has}")
    for name in known.keys() - dims.keys():
        raise InputError(f"no size is given for {name}", dim=name, rule="schedules", remedy=f"give one, as in {name}=8")
    for name, size in dims.items():
        if type(size) is not int or size < 0:
            remedy = "give an integer >= 0"
            raise InputError(f"{name}={size!r} is not a size", dim=name, rule="schedules", remedy=remedy)
    symbols = {known[n]: size for n, size in dims.items()}
    return {n: e.evaluate(symbols) for n, e in params.items()}


@dataclass(frozen=True)
class _Call:
    """A launch of all tasks, with the memory of its arguments."""

    function: Callable[..., None]
    arguments: tuple[Any, ...]
    memory: dict[str, npt.NDArray[Any]]
    scratch: npt.NDArray[Any]

    def __call__(self) -> None:
        self.function(*self.arguments)


@dataclass(frozen=True, repr=False)
class Compiled(Checked):
    """A compiled kernel of one group. ``text``: its C; ``notes``: the decisions of its code generator.

    ``packed``: constants in the kernel's layout, by array. ``params``: the group's parameters over the model's dims.
    """

    group: polyhedral.Group
    kernel: Kernel
    processor: CpuTarget
    target: str
    packed: Mapping[str, npt.NDArray[Any]] | None = None
    params: Mapping[str, Index] = field(default_factory=dict)

    def sizes(self, **dims: int) -> dict[str, int]:
        """Return the group's parameters for sizes of the model's dims. Errors as for ``parameters``."""
        return parameters(self.params, dims)

    @property
    def text(self) -> str:
        """The C text."""
        return self.kernel.text

    @property
    def notes(self) -> tuple[str, ...]:
        """The decisions of the code generator."""
        return self.kernel.notes

    def run(self, inputs: Mapping[str, npt.NDArray[Any]], **sizes: int) -> dict[str, npt.NDArray[Any]]:
        """Return flat outputs. ``inputs``: flat arrays by the group's names (``draw``); ``sizes``: its parameters.

        Tasks may run in any order. Here they run in reverse order, and scratch memory is full of NaN before each.
        """
        call = self._call(inputs, sizes)
        tasks = call.arguments[3]
        step = max(1, tasks // MOST_PARTS)
        for first in reversed(range(0, tasks, step)):
            call.scratch[:] = 0xFF
            call.function(*call.arguments[:2], first, min(tasks, first + step), call.arguments[4])
        return {n: call.memory[n] for n, a in self.group.arrays.items() if a.role == "output"}

    def seconds(self, repeat: int = 20, **sizes: int) -> float:
        """Return the median time of a launch on one thread, with random inputs that stay in place."""
        if repeat < 1:
            raise InputError(f"repeat={repeat}", rule="times of a launch", remedy="at least 1")
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
