"""Tuning tasks of kernels that are not products: windows, maps and sums, attentions.

Their spaces are small: one size that is bound when the kernel is built, and one or two of a launch (``choices``). So
every tile is launched in full at the relevant sizes, without a cost model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from polydyn.codegen.cpu.target import CpuTarget
from polydyn.codegen.kernel import Kernel
from polydyn.errors import Declined
from polydyn.lowering.alternatives import Rows
from polydyn.lowering.cpu_tables import SizedKernel
from polydyn.schedules.index import Index
from polydyn.schedules.model import Group
from polydyn.search.backbone import Backbone, Loop, Tile
from polydyn.search.explorers.explore import with_rows
from polydyn.search.tasks.cpu import DEFAULT, RowsTask, accumulation, declined_data, group_key, verify_sizes

ROWS = "its tasks are its rows, and it has no other size to choose"
SERIAL = "it processes one element after another, and has no size to choose"


@dataclass(frozen=True)
class SizedTask(RowsTask[Group]):
    """A group to tune on a CPU. ``source``: its kernel with default sizes; ``build``: the compiler target."""

    source: SizedKernel
    build: str

    @property
    def target(self) -> CpuTarget:
        """The processor of the kernels."""
        return self.source.target

    def tiles(self, max_count: int | None = None) -> list[Tile]:
        """Return the tiles (at most ``max_count``): the default, then the nearest to it by ratio, because ratios of
        sizes matter.
        """
        built, launched = self.source.choices().built, self.source.choices().launched
        every = [
            Tile(tuple(zip(built, a, strict=True)), tuple(zip(launched, b, strict=True)))
            for a in product(*built.values())
            for b in product(*launched.values())
        ]
        rule = self.parameters(DEFAULT)

        def distance(t: Tile) -> float:
            return sum(abs(math.log(v / rule[n])) for n, v in t.sizes)

        nearest = sorted(every, key=lambda t: (distance(t), t))[1:]
        return list(with_rows([DEFAULT, *nearest], self.row_tiles))[:max_count]

    def parameters(self, tile: Tile) -> dict[str, int]:
        """Return the values of all parameters of a tile; the default has the first value of each. With other rows, the
        first one is the row, and sizes of another row than the tile's are 0.
        """
        choices = self.source.choices()
        own = {n: values[0] for n, values in (*choices.built.items(), *choices.launched.items())}
        if not self.rows.choices:
            return own | dict(tile.sizes)
        others = {
            f"{row} {n}": 0 for row, x in self.rows.choices.items() for n in (*x.choices.built, *x.choices.launched)
        }
        at = 1 << ("", *self.rows.choices).index(tile.row)
        return {"row": at} | own | others | {f"{tile.row} {n}" if tile.row else n: v for n, v in tile.sizes}

    def kernel(self, tile: Tile, builder: SizedKernel) -> Kernel:
        """Return the kernel for a tile's compile-time part; ``launch`` has the values of the launch-time part."""
        return replace(builder.build(), launch=self.shares(builder, tile))

    def builder(self, tile: Tile, name: str) -> SizedKernel:
        """Return the code generator for a tile. ScheduleError: the kernel does not offer one of its sizes."""
        if tile.row:
            builder: SizedKernel = self.row_choice(tile).builder(name, dict(tile.compile[1:]))
            return builder
        verify_sizes(self.key.structure, tile.sizes, {**self.source.choices().built, **self.source.choices().launched})
        return self.source.resized(name, dict(tile.compile))

    def shares(self, builder: SizedKernel, tile: Tile) -> dict[str, Index]:
        """Return the values of the launch-time symbols, over the kernel's other symbols."""
        if tile.row:
            return self.row_choice(tile).launch(builder, dict(tile.launch))
        return builder.launched(dict(tile.launch))


def sized_task(key: str, source: SizedKernel, build: str, rows: Rows | None = None) -> SizedTask | Declined:
    """Return the task of a group, or why it is not tuned. ``rows``: other rows of its table that a search compares."""
    group, choices, rows = source.group, source.choices(), rows or Rows()
    fixed = "" if choices.built or choices.launched or rows.choices else ROWS
    if declined := declined_data(group, fixed):
        return declined
    return SizedTask(group, group_key(key, group, source.target, build), backbone_of(group), source, build, rows=rows)


def backbone_of(group: Group) -> Backbone:
    """Return the loops of the statement with the max_count work."""
    s = accumulation(group)
    written: Sequence[str] = [x for i in s.index for x in i.symbols()]
    loops = tuple(Loop(n, e.constant, "parallel" if n in written else "reduction") for n, e in s.iters)
    return Backbone(loops, (), s.value.dtype)
