"""Vortex's strategy space (4-5.1): rKernel levels, candidates bottom-up, the parent map between levels.

Level 0 is in registers, level 1 in local memory; level 2 (grid, threads) is decided at run time. A candidate is a tile
of all loops. Instructions of every kind stay in the space, because the compute unit for a shape is chosen at run time
(adaptive compute unit, 6.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from polydyn.search.backbone import Backbone, Loop, Tile
from polydyn.search.hardware import Hardware, Instruction
from polydyn.search.spaces.space import Space, aligned, bind, collect, limit_of, roles, unit_tile, usage, violation

Candidate = tuple[tuple[str, int], ...]
"""A tile of one level: (loop, size) pairs in the backbone's order."""


@dataclass(frozen=True)
class Level:
    """The result of GETHARDWAREINFO(L): the bytes a candidate may use, and the useful range of utilisation.

    The paper observes that utilisation near 0 or 1 is slow; ``low`` and ``high`` bound it. ``thirds``: sizes may also
    be three times a power of two (the paper has 17731 candidates on a CPU, 392 to 2332 on a GPU).
    """

    depth: int
    capacity: int
    low: float
    high: float
    thirds: bool = False


@dataclass(frozen=True)
class Candidates:
    """The candidates of one level. ``parents`` maps a candidate to the lower-level candidates that divide it."""

    level: Level
    tiles: tuple[Candidate, ...]
    parents: Mapping[Candidate, tuple[Candidate, ...]]


def levels(hardware: Hardware) -> tuple[Level, Level]:
    """Return levels 0 and 1 of a machine. Level 0 counts the bytes of accumulators and operands in registers."""
    if hardware.kind == "cpu":
        registers = hardware.registers * hardware.lanes * 4
        return Level(0, registers, 0.25, 1.0, True), Level(1, hardware.local_bytes, 1 / 16, 0.75, True)
    per_warp = hardware.thread_registers * hardware.lanes * 4
    return Level(0, per_warp, 1 / 32, 1.0), Level(1, hardware.block_bytes // 2, 1 / 32, 1.0)  # double-buffered


def init_candidates(backbone: Backbone, level: Level, step: Mapping[str, int]) -> list[Candidate]:
    """Return all aligned tiles (InitCands: multiples of ``step``) whose bytes fit the level's utilisation bounds."""
    role_of = {x.name: role for role, x in roles(backbone).items()}
    choices = []
    for loop in backbone.loops:
        s = step[loop.name]
        choices.append([(loop.name, v) for v in _sizes(loop, role_of.get(loop.name), s, level)])
    sizes = {c: _bytes(backbone, level, dict(c)) for c in product(*choices)}
    fitting = {c: v for c, v in sizes.items() if v <= level.high * level.capacity}
    # a backbone with short static extents cannot use more than its own size
    minimum = level.low * min(level.capacity, max(fitting.values(), default=0))
    return [c for c, v in fitting.items() if v >= minimum]


def _sizes(loop: Loop, role: str | None, step: int, level: Level) -> list[int]:
    """Return the multiples of the step. A scalar reduction of level 0 is unrolled or not."""
    if role is None:
        return [1]
    if not level.depth and role == "k":
        return [1, 4] if step == 1 else aligned(step, limit_of(loop, step, 16 * step))
    if not level.depth:
        return aligned(step, limit_of(loop, step, 16 * step), thirds=level.thirds)
    limit = 32 * max(step, 48 if role == "k" and level.thirds else 8)
    return aligned(step, limit_of(loop, step, limit), thirds=level.thirds)


def _bytes(backbone: Backbone, level: Level, sizes: dict[str, int]) -> int:
    """Return the bytes used: level 1 holds the operands, level 0 also the results and one step of reductions."""
    if level.depth:
        return backbone.bytes_moved(sizes)[0]
    step = {**sizes, **{x.name: 1 for x in backbone.reduction}}
    return sum(o.footprint(step) for o in backbone.inputs) + backbone.bytes_moved(sizes)[1]


def filter_by_isa(backbone: Backbone, candidates: list[Candidate], instruction: Instruction) -> list[Candidate]:
    """Return the candidates in which every size is a multiple of the instruction's tile (FilterByISA)."""
    unit = unit_tile(backbone, instruction)
    return [c for c in candidates if all(v % unit[n] == 0 for n, v in c)]


def filter_by_multiples(candidates: list[Candidate], below: list[Candidate]) -> dict[Candidate, tuple[Candidate, ...]]:
    """Return each candidate that is a multiple (in every loop) of a lower one, with those (FilterByMultiples)."""
    parents_of: dict[Candidate, tuple[Candidate, ...]] = {}
    for c in candidates:
        parents = tuple(p for p in below if all(v % w == 0 for (_, v), (_, w) in zip(c, p, strict=True)))
        if parents:
            parents_of[c] = parents
    return parents_of


def generate(backbone: Backbone, hardware: Hardware, instruction: Instruction) -> tuple[Candidates, Candidates]:
    """Run Algorithm 2 for levels 0 and 1 with one instruction."""
    unit = unit_tile(backbone, instruction)
    zero, one = levels(hardware)
    low = filter_by_isa(backbone, init_candidates(backbone, zero, unit), instruction)
    parents = filter_by_multiples(init_candidates(backbone, one, unit), low)
    return Candidates(zero, tuple(low), {}), Candidates(one, tuple(parents), parents)


@lru_cache(maxsize=1)  # consecutive groups often have equal loops
def rkernel_space(backbone: Backbone, hardware: Hardware) -> Space:
    """Return Vortex's space: every (level 1, level 0) pair of the parent map, for every instruction of the dtype."""
    return collect("vortex", _pairs(backbone, hardware))


def _pairs(backbone: Backbone, hardware: Hardware) -> Iterator[tuple[Tile, str | None]]:
    for instruction in hardware.usable(backbone.dtype):
        if hardware.kind == "cpu" and instruction.kind == "scalar":
            continue  # this uses one lane of a vector register; the masks of the vector leaf cover it
        _, high = generate(backbone, hardware, instruction)
        unit = unit_tile(backbone, instruction)
        for block, parents in high.parents.items():
            for warp in parents:
                sizes = {f"b.{n}": v for n, v in block} | {f"w.{n}": v for n, v in warp}
                tile = bind(backbone, hardware, sizes | {f"v.{n}": v for n, v in unit.items()})
                yield tile, violation(hardware, usage(backbone, hardware, tile))
