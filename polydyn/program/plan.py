"""The host plan: what the generated host program does on every call, as data.

Everything above hands this to ``polydyn/program``; nothing there looks back at graphs or schedules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from polydyn.codegen.cuda_kernel import UNIT, TensorMapOf
from polydyn.codegen.cuda_work import Work
from polydyn.graph.ir import Guard, SymbolSource
from polydyn.schedules.decision import Decision
from polydyn.schedules.expr import ITEMSIZE, Array
from polydyn.schedules.index import Index, product
from polydyn.shapes.sizes import Sizes


@dataclass(frozen=True)
class Buffer:
    """A tensor in memory.

    ``role``: ``input``, ``output``, ``constant`` or ``intermediate``. ``shape`` over the model's symbols. Memory is
    dense row-major over ``shape``; a constant has the bytes of its array, which may have been packed to another size.
    ``strides``, of an input or output only: symbols that hold, in elements, the strides of its leading axes as the
    caller chose them; the axes behind them are dense.
    """

    name: str
    dtype: str
    shape: tuple[Index, ...]
    role: str
    strides: tuple[str, ...] = ()


def size_bytes(buffer: Buffer) -> Index:
    """Bytes of a dense tensor over the model's symbols."""
    return product(buffer.shape) * ITEMSIZE[buffer.dtype]


@dataclass(frozen=True)
class KernelSource:
    """One compiled kernel: C text of ``void NAME(void *const *buf, const int64_t *sym, int64_t begin, int64_t end,
    void *scratch)``, which processes tasks [begin, end) of its flattened coincident band. On a device: CUDA text.

    ``digest``: content hash of all that determines the text. The text includes no headers (``HostPlan.headers``).
    """

    name: str
    text: str
    digest: str
    buffers: int
    symbols: int
    notes: tuple[str, ...] = ()
    """What its code generator decided, for ``explain``."""
    arch: str = ""
    """On a device: the oldest architecture it can be compiled for; other than ``sm_80`` it is also the only one."""


@dataclass(frozen=True)
class Variant:
    """A kernel and launch-time tile that a launch may take; the fields mean what those of ``Launch`` mean."""

    kernel: str
    symbols: tuple[Index, ...]
    tasks: Index
    scratch: Index


@dataclass(frozen=True)
class Choice:
    """What a launch chooses among, and how: ``decision`` over the model's symbols and ``nth`` names a variant.

    All variants take the same buffers, and as many symbols as their launch.
    """

    variants: tuple[Variant, ...]
    decision: Decision


WORKSPACE = ""
"""Among the buffers of a version: memory of its own, whose contents nobody else reads."""


@dataclass(frozen=True)
class Version:
    """One kernel that a launch on a device may be.

    ``buffers`` and ``symbols``: the kernel's parameters (pointers, then int64) over the model's names and ``nth``, here
    the device's multiprocessors; before them ``maps``, by value. ``grid``: blocks, one-dimensional; ``smem``: bytes of
    dynamic shared memory; ``threads``: of a block. It may be launched when every condition holds (relations are those
    of a ``Guard``), ``smem`` fits the device, and ``arch`` is sm_80 or the device's own. ``name``: of the choice.
    ``workspace``: bytes that it shares with the kernels ``after`` it, which are launched next; their conditions count
    for nothing. ``work``: of a block, its steps over the same symbols; ``estimate``: of the time of the launch and of
    those after it, in nanoseconds (``polydyn.program.cuda_cost``), 0 where nothing is known. ``factor``: that of its
    estimate (``CudaKernel.factor``).
    """

    kernel: str
    name: str
    buffers: tuple[str, ...]
    symbols: tuple[Index, ...]
    grid: Index
    smem: Index
    threads: int
    conditions: tuple[tuple[Index, str, Index], ...] = ()
    workspace: Index = field(default_factory=lambda: Index.of(0))
    after: tuple[Version, ...] = ()
    maps: tuple[TensorMapOf, ...] = ()
    arch: str = "sm_80"
    work: Work | None = None
    estimate: Index = field(default_factory=lambda: Index.of(0))
    factor: int = UNIT


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    ``buffers``: buffer names in the kernel's order. ``symbols``: the kernel's integers, each over the model's symbols
    and the special symbol ``nth`` (number of threads), launch-time tiles last. ``tasks``: number of tasks, over the
    same. ``scratch``: bytes of scratch per thread. ``work``: a rough count of operations; the runtime takes one thread
    more for every 32768. A launch with ``tasks`` <= 0 is skipped. ``skip_if_same``: an input and an output; the launch
    copies the one to the beginning of the other, so it is skipped when the caller passes them at one address with the
    same strides. ``copied``: bytes written by a launch that only moves elements, else 0. ``bytes``: of the distinct
    buffers it names.
    ``names``: of the symbols, for people; the last ``choices`` of them are chosen at launch, the others are sizes.
    ``reasons``: why its primitives became one kernel. ``choice``: kernel, symbols, tasks and scratch are then those of
    the variant that the decision names; the launch's own are not used. ``kind``: of its group. ``writes``: the buffers
    it writes, in parts that no other launch writes; None: not known, it may read and write all of them. ``versions``:
    on a device, the kernels it may be; of those that may be launched the one of least estimate is, the first of equals;
    ``kernel`` is then one of them, ``tasks`` is 0 when there is nothing to do.
    """

    kernel: str
    buffers: tuple[str, ...]
    symbols: tuple[Index, ...]
    tasks: Index
    scratch: Index
    work: Index
    label: str = ""
    flops: Index = field(default_factory=lambda: Index.of(0))
    bytes: Index = field(default_factory=lambda: Index.of(0))
    skip_if_same: tuple[str, str] | None = None
    copied: Index = field(default_factory=lambda: Index.of(0))
    names: tuple[str, ...] = ()
    choices: int = 0
    reasons: tuple[str, ...] = ()
    choice: Choice | None = None
    kind: str = ""
    writes: tuple[str, ...] | None = None
    versions: tuple[Version, ...] = ()


@dataclass(frozen=True)
class IndexCheck:
    """Before launch number ``launch``, all integers in ``buffer``, plus ``offset``, must lie in [-size, size).

    ``part``: (first, step) of the integers meant.
    """

    buffer: str
    size: Index
    offset: Index
    launch: int
    message: str
    part: tuple[int, int] = (0, 1)


@dataclass(frozen=True)
class DeviceCheck:
    """Launch number ``launch`` finds the integers of ``check`` that lie outside, and writes what it found to the
    buffer ``status`` (``polydyn/program/offenders.py``).

    ``check``: its ``buffer`` may be a tensor that is nowhere in memory as such; its ``launch`` is the first that reads
    the integers, -1 where that is not known or ``launch`` does more than look. ``scanned``: ``check`` is one of the
    plan's ``index_checks`` too, of an input; when that is in host memory the host looks and ``launch`` is skipped.
    """

    check: IndexCheck
    status: str
    launch: int
    scanned: bool


@dataclass(frozen=True)
class HostPlan:
    """The whole program.

    ``constants``: name -> array in its final, packed form. ``outputs``/``inputs`` in the model's order. ``launches`` in
    execution order; every intermediate is written before it is read. ``headers``: file name -> text of C headers, all
    of them included, in this order, before kernels' texts. ``waves``: how many launches, in order, run side by side
    (``program/waves.py``); () when each runs alone. ``dims``: what the user said of dynamic dims; its ranges and
    multiples are guards already, its likely sizes are for tuning and dispatch.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    buffers: dict[str, Buffer]
    constants: dict[str, Array]
    sources: tuple[SymbolSource, ...]
    guards: tuple[Guard, ...]
    kernels: tuple[KernelSource, ...]
    launches: tuple[Launch, ...]
    notes: tuple[str, ...] = ()
    headers: dict[str, str] = field(default_factory=dict)
    index_checks: tuple[IndexCheck, ...] = ()
    dims: Mapping[str, Sizes] = field(default_factory=dict)
    waves: tuple[int, ...] = ()
    place: str = "cpu"
    """Where it runs: ``cpu``, or ``cuda`` (launches then have versions)."""
    device_checks: tuple[DeviceCheck, ...] = ()
    """On a device, by launch."""
