"""The simulated memory of one call: every buffer has an address, every byte a value, a last writer and an owner.

Bytes are counted in cells, which are as large as the smallest element of the plan. The owner of a cell is the
buffer that was written to it last. A read through another buffer returns stale bytes and is a fault.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from polydyn.graph.dtypes import numpy_dtype
from polydyn.program.memory import Slot
from polydyn.program.plan import Buffer, HostPlan
from polydyn.schedules.expr import ITEMSIZE, Array
from polydyn.testing.plan.arithmetic import size_of
from polydyn.testing.plan.faults import Faults

NOBODY, CALLER, CONSTANT = -1, -2, -3
"""Writers of a cell other than launches."""
ALIGN, GAP = 64, 64
"""Alignment of buffers in bytes, and unused bytes between them, which catch accesses out of bounds."""
POISON = 0xFF
ROWS_MORE = 3
"""Spare rows of a cache beyond the rows of an in-place call."""


@dataclass(frozen=True)
class Place:
    """Memory of a buffer: address, bytes and owner number (an in-place cache has one owner for both buffers)."""

    address: int
    bytes: int
    owner: int


@dataclass
class Touched:
    """Cells that a launch reads and writes, one array per access."""

    reads: list[Array] = field(default_factory=list)
    writes: list[Array] = field(default_factory=list)

    def settled(self) -> tuple[Array, Array]:
        """Return the distinct cells read and written, sorted."""
        return _once(self.reads), _once(self.writes)


def _once(pieces: list[Array]) -> Array:
    if len(pieces) == 1:
        return pieces[0]
    return _distinct(np.concatenate(pieces)) if pieces else np.zeros(0, np.int64)


class Memory:
    """The memory of one call. ``in_place``: output -> input of the pairs that share one cache."""

    def __init__(
        self, plan: HostPlan, slots: tuple[Slot, ...], sizes: dict[str, int], in_place: Mapping[str, str],
        faults: Faults,
    ) -> None:  # fmt: skip
        """Lay out the buffers, and add the caller's strides to ``sizes``."""
        self.plan, self.in_place, self.faults = plan, in_place, faults
        self.now, self.touched = CALLER, Touched()
        self.names: list[str] = []
        self.places: dict[str, Place] = {}
        self.unit = min((ITEMSIZE[b.dtype] for b in plan.buffers.values()), default=1)
        end = self._lay_out(slots, sizes)
        self.sizes = sizes
        self.bytes = np.full(end, POISON, np.uint8)
        self.writer = np.full(end // self.unit, NOBODY, np.int32)
        self.owner = np.full(end // self.unit, NOBODY, np.int32)
        self.written = {n: np.zeros(p.bytes // self.unit + 1, bool) for n, p in self.places.items()}
        for name, array in plan.constants.items():
            if name in self.places:
                self._constant(name, np.ascontiguousarray(array))

    # -- layout of buffers ---------------------------------------------------------------------------------------------

    def _lay_out(self, slots: tuple[Slot, ...], sizes: dict[str, int]) -> int:
        """Place all buffers and return the end of memory.

        Intermediates are in the slots of one arena, one slot after the other, each as large as the largest of its
        sizes; all other buffers have separate memory.
        """
        taken = {b.name: self._bytes(b, sizes) for b in self.plan.buffers.values()}
        end = GAP
        for slot in slots:
            most = max(size_of(x, sizes) for x in slot.sizes)
            for t in slot.tenants:
                room = min(taken.get(t, 0), most)  # the next slot follows
                self.places[t] = Place(end, room, self._number(t))
            end += -(-most // ALIGN) * ALIGN
        end += GAP
        for name, b in self.plan.buffers.items():
            if b.role == "intermediate" or name in self.in_place:
                continue
            least = max([taken[name], *(taken[o] for o, i in self.in_place.items() if i == name)])
            self.places[name] = Place(end, least, self._number(name))
            end += -(-least // ALIGN) * ALIGN + GAP
        for o, i in self.in_place.items():
            self.places[o] = self.places[i]
        return -(-end // ALIGN) * ALIGN

    def _number(self, name: str) -> int:
        self.names.append(name)
        return len(self.names) - 1

    def _bytes(self, b: Buffer, sizes: dict[str, int]) -> int:
        """Return the bytes of a buffer, and set the values of the caller's strides."""
        if b.role == "constant":
            return int(np.asarray(self.plan.constants[b.name]).nbytes)
        shape, first = [size_of(d, sizes) for d in b.shape], len(b.strides)
        count = math.prod(shape)
        if b.strides:
            rows = shape[first]
            for o, i in self.in_place.items():
                if b.name in (o, i):
                    rows = size_of(self.plan.buffers[o].shape[first], sizes) + ROWS_MORE
            step = max(1, rows) * math.prod(shape[first + 1 :])
            for k in reversed(range(first)):
                sizes[b.strides[k]] = step
                step *= max(1, shape[k])
            count = step if count else 0
        return count * ITEMSIZE[b.dtype]

    def elements(self, name: str) -> Array:
        """Return the addresses of the elements of an input or output, in row-major order."""
        b = self.plan.buffers[name]
        at, step = np.zeros([], np.int64), 1
        for k in reversed(range(len(b.shape))):
            n = size_of(b.shape[k], self.sizes)
            stride = self.sizes[b.strides[k]] if k < len(b.strides) else step
            at, step = (stride * np.arange(n)).reshape(-1, *[1] * at.ndim) + at, step * n
        return at.reshape(-1)

    def _constant(self, name: str, array: Array) -> None:
        p = self.places[name]
        self.bytes[p.address : p.address + array.nbytes] = array.reshape(-1).view(np.uint8)
        cells = slice(p.address // self.unit, (p.address + array.nbytes) // self.unit)
        self.writer[cells], self.owner[cells] = CONSTANT, p.owner

    # -- elements ----------------------------------------------------------------------------------------------------

    def cells(self, place: Place, at: Array, item: int) -> Array:
        """Return the cells of elements."""
        first = (place.address + at * item) // self.unit
        more = item // self.unit
        return first if more == 1 else (first[:, None] + np.arange(more)).reshape(-1)

    def _inside(self, buffer: str, at: Array, item: int, access: str) -> bool:
        if buffer not in self.places:
            self.faults.add("place", buffer, f"{access} a buffer that has no memory")
            return False
        low, high, room = int(at.min()), int(at.max()), self.places[buffer].bytes
        if low < 0 or (high + 1) * item > room:
            self.faults.add("bounds", buffer, f"{access} elements {low}..{high} of {room // item} that have memory")
            return False
        return True

    def read(self, buffer: str, at: Array, dtype: str, mask: Array | None = None) -> Array:
        """Return the elements at these addresses. Masked elements are not read, and their values are undefined."""
        kind = numpy_dtype(dtype)
        at = np.asarray(at, np.int64)
        if mask is not None:
            at, mask = np.broadcast_arrays(at, mask)
        read = _distinct(at.reshape(-1) if mask is None else at[mask])
        if read.size == 0 or not self._inside(buffer, read, kind.itemsize, "reads"):
            return np.zeros(at.shape, kind)
        place = self.places[buffer]
        cells = self.cells(place, read, kind.itemsize)
        self.touched.reads.append(cells)
        owners = self.owner[cells]
        if (owners != place.owner).any():
            self._remains(buffer, read, cells, kind.itemsize)
        every = at if mask is None else np.where(mask, at, read[0])
        return np.asarray(self.bytes.view(kind)[every + place.address // kind.itemsize])

    def _remains(self, buffer: str, read: Array, cells: Array, item: int) -> None:
        """Add the fault of reading a cell that the buffer does not own, or no longer owns."""
        place = self.places[buffer]
        k = int(np.argmax(self.owner[cells] != place.owner))
        element, cell = int(read[k * self.unit // item]), cells[k]
        owner = int(self.owner[cell])
        was = self.written[buffer][cell - place.address // self.unit]
        if owner < 0:
            self.faults.add("unwritten", buffer, f"reads element {element}, which was never written")
            return
        by, other = self.who(int(self.writer[cell])), self.names[owner]
        if was:
            text = f"reads element {element}, which {by} has overwritten with '{other}'"
            self.faults.add("overwritten", buffer, text)
        else:
            self.faults.add("unwritten", buffer, f"reads element {element}, where {by} wrote '{other}'")

    def who(self, writer: int) -> str:
        """Return the name of a writer: a launch, the caller or the constants."""
        if writer >= 0:
            return f"launch '{self.plan.launches[writer].label}'"
        return {CALLER: "the caller", CONSTANT: "the constants"}.get(writer, "nobody")

    def write(self, buffer: str, at: Array, values: Array, dtype: str, *, rewrites: bool = False) -> None:
        """Write elements. ``rewrites``: this launch may write an element more than once."""
        if at.size == 0 or not self._inside(buffer, at, ITEMSIZE[dtype], "writes"):
            return
        place, kind = self.places[buffer], numpy_dtype(dtype)
        role = self.plan.buffers[buffer].role
        if role == "constant" or (self.now >= 0 and role == "input"):
            self.faults.add("place", buffer, f"writes an {role}" if role == "input" else f"writes a {role}")
            return
        once = _distinct(at)
        if not rewrites and once.size != at.size:
            self.faults.add("twice", buffer, f"writes {at.size - once.size} elements more than once")
        cells = self.cells(place, once, kind.itemsize)
        self._overwrites(buffer, cells)
        self.bytes.view(kind)[at + place.address // kind.itemsize] = values
        self.writer[cells], self.owner[cells] = self.now, place.owner
        self.written[buffer][cells - place.address // self.unit] = True
        self.touched.writes.append(cells)

    def _overwrites(self, buffer: str, cells: Array) -> None:
        """Add a fault if another launch has written the element already."""
        place, before = self.places[buffer], self.writer[cells]
        other = (self.owner[cells] == place.owner) & (before >= 0) & (before != self.now)
        if self.now >= 0 and other.any():
            k = int(np.argmax(other))
            text = f"overwrites {int(other.sum())} cells of it that {self.who(int(before[k]))} wrote"
            self.faults.add("overwritten", buffer, text)


def _distinct(at: Array) -> Array:
    """Return the distinct addresses, sorted."""
    if at.size == 0:
        return at
    low, high = int(at.min()), int(at.max())
    if high - low > 8 * at.size + 1024:
        return np.unique(at)
    seen = np.zeros(high - low + 1, bool)
    seen[at - low] = True
    return np.flatnonzero(seen) + low
