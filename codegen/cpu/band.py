"""The shared iterators of an element-wise or stitch group: the direction of vectors, and the storage of locals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from polydyn.codegen.cpu.target import CpuTarget
from polydyn.codegen.passes.transpose import has_transposes
from polydyn.schedules.expr import loads
from polydyn.schedules.index import ONE, ZERO, Index
from polydyn.schedules.model import Group, Statement
from polydyn.schedules.tiling import inner_iterators, stages

UNZIPPED = 16, 4
"""Lanes, and the greatest distance of elements, for which the leaf ``vloads_f32`` picks elements out of whole vectors.

Rows of at most as many elements are lanes there: with AVX-512, a softmax of 2, 3 and 4 elements is 9, 5 and 4 times as
fast as with vectors along rows. With 8 elements, or with AVX2, loads one by one cost as much as they save.
"""


@dataclass(frozen=True)
class Band:
    """A group, its shared iterators ``prefix`` and the phases of its statements, for a target's vectors."""

    group: Group
    prefix: tuple[str, ...]
    phases: Mapping[str, int]
    target: CpuTarget

    @cached_property
    def stage_of(self) -> dict[str, int]:
        """Statement -> its stage."""
        order = stages(self.group, self.prefix, dict(self.phases))
        return {s.name: n for n, stage in enumerate(order) for s in stage}

    @cached_property
    def extents(self) -> dict[str, Index]:
        """Iterator -> extent."""
        return {n: e for s in self.group.statements for n, e in s.iters}

    def runs_along(self) -> bool:
        """Whether the band's last iterator is the better vector direction."""
        if not any(inner_iterators(s, self.prefix) for s in self.group.statements):
            return True
        along = self._strided(lambda s: self.prefix[-1])
        inner = self._strided(lambda s: s.iterators[-1] if inner_iterators(s, self.prefix) else "")
        few = self._shorter_than(self.target.width) and along == inner
        return (along < inner and not self._narrow()) or few or self._unzips()

    def _shorter_than(self, limit: int) -> bool:
        """Whether all inner loops have from 2 to ``limit - 1`` steps."""
        loops = [self.extents[x].constant for s in self.group.statements for x in inner_iterators(s, self.prefix)]
        return all(e is not None and 1 < e < limit for e in loops)

    def _unzips(self) -> bool:
        """Whether rows are so short that a few whole vectors hold the rows of all lanes."""
        read = {a.dtype for a in self.group.arrays.values() if a.role not in ("local", "output")}
        return read == {"float32"} and self.target.width >= UNZIPPED[0] and self._shorter_than(UNZIPPED[1] + 1)

    def _narrow(self) -> bool:
        """Whether the band leaves most of a vector empty and no inner loop does: leaves load such strides at once."""
        width, band = self.target.width, self.extents[self.prefix[-1]].constant
        last = [s.iterators[-1] for s in self.group.statements if inner_iterators(s, self.prefix)]
        long = all((e := self.extents[x].constant) is None or e >= width for x in last)
        return band is not None and band * 4 <= width and long

    def _strided(self, iterator: Callable[[Statement], str]) -> int:
        """Count accesses to memory whose stride along the statement's vector iterator is neither 0 nor 1."""
        count = 0
        for s in self.group.statements:
            x = iterator(s)
            refs = [(s.array, s.index), *((r.buffer, r.index) for r in loads(s.value))]
            for name, index in refs:
                a = self.group.arrays[name]
                if a.role == "local" or not x:
                    continue
                stride, rest = a.address(index).split(x)
                count += stride not in (ZERO, ONE) or x in rest.symbols()
        return count

    @property
    def maps(self) -> bool:
        """Whether every statement computes one element of the band."""
        return all(s.reduce is None and s.iterators == self.prefix for s in self.group.statements)

    def across(self) -> str | None:
        """Return an iterator of the band along which a load is dense that is strided along the last one, or None."""
        strided = [self.group.arrays[r.buffer].address(r.index) for s in self.group.statements for r in loads(s.value)]
        last = self.prefix[-1]
        for address in strided if self.maps and has_transposes(self.target) else ():
            stride, rest = address.split(last)
            if stride in (ZERO, ONE) or last in rest.symbols():
                continue
            for x in self.prefix[:-1]:
                along, rest = address.split(x)
                if along == ONE and x not in rest.symbols():
                    return x
        return None

    def place_of(self, array: str) -> str:
        """Return the storage of a local: ``loop`` register, ``row`` register, or ``scratch``."""
        writers = [s for s in self.group.statements if s.array == array]
        readers = [(s, r) for s in self.group.statements for r in loads(s.value) if r.buffer == array]
        if not any(inner_iterators(s, self.prefix) for s in writers if s.reduce is None):
            return "row"
        same = all(
            self.stage_of[s.name] == self.stage_of[w.name] and r.index == w.index for s, r in readers for w in writers
        )
        return "loop" if len(writers) == 1 and writers[0].reduce is None and same else "scratch"
