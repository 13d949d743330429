"""Search spaces: finite sets of valid tiles, and the resource rules that define validity.

The four papers' spaces are built in ``loop_model.py`` (TSCompiler), ``rkernel.py`` (Vortex), ``ukernel.py`` (FTuner)
and ``microkernel.py`` (DietCode). Each returns a ``Space``, so every explorer works on all of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from polydyn.errors import ScheduleError
from polydyn.search.backbone import Backbone, Loop, Tile
from polydyn.search.hardware import Hardware, Instruction

Points = npt.NDArray[np.float64]


class EmptySpaceError(ScheduleError):
    """No tile of a space is valid."""


@dataclass(frozen=True)
class Space:
    """Valid tiles with equal parameter names in each row. ``refused``: the number of tiles that each rule rejected.
    EmptySpaceError: no tile is valid.
    """

    name: str
    tiles: tuple[Tile, ...]
    refused: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if not self.tiles:
            raise EmptySpaceError(
                f"the search space {self.name} is empty",
                rule=", ".join(f"{rule} rejected {n}" for rule, n in self.refused) or "no tile was proposed",
                remedy="check the hardware description and the backbone's extents",
            )
        names = {(t.row, *(n for n, _ in t.sizes)) for t in self.tiles}
        if len(names) != len(self.rows):
            raise ScheduleError(f"the tiles of search space {self.name} have different parameters: {sorted(names)}")

    def __len__(self) -> int:
        return len(self.tiles)

    def within(self, rule: Callable[[Tile], str | None]) -> Space:
        """Return the tiles that a further rule accepts. EmptySpaceError: none is left."""
        refused = Counter(dict(self.refused))
        tiles = []
        for tile in self.tiles:
            if name := rule(tile):
                refused[name] += 1
            else:
                tiles.append(tile)
        return self if len(tiles) == len(self) else Space(self.name, tuple(tiles), tuple(sorted(refused.items())))

    def with_rows(self, tiles: Sequence[Tile]) -> Space:
        """Return the space with tiles of other rows."""
        return Space(self.name, (*self.tiles, *tiles), self.refused) if tiles else self

    @cached_property
    def rows(self) -> tuple[str, ...]:
        """The rows of the tiles, in the order of their first tiles."""
        return tuple(dict.fromkeys(t.row for t in self.tiles))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The parameters that vary within a row. A tile without a parameter has the value 1."""
        every: dict[str, None] = {}
        for row in self.rows:
            first, *others = (t for t in self.tiles if t.row == row)
            every |= dict.fromkeys(n for n, v in first.sizes if any(t[n] != v for t in others))
        return tuple(every)

    @cached_property
    def points(self) -> Points:
        """Coordinates (tiles x names) in [0, 1]: logarithms of the sizes, because ratios of sizes matter. With several
        rows, the first coordinate is the row.
        """
        several = len(self.rows) > 1
        at = {row: 1 << k for k, row in enumerate(self.rows)}
        return coordinates([
            [*([at[t.row]] if several else ()), *(t.get(n) for n in self.names)] for t in self.tiles
        ])  # fmt: skip

    @cached_property
    def position(self) -> Mapping[Tile, int]:
        """Maps a tile to its row in ``points``."""
        return {t: i for i, t in enumerate(self.tiles)}


def coordinates(sizes: Sequence[Sequence[int]]) -> Points:
    """Return the logarithms of sizes (tiles x parameters), each parameter scaled to [0, 1]."""
    values = np.array(sizes, float).reshape(len(sizes), -1)
    logs = np.log2(np.maximum(values, 0.5))  # a parameter may be 0
    low, high = logs.min(0), logs.max(0)
    return np.asarray((logs - low) / np.where(high > low, high - low, 1.0))


def collect(name: str, proposals: Iterable[tuple[Tile, str | None]]) -> Space:
    """Return a space of the proposals without a rule; the others are counted under the name of their rule."""
    refused: Counter[str] = Counter()
    tiles: dict[Tile, None] = {}
    for tile, rule in proposals:
        if rule is None:
            tiles[tile] = None
        else:
            refused[rule] += 1
    return Space(name, tuple(sorted(tiles)), tuple(sorted(refused.items())))


@dataclass(frozen=True)
class Usage:
    """The predicted resources of one block of a kernel.

    ``local``: bytes of shared memory (GPU) or of the L2 share (CPU). ``registers``: per thread. ``threads``: per block.
    """

    local: int
    registers: int
    threads: int


def usage(backbone: Backbone, hardware: Hardware, tile: Tile) -> Usage:
    """Return the resources of a tile by counting (the compiler report replaces this after a kernel is built).

    The accumulators of a warp tile are spread over its lanes; a thread tile (level ``t``) belongs to one thread.
    """
    block, warp, unit = tile.level("b"), tile.level("w"), tile.level("v")
    inputs = sum(o.footprint(block) for o in backbone.inputs)
    if hardware.kind == "cpu":
        return Usage(inputs, _vector_registers(backbone, warp, unit), 1)
    local = inputs * tile.get("stages", 2)
    inner = tile.level("t") or warp
    lanes = 1 if tile.level("t") else hardware.lanes
    blocks = math.prod(-(-block[x.name] // inner[x.name]) for x in backbone.parallel)
    step = {**inner, **{x.name: unit.get(x.name, 1) for x in backbone.reduction}}
    words = sum(o.elements(inner) for o in backbone.outputs) + sum(o.footprint(step) for o in backbone.inputs) / 4
    return Usage(local, math.ceil(words / lanes) + _ADDRESSING, blocks * lanes)


_ADDRESSING = 32
"""Registers that a GPU thread needs for addresses and loop counters (126 - 96 in the measured reference kernels)."""


def _vector_registers(backbone: Backbone, register: Mapping[str, int], unit: Mapping[str, int]) -> int:
    """Return the accumulators, plus the vectors of the operands along the vector loop, plus one broadcast."""
    step = {**register, **{x.name: 1 for x in backbone.reduction}}
    lanes = max(unit.values(), default=1)
    vectored = [n for n, v in unit.items() if v > 1]

    def vectors(elements: int) -> int:
        return -(-elements // lanes)

    accumulators = sum(vectors(o.elements(step)) for o in backbone.outputs)
    along = [o for o in backbone.inputs if any(n in vectored for d in o.dims for n, _ in d)]
    return accumulators + max((vectors(o.elements(step)) for o in along), default=0) + 1


def violation(hardware: Hardware, used: Usage) -> str | None:
    """Return the name of the hard constraint (TSCompiler 5.1) that a kernel breaks, or None."""
    if used.local > hardware.block_bytes:
        return "local memory per block"
    if used.registers > hardware.thread_registers:
        return "registers per thread"
    if hardware.block_threads and used.threads > hardware.block_threads:
        return "threads per block"
    if hardware.kind == "gpu" and used.registers * used.threads > hardware.registers:
        return "registers per unit"
    return None


def roles(backbone: Backbone) -> dict[str, Loop]:
    """Return the loops of an instruction's (m, n, k): the last two parallel loops and the last reduction.

    Other loops advance one iteration at a time. A backbone may lack m or k (a row, an elementwise map).
    """
    parallel, reduction = backbone.parallel, backbone.reduction
    named = {"n": parallel[-1:], "m": parallel[-2:-1], "k": reduction[-1:]}
    return {role: loops[0] for role, loops in named.items() if loops}


def unit_tile(backbone: Backbone, instruction: Instruction) -> dict[str, int]:
    """Return the instruction's tile by loop name; 1 for loops without a role."""
    sizes = {x.name: 1 for x in backbone.loops}
    for role, loop in roles(backbone).items():
        sizes[loop.name] = instruction.tile["mnk".index(role)]
    return sizes


def bind(backbone: Backbone, hardware: Hardware, sizes: Mapping[str, int]) -> Tile:
    """Return a tile with binding times. On a CPU the cache tile of parallel loops is bound at launch, everything else
    at compile time (proofs of a kernel need the steps of a reduction block as a number).
    """
    free = {f"b.{x.name}" for x in backbone.parallel} if hardware.kind == "cpu" else set()
    launch = {n: v for n, v in sizes.items() if n in free}
    return Tile(tuple((n, v) for n, v in sizes.items() if n not in launch), tuple(launch.items()))


def aligned(step: int, limit: int, *, thirds: bool = False) -> list[int]:
    """Return ``step`` times powers of two up to ``limit`` (at least one); with ``thirds`` also times 3, 6, 12 ..."""
    factors = [1 << p for p in range(24)] + ([3 << p for p in range(24)] if thirds else [])
    return sorted(step * f for f in factors if step * f <= max(limit, step))


def limit_of(loop: Loop, step: int, limit: int) -> int:
    """Return the largest useful tile: ``limit``, or the static extent rounded up to the step."""
    return limit if loop.extent is None else min(limit, -(-max(loop.extent, 1) // step) * step)
