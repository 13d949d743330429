"""A generated kernel of either target: its text, and the data for its launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from polydyn.capability import capability, runs_on
from polydyn.codegen.ir import Compare
from polydyn.schedules.index import ONE, ZERO, Index, IndexLike

WORKERS = "nth"
"""The symbol in ``launch`` expressions for the number of threads, or of multiprocessors on a device (equal to
``THREADS`` of the run time, which does not import this module)."""
SHARED_LIMIT = 99 * 1024
"""Bytes of shared memory that a block may have on every device from sm_80 on (sm_86 and sm_89 have the least)."""
BASE = "sm_80"
"""The oldest supported architecture. Kernels without newer instructions are built for it. Same value as
``polydyn.gpu.targets.BASE``."""
TF32 = "tfloat32"
"""The type of a tensor map that rounds float32 to tf32 during the load. Same value as ``TF32`` of the run time."""
WORKSPACE = "workspace"
"""The buffer for a kernel's partial results: for the launches ``after`` it, or for the last of its blocks."""
COUNTERS = "counters"
"""The buffer of arrival counters (``MOST_COUNTERS``), which are 0 before and after a launch."""
MOST_COUNTERS = 1024
"""Number of counters in ``COUNTERS``. Same value as ``PD_COUNTERS`` of the run time."""
UNIT = 1024
"""Unit of the factors of estimates: a factor of 1 is ``UNIT``."""


@dataclass(frozen=True)
class Work:
    """The work of one block: a loop of equal steps, and the work after it.

    A persistent block does this for ``tiles`` tiles, where the start of a tile overlaps the end of the previous one.

    ``steps``: steps of the loop, over the kernel's symbols. Per step: ``flops`` at the peak rate of ``unit``,
    ``shared`` bytes read from shared memory, ``traffic`` bytes from and to global memory, ``instructions`` of warps.
    ``waits``: successive memory latencies of a step; those of ``flight`` steps overlap. At the end ``elements`` results
    pass through shared memory, with ``last`` instructions of warps and ``results`` bytes from and to global memory.
    ``registers``: registers of a thread, unless the compiler reports them. ``by_warps``: a warp executes its own
    instructions of ``unit``, and the block has a barrier after each step. ``cluster``: blocks that wait for each other
    at both ends. ``strip``: rows of tiles in which adjacent blocks read the same data; 0: blocks share no data that
    memory would be read again for. ``ends``: successive memory latencies at the end of a block.
    """

    steps: Index
    registers: int
    unit: str = "f32"
    flops: int = 0
    shared: int = 0
    traffic: int = 0
    instructions: int = 0
    waits: int = 1
    flight: int = 1
    elements: int = 0
    by_warps: bool = True
    cluster: int = 1
    last: int = 0
    results: int = 0
    tiles: Index = ONE
    strip: int = 0
    ends: int = 1

    def _costs(self) -> tuple[int, ...]:
        return (
            self.flops,
            self.shared,
            self.traffic,
            self.instructions,
            self.waits,
            self.elements,
            self.registers,
            self.cluster,
            self.last,
            self.results,
            self.ends,
        )

    def no_slower(self, other: Work) -> bool:
        """Whether no cost of a block is higher, for equally many steps: then no model can prefer the other."""
        alike = (self.steps, self.unit, self.flight, self.by_warps, self.tiles, self.strip)
        same = alike == (other.steps, other.unit, other.flight, other.by_warps, other.tiles, other.strip)
        return same and all(a <= b for a, b in zip(self._costs(), other._costs(), strict=True))

    def subs(self, values: Mapping[str, IndexLike]) -> Work:
        """Return the work over other symbols."""
        return replace(self, steps=self.steps.subs(values), tiles=self.tiles.subs(values))

    def shared_by(self, shares: IndexLike) -> Work:
        """Return the work with its steps split over ``shares`` blocks."""
        return replace(self, steps=self.steps.ceildiv(shares))


@dataclass(frozen=True)
class PixelBoxOf:
    """The pixels of copies in im2col mode (the run time's ``PixelBox``), along dims 1, 2, ... except the last one.

    Corners are over the symbols.
    """

    lower: tuple[Index, ...]
    upper: tuple[Index, ...]
    steps: tuple[int, ...]


@dataclass(frozen=True)
class TensorMapOf:
    """A tensor map that a kernel takes: a strided view of a buffer, in elements; dims innermost first.

    ``dtype``: that of the buffer, or ``TF32``. The base is ``offset`` elements into it, dim 0 is dense, and ``strides``
    are those of dims 1, 2, .... A copy moves a ``box``, swizzled by 128 bytes (the run time's ``TensorMap`` has strides
    in bytes). Dims, strides and offset are over the symbols. ``pixels``: set in im2col mode, where the box is channels
    and pixels.
    """

    name: str
    buffer: str
    dtype: str
    offset: Index
    dims: tuple[Index, ...]
    strides: tuple[Index, ...]
    box: tuple[int, ...]
    pixels: PixelBoxOf | None = None

    @property
    def corners(self) -> tuple[Index, ...]:
        """The lower corners, then the upper ones; empty except in im2col mode."""
        return (*self.pixels.lower, *self.pixels.upper) if self.pixels else ()


@dataclass(frozen=True)
class Block:
    """The launch properties of a kernel on a device, in addition to those of every kernel.

    ``threads``: threads of a block. ``arch``: the oldest architecture that has the instructions
    (``capability.runs_on``). ``maps``: parameters by value (128 bytes each), before the buffers. ``work``: work of a
    block, for estimates of its time; None if unknown. ``factor``: factor of the estimates, in parts of ``UNIT``:
    measured over modelled time of similar kernels. ``cluster``: blocks that run at the same time and access each
    other's shared memory; the grid is a multiple of it. ``features``: the elements of ``capability.FEATURES`` that the
    text uses.
    """

    threads: int
    arch: str = BASE
    maps: tuple[TensorMapOf, ...] = ()
    work: Work | None = None
    factor: int = UNIT
    cluster: int = 1
    features: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kernel:
    """One kernel of a group, on either target.

    The parameters are the ``buffers`` (pointers), in the order of the interface, and then the ``symbols`` (int64):
    parameters of the group, then those of ``launch``, whose values are given over the group's parameters and
    ``WORKERS``. ``tasks``: tasks of a launch; on a device its blocks, in a one-dimensional grid. ``scratch``: bytes per
    thread; on a device bytes of dynamic shared memory per block. Both are over the symbols. ``notes``: decisions that
    ``explain`` reports.

    ``version`` names the choice among several kernels of a group. It may be launched if every index of ``multiples`` is
    a multiple of its number (elements), all ``conditions`` hold and, on a device, ``scratch`` fits. The kernels
    ``after`` it are launched next, in order, on a device on the same stream, with the same values of the symbols; a
    launch of no blocks is skipped. ``workspace``: bytes, over the symbols, of the buffer ``WORKSPACE`` (16-byte
    aligned, contents undefined before and after), which it shares with them; then it may have the buffer ``COUNTERS``
    too. ``tile``: the number of the tuned tile that it is built from, None without tuning. ``amx``: it uses a CPU's
    matrix unit, for which a process needs a permission. ``lanes``: lanes of its vectors; 0: as many as the processor's
    vectors of float32 have. ``block``: None on a CPU. ``text`` and ``buffers`` are set last (``emit`` of the target).
    """

    name: str
    symbols: tuple[str, ...]
    tasks: Index
    scratch: Index = ZERO
    launch: Mapping[str, Index] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    version: str = ""
    multiples: tuple[tuple[Index, int], ...] = ()
    conditions: tuple[Compare, ...] = ()
    after: tuple[Kernel, ...] = ()
    workspace: Index = ZERO
    tile: int | None = None
    amx: bool = False
    lanes: int = 0
    block: Block | None = None
    text: str = ""
    buffers: tuple[str, ...] = ()

    @property
    def device(self) -> Block:
        """The launch properties on a device, for a kernel of a device."""
        assert self.block is not None, f"{self.name} is for a CPU"
        return self.block

    def values(self, env: Mapping[str, int], workers: int) -> dict[str, int]:
        """Return the values of all symbols for the values of the group's parameters."""
        given = {**env, WORKERS: workers}
        return {**env, **{n: i.evaluate(given) for n, i in self.launch.items()}}

    def fits(self, env: Mapping[str, int], limit: int = SHARED_LIMIT, workers: int = 108, arch: str = BASE) -> bool:
        """Whether it may be launched for these values of the group's parameters, on such a device."""
        if not runs_on(self.device.arch, capability(arch)):
            return False
        values = self.values(env, workers)
        whole = all(i.evaluate(values) % n == 0 for i, n in self.multiples)
        return whole and all(c.holds(values) for c in self.conditions) and self.scratch.evaluate(values) <= limit


def with_block(kernel: Kernel, **changes: object) -> Kernel:
    """Return the kernel with other fields of its block."""
    return replace(kernel, block=replace(kernel.device, **changes))  # type: ignore[arg-type]
