"""The host plan: what the generated host program does on every call, as data.

Everything above hands this to ``polydyn/program``; nothing there looks back at graphs or schedules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from polydyn.capability import FEATURES
from polydyn.codegen.kernel import Block, Kernel
from polydyn.graph.ir import Guard, SymbolSource
from polydyn.runtime.symbols import Condition
from polydyn.schedules.decision import ONLY, Decision
from polydyn.schedules.expr import ITEMSIZE, Array
from polydyn.schedules.index import ZERO, Index, product
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


WORKSPACE = ""
"""Among the buffers of a candidate: its workspace, whose contents nobody else reads."""
COUNTERS = " counters"
"""Likewise: the words that count its blocks, of a device alone."""


@dataclass(frozen=True)
class Candidate:
    """One kernel that a launch may be, with its arguments.

    All sizes are over the model's symbols, the callers' strides and ``nth``: the number of threads of a context, on a
    device that of its multiprocessors. ``buffers``, ``symbols``: the kernel's parameters in its order. ``tasks``: of
    the kernel; on a device its blocks. ``scratch``: bytes for each thread; on a device of shared memory for each block.
    ``name``: of the choice, for people, like ``names`` of the symbols; the last ``choices`` symbols are chosen at
    launch, the others are sizes. It may be launched where every one of ``conditions`` holds and, on a device, where
    ``scratch`` fits and the architecture is the kernel's. On a device those ``after`` it are launched next, in order;
    their conditions count for nothing; they share a ``workspace`` of so many bytes. (On a CPU they are launches.)
    ``block``: on a device, its sizes over these symbols; None on a CPU.
    """

    kernel: str
    buffers: tuple[str, ...]
    symbols: tuple[Index, ...]
    tasks: Index
    scratch: Index = ZERO
    name: str = ""
    names: tuple[str, ...] = ()
    choices: int = 0
    conditions: tuple[Condition, ...] = ()
    after: tuple[Candidate, ...] = ()
    workspace: Index = ZERO
    block: Block | None = None

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", self.kernel)

    @property
    def sequence(self) -> tuple[Candidate, ...]:
        """It and those that are launched after it."""
        return (self, *self.after)

    @property
    def features(self) -> tuple[str, ...]:
        """What they use of ``capability.FEATURES``, in that order."""
        used = {f for c in self.sequence if c.block for f in c.block.features}
        return tuple(f for f in FEATURES if f in used)


@dataclass(frozen=True)
class Launch:
    """One step of a program: of its ``candidates`` the one that ``decision`` names is launched.

    ``decision``: over the symbols of the candidates; it names positions among those that may be launched. ``elements``:
    how many it writes; a launch of none is skipped. ``work``: a rough count of operations; a CPU takes one thread more
    for every 32768. ``flops``: operations. ``bytes``: of the distinct buffers it names. ``copied``: bytes written by a
    launch that only moves elements, else 0. ``skip_if_same``: an input and an output; the launch copies the one to the
    beginning of the other, so it is skipped when the caller passes them at one address with the same strides.
    ``kind``: of its group. ``writes``: the buffers it writes, in parts that no other launch writes; None: not known, it
    may read and write all of them. ``reads``: the buffers whose elements it expects from earlier launches, which it may
    also write elsewhere; None: all that it names and does not write. ``reasons``: why its primitives became one kernel,
    and why it has these candidates.
    """

    candidates: tuple[Candidate, ...]
    elements: Index
    work: Index
    decision: Decision = ONLY
    label: str = ""
    kind: str = ""
    flops: Index = ZERO
    bytes: Index = ZERO
    copied: Index = ZERO
    skip_if_same: tuple[str, str] | None = None
    writes: tuple[str, ...] | None = None
    reads: tuple[str, ...] | None = None
    reasons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.label:
            object.__setattr__(self, "label", self.candidates[0].kernel)

    @cached_property
    def buffers(self) -> tuple[str, ...]:
        """The buffers that its candidates name, each once."""
        every = [k for c in self.candidates for k in c.sequence]
        named = [b for k in every for b in (*k.buffers, *(m.buffer for m in (k.block.maps if k.block else ())))]
        return tuple(b for b in dict.fromkeys(named) if b not in (WORKSPACE, COUNTERS))


@dataclass(frozen=True)
class IndexCheck:
    """Before launch number ``launch``, all integers in ``buffer``, plus ``offset``, must lie in [-size, size).

    As many launches as there are: behind all of them. ``part``: (first, step) of the integers meant.
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
    buffer ``status`` (``polydyn/program/index_checks.py``).

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
    execution order; every intermediate is written before it is read. ``kernels``: each once; on a CPU the text is that
    of ``void NAME(void *const *buf, const int64_t *sym, int64_t begin, int64_t end, void *scratch)``, which processes
    tasks [begin, end). ``headers``: file name -> text of C headers, all of them included, in this order, before
    kernels' texts, which include none. ``waves``: how many launches, in order, run side by side
    (``program/parallel_launches.py``); () when each runs alone. ``dims``: what the user said of dynamic dims; its
    ranges and multiples are guards already, its likely sizes are for tuning and dispatch.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    buffers: dict[str, Buffer]
    constants: dict[str, Array]
    sources: tuple[SymbolSource, ...]
    guards: tuple[Guard, ...]
    kernels: tuple[Kernel, ...]
    launches: tuple[Launch, ...]
    notes: tuple[str, ...] = ()
    headers: dict[str, str] = field(default_factory=dict)
    index_checks: tuple[IndexCheck, ...] = ()
    dims: Mapping[str, Sizes] = field(default_factory=dict)
    waves: tuple[int, ...] = ()
    place: str = "cpu"
    """Where it runs, a key of ``polydyn.runtime.c.PLACES``."""
    device_checks: tuple[DeviceCheck, ...] = ()
    """On a device, by launch."""

    @property
    def on_device(self) -> bool:
        """Whether it runs on a device: candidates then have a ``Block``."""
        return self.place != "cpu"
