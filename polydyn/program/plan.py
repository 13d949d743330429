"""The host plan: the work of the generated host program in every call, as data.

The compiler passes it to ``polydyn/program``, which uses no graphs and no schedules.
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

    ``role``: ``input``, ``output``, ``constant`` or ``intermediate``. ``shape`` is over the model's symbols. Memory is
    dense row-major over ``shape``; a constant has the bytes of its array, which may have been packed to another size.
    ``strides`` (inputs and outputs only): symbols for the strides of the leading axes, in elements, which the caller
    chooses; the remaining axes are dense.
    """

    name: str
    dtype: str
    shape: tuple[Index, ...]
    role: str
    strides: tuple[str, ...] = ()


def size_bytes(buffer: Buffer) -> Index:
    """Return the bytes of a dense tensor over the model's symbols."""
    return product(buffer.shape) * ITEMSIZE[buffer.dtype]


WORKSPACE = ""
"""The workspace among the buffers of a candidate. Only the candidate itself uses its contents."""
COUNTERS = " counters"
"""The block counters among the buffers of a candidate, on a device only."""


@dataclass(frozen=True)
class Candidate:
    """One of the kernels that a launch may choose, with its arguments.

    All sizes are over the model's symbols, the callers' strides and ``nth``, the number of threads of a context or of
    SMs of a device. ``buffers``, ``symbols``: the kernel's parameters in its order. ``tasks``: number of tasks, or of
    blocks on a device. ``scratch``: bytes per thread, or of shared memory per block on a device. ``name`` of the choice
    and ``names`` of the symbols are for messages; the last ``choices`` symbols are chosen at launch, the others are
    sizes. A candidate may be launched if all ``conditions`` hold and, on a device, if ``scratch`` fits and the
    architecture matches.

    On a device the kernels ``after`` it are launched next, in order; their conditions are not tested. They share a
    ``workspace`` of that many bytes. (On a CPU they are separate launches.) ``block``: on a device its sizes over these
    symbols; None on a CPU.
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
        """The candidate and the kernels that are launched after it."""
        return (self, *self.after)

    @property
    def features(self) -> tuple[str, ...]:
        """The ``capability.FEATURES`` that the sequence uses, in that order."""
        used = {f for c in self.sequence if c.block for f in c.block.features}
        return tuple(f for f in FEATURES if f in used)


@dataclass(frozen=True)
class Launch:
    """One step of a program: it launches the candidate that ``decision`` selects.

    ``decision``: over the symbols of the candidates; it selects among the candidates that may be launched.
    ``elements``: number of elements it writes; a launch with none is skipped. ``work``: a rough count of operations; a
    CPU uses one more thread per 32768. ``flops``: operations. ``bytes``: size of the distinct buffers it names.
    ``copied``: bytes written by a launch that only moves elements, else 0. ``skip_if_same``: an input and an output;
    the launch copies the input to the beginning of the output, so it is skipped if the caller passes both at one
    address with the same strides. ``kind``: kind of its group.

    ``writes``: the buffers it writes, in parts that no other launch writes; None if unknown, then it may read and write
    all of its buffers. ``reads``: the buffers with elements from earlier launches, which it may also write elsewhere;
    None for all buffers that it does not write. ``reasons``: why its primitives became one kernel, and why it has
    these candidates. ``declined``: other kinds of kernels, and why they do not compute its group.
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
    declined: tuple[tuple[str, str], ...] = ()

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
    """Before launch ``launch``, all integers in ``buffer``, plus ``offset``, must be in [-size, size).

    If ``launch`` is the number of launches, the check runs after all of them. ``part``: (first, step) of the checked
    integers.
    """

    buffer: str
    size: Index
    offset: Index
    launch: int
    message: str
    part: tuple[int, int] = (0, 1)


@dataclass(frozen=True)
class DeviceCheck:
    """Launch ``launch`` finds the integers of ``check`` that are out of range, and writes the result to the buffer
    ``status`` (``polydyn/program/index_checks.py``).

    ``check``: its ``buffer`` may be a tensor that is not in memory. Its ``launch`` is the first that reads them,
    or -1 if that is unknown or ``launch`` also does other work. ``scanned``: ``check`` is also one of the plan's
    ``index_checks``, of an input. If this input is in host memory, the host checks it and ``launch`` is skipped.
    """

    check: IndexCheck
    status: str
    launch: int
    scanned: bool


@dataclass(frozen=True)
class HostPlan:
    """The whole program.

    ``constants``: name -> array in its final, packed form. ``outputs``/``inputs`` in the model's order. ``launches`` in
    execution order; every intermediate is written before it is read. ``kernels``: each once; on a CPU the text defines
    ``void NAME(void *const *buf, const int64_t *sym, int64_t begin, int64_t end, void *scratch)``, which processes
    tasks [begin, end). ``headers``: file name -> text of C headers; all are included, in this order, before the texts
    of kernels, which include none. ``waves``: numbers of consecutive launches that run in parallel
    (``program/parallel_launches.py``); () if each runs alone. ``dims``: the user's description of dynamic dims; its
    ranges and multiples are already guards, its likely sizes serve tuning and dispatch.
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
    """The place where it runs, a key of ``polydyn.runtime.c.UNITS``."""
    device_checks: tuple[DeviceCheck, ...] = ()
    """The checks on a device, ordered by launch."""

    @property
    def on_device(self) -> bool:
        """Whether it runs on a device; then candidates have a ``Block``."""
        return self.place != "cpu"
