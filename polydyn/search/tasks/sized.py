"""Tuning tasks of kernels that are no products: windows, maps and sums, attentions.

Their spaces are small: a size that is bound when the kernel is built, one or two of a launch (``choices``). So every
tuple that is tried is launched whole at the sizes that count, and no cost model stands in for one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from polydyn.codegen.cpu.target import CpuTarget
from polydyn.codegen.kernel import Kernel
from polydyn.errors import Declined, ScheduleError
from polydyn.lowering.place_cpu import SizedKernel
from polydyn.schedules.index import Index
from polydyn.schedules.model import Group
from polydyn.search.backbone import Backbone, Loop, Tile
from polydyn.search.tasks.cpu import DEFAULT, Task, accumulation, declined_data, group_key

ROWS = "its tasks are its rows, and nothing else of it has a size to choose"
SERIAL = "it runs one element after another, and has no size to choose"


@dataclass(frozen=True)
class SizedTask(Task[Group]):
    """A group to tune on a CPU. ``source``: its kernel with the sizes that it has by rule; ``build``: name of the
    compiler target.
    """

    source: SizedKernel
    build: str

    @property
    def target(self) -> CpuTarget:
        """The processor that its kernels are for."""
        return self.source.target

    def tiles(self, most: int) -> list[Tile]:
        """``most`` tuples at most: the default, then those nearest to it by ratio, as sizes act by ratio."""
        built, launched = self.source.choices().built, self.source.choices().launched
        every = [
            Tile(tuple(zip(built, a, strict=True)), tuple(zip(launched, b, strict=True)))
            for a in product(*built.values())
            for b in product(*launched.values())
        ]
        rule = {n: values[0] for n, values in (*built.items(), *launched.items())}

        def distance(t: Tile) -> float:
            return sum(abs(math.log(v / rule[n])) for n, v in (*t.compile, *t.launch))

        return [DEFAULT, *sorted(every, key=lambda t: (distance(t), t))[1:]][:most]

    def kernel(self, tile: Tile, builder: SizedKernel) -> Kernel:
        """What ``builder`` makes of a tuple's compile-time part; its ``launch`` is that of the launch-time part."""
        return replace(builder.build(), launch=self.shares(builder, tile))

    def builder(self, tile: Tile, name: str) -> SizedKernel:
        """The code generator for a tuple. ScheduleError: it has a size that the kernel does not offer."""
        offered = {**self.source.choices().built, **self.source.choices().launched}
        for n, v in (*tile.compile, *tile.launch):
            if v not in offered.get(n, ()):
                raise ScheduleError(
                    f"group {self.key.structure} is not built with {n}={v}",
                    rule=f"{n} is one of {', '.join(map(str, offered.get(n, ()))) or 'nothing'}",
                    remedy="tune the group again",
                )
        return self.source.resized(name, dict(tile.compile))

    def shares(self, builder: SizedKernel, tile: Tile) -> dict[str, Index]:
        """The values of the launch-time symbols, over the kernel's other symbols."""
        return builder.launched(dict(tile.launch))


def sized_task(key: str, source: SizedKernel, build: str) -> SizedTask | Declined:
    """The task of a group, or why it is not tuned."""
    group, choices = source.group, source.choices()
    fixed = "" if choices.built or choices.launched else ROWS
    if refused := declined_data(group, fixed):
        return refused
    return SizedTask(group, group_key(key, group, source.target, build), backbone_of(group), source, build)


def backbone_of(group: Group) -> Backbone:
    """The loops of the statement that does most."""
    s = accumulation(group)
    written: Sequence[str] = [x for i in s.index for x in i.symbols()]
    loops = tuple(Loop(n, e.constant, "parallel" if n in written else "reduction") for n, e in s.iters)
    return Backbone(loops, (), s.value.dtype)
