"""A generated CUDA kernel: text, and what its launcher must know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from polydyn.codegen.cuda.work import Work
from polydyn.codegen.ir import Compare
from polydyn.schedules.index import ZERO, Index

SHARED_LIMIT = 99 * 1024
"""Bytes of shared memory a block may have on every device from sm_80 on (sm_86 and sm_89 have the least)."""
BASE = "sm_80"
"""What kernels need that need nothing of their own (``polydyn.gpu.targets.BASE``, which run time knows without us)."""
TF32 = "tfloat32"
"""The type of a tensor map that rounds float32 to tf32 as it loads them (``TF32`` of the run time, likewise)."""
WORKSPACE = "workspace"
"""The buffer that a kernel leaves partial results in for the launches ``after`` it."""
MULTIPROCESSORS = "multiprocessors"
"""The symbol of the device that ``launch`` expressions may use."""


UNIT = 1024
"""A factor of estimates is a whole number of these parts."""


@dataclass(frozen=True)
class TensorMapOf:
    """A tensor map that a kernel takes: a strided view of a buffer, in elements; dims innermost first.

    ``dtype``: that of the buffer, or ``TF32``. The base is ``offset`` elements into it, dim 0 is dense, ``strides`` are
    those of dims 1, 2, ...; a copy moves a ``box``, swizzled by 128 bytes (the run time's ``TensorMap`` wants
    strides in bytes). Dims, strides and offset are over the symbols.
    """

    name: str
    buffer: str
    dtype: str
    offset: Index
    dims: tuple[Index, ...]
    strides: tuple[Index, ...]
    box: tuple[int, ...]


@dataclass(frozen=True)
class CudaKernel:
    """One version of a group's kernel.

    The parameters are the ``maps`` (128 bytes each, by value), the ``buffers`` (pointers) and then the ``symbols``
    (int64): parameters of the group, then those of ``launch``, whose values are given over the group's parameters and
    ``MULTIPROCESSORS``. ``grid``: blocks, a one-dimensional grid; ``smem``: bytes of dynamic shared memory; both over
    the symbols. A version may be launched where every index of ``multiples`` is a multiple of its number (elements),
    all ``conditions`` hold and ``smem`` fits the device. ``version`` names the choice. ``arch``: the oldest
    architecture that has the instructions; other than ``sm_80`` it is also the only one.

    ``workspace``: bytes, over the symbols, of the buffer ``WORKSPACE`` (16-byte aligned, contents undefined before and
    after) that is among the buffers of the kernel and of those ``after`` it. The latter are launched next, in order,
    on the same stream, with the same values of the symbols; a launch of no blocks is left out.

    ``work``: of a block, for estimates of its time; None: nothing is known. ``factor``: what estimates are multiplied
    by, in parts of ``UNIT``: measured over modelled time of kernels like it. ``tile``: the number of the kept tile that
    it is made of, None where nothing was tuned.
    """

    name: str
    text: str
    buffers: tuple[str, ...]
    symbols: tuple[str, ...]
    threads: int
    grid: Index
    smem: Index
    version: str
    multiples: tuple[tuple[Index, int], ...] = ()
    notes: tuple[str, ...] = field(default=())
    conditions: tuple[Compare, ...] = ()
    launch: Mapping[str, Index] = field(default_factory=dict)
    workspace: Index = ZERO
    after: tuple[CudaKernel, ...] = ()
    maps: tuple[TensorMapOf, ...] = ()
    arch: str = BASE
    work: Work | None = None
    factor: int = UNIT
    tile: int | None = None

    def values(self, env: Mapping[str, int], multiprocessors: int) -> dict[str, int]:
        """The values of all symbols for the values of the group's parameters."""
        known = {**env, MULTIPROCESSORS: multiprocessors}
        return {**env, **{n: i.evaluate(known) for n, i in self.launch.items()}}

    def fits(
        self, env: Mapping[str, int], limit: int = SHARED_LIMIT, multiprocessors: int = 108, arch: str = BASE
    ) -> bool:
        """Whether this version may be launched for these values of the group's parameters, on such a device."""
        if self.arch not in (BASE, arch):
            return False
        known = self.values(env, multiprocessors)
        whole = all(i.evaluate(known) % n == 0 for i, n in self.multiples)
        return whole and all(c.holds(known) for c in self.conditions) and self.smem.evaluate(known) <= limit
