"""Compare the loops of a kernel with its statements: both must write the same cells, and loops read no more cells.

Each task counts as a separate thread: no two tasks write one cell, and no task reads a cell that another one writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from polydyn.codegen.cpu.streaming import CACHE
from polydyn.codegen.ir import Body
from polydyn.graph.dtypes import numpy_dtype
from polydyn.program.plan import Candidate
from polydyn.schedules.expr import Array
from polydyn.schedules.index import Index
from polydyn.testing.plan.arithmetic import size_of, value_of
from polydyn.testing.plan.memory import CONSTANT, Memory
from polydyn.testing.plan.trace import Trace, UnknownLeaf, Untraced

CACHE_BYTES = 1 << 20
"""Cache size in bytes that is passed to kernels."""


class Loops:
    """The loops of one launch. ``buffers`` maps arrays to buffers of the plan, ``types`` maps them to dtypes."""

    def __init__(
        self, memory: Memory, candidate: Candidate, symbols: tuple[str, ...], buffers: Mapping[str, str],
        types: Mapping[str, str], width: int,
    ) -> None:  # fmt: skip
        self.memory, self.candidate, self.buffers, self.types = memory, candidate, buffers, types
        sizes = memory.sizes
        tasks = max(0, size_of(candidate.tasks, sizes))
        given = zip(symbols, candidate.symbols, strict=True)
        self.env: dict[str, Any] = {"begin": np.arange(tasks), "end": np.arange(1, tasks + 1)}
        self.env |= {str(CACHE): CACHE_BYTES} | {n: size_of(e, sizes) for n, e in given}
        self.trace = Trace(types, self._fetch, max(1, tasks), width)
        self.tasks = tasks

    def compare(self, body: Body) -> str:
        """Compare the loops with the accesses of the statements. Return why they cannot be traced, else ""."""
        try:
            self.trace.run(body, self.env, self.tasks)
        except UnknownLeaf as e:
            self.memory.faults.add("loops", "", f"calls the leaf {e}, which the interpreter does not know")
            return str(e)
        except Untraced as e:
            return str(e)
        for array in self.types:
            self._bounds(array)
        self._tasks()
        self._cells()
        self._scratch()
        return ""

    def _fetch(self, name: str, at: tuple[Index, ...], env: Mapping[str, Any]) -> Array:
        """Return integers from memory."""
        place, kind = self.memory.places[self.buffers[name]], numpy_dtype(self.types[name])
        (i,) = (value_of(x, env, self._fetch) for x in at)
        inside = np.clip(np.asarray(i), 0, max(0, place.bytes // kind.itemsize - 1))
        return np.asarray(self.memory.bytes.view(kind)[inside + place.address // kind.itemsize].astype(np.int64))

    # -- comparison ---------------------------------------------------------------------------------------------------

    def _bounds(self, array: str) -> None:
        room = self.memory.places[self.buffers[array]].bytes
        for how in ("reads", "writes"):
            found = self.trace.all_of(how, array) // self.trace.tasks
            if found.size and (found[0] < 0 or found[-1] >= room):
                text = f"its loops touch bytes {int(found[0])}..{int(found[-1])} of {room}"
                self.memory.faults.add("loops", self.buffers[array], text)

    def _pairs(self, kind: str, array: str) -> Array:
        """Return ``cell * tasks + task`` of all accesses of one ``kind`` to an array."""
        place, tasks, unit = self.memory.places[self.buffers[array]], self.trace.tasks, self.memory.unit
        found = self.trace.all_of(kind, array)
        found = found[(found >= 0) & (found < place.bytes * tasks)]
        return np.asarray(np.unique((place.address + found // tasks) // unit * tasks + found % tasks))

    def _tasks(self) -> None:
        """Add a fault if two tasks access one cell and one of them writes it."""
        tasks = self.trace.tasks
        for a in self.types:
            wrote = self._pairs("writes", a)
            cells = np.unique(wrote // tasks)
            if cells.size != wrote.size:
                text = f"{wrote.size - cells.size} cells are written by two tasks"
                self.memory.faults.add("tasks", self.buffers[a], text)
            for b in self.types if cells.size else ():
                read = self._pairs("reads", b)
                clash = read[np.isin(read // tasks, cells) & ~np.isin(read, wrote)]
                if clash.size:
                    text = f"{clash.size} cells are read by another task than writes them"
                    self.memory.faults.add("tasks", self.buffers[b], text)

    def _cells(self) -> None:
        reads, writes = self.memory.touched.settled()
        for a in self.types:
            place, unit = self.memory.places[self.buffers[a]], self.memory.unit
            first, last = place.address // unit, (place.address + place.bytes) // unit
            own = writes[(writes >= first) & (writes < last)]
            wrote, may = (np.unique(self._pairs(how, a) // self.trace.tasks) for how in ("writes", "may write"))
            extra = np.setdiff1d(wrote, writes)
            if extra.size:
                self.memory.faults.add("loops", self.buffers[a], f"its loops write {extra.size} cells more")
            every = [wrote, may, *(np.unique(self._pairs("writes", b) // self.trace.tasks) for b in self._aliases(a))]
            missing = np.setdiff1d(own, np.concatenate(every))
            if missing.size:
                self.memory.faults.add("loops", self.buffers[a], f"its loops leave out {missing.size} cells")
            read = np.unique(self._pairs("reads", a) // self.trace.tasks)
            more = read[~np.isin(read, reads) & ~np.isin(read, writes)]
            if more.size and self.memory.writer[first] != CONSTANT:
                self.memory.faults.add("loops", self.buffers[a], f"its loops read {more.size} cells more")

    def _aliases(self, array: str) -> list[str]:
        """Return the other arrays of the same buffer."""
        place = self.memory.places[self.buffers[array]]
        return [b for b in self.types if b != array and self.memory.places[self.buffers[b]] == place]

    def _scratch(self) -> None:
        """Add a fault if local arrays exceed the scratch, or are read before they are written."""
        given = size_of(self.candidate.scratch, self.memory.sizes)
        if self.trace.scratch > given:
            self.memory.faults.add("scratch", "", f"uses {self.trace.scratch} bytes of {given}")
        for name, count in self.trace.rooms.items():
            item = numpy_dtype(self.trace.types[name]).itemsize
            wrote, may = self.trace.all_of("writes", name), self.trace.all_of("may write", name)
            read = self.trace.all_of("reads", name)
            for found in (wrote, read):
                at = found // self.trace.tasks
                if at.size and (at[0] < 0 or at[-1] >= count * item):
                    self.memory.faults.add("scratch", name, f"touches bytes up to {int(at[-1])} of {count * item}")
            missing = np.setdiff1d(read, np.concatenate([wrote, may]))
            if missing.size:
                self.memory.faults.add("scratch", name, f"reads {missing.size} bytes that its task has not written")
