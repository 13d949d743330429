"""DietCode's search space (4.3): the micro-kernel of the largest instance, mutated within [T/2, 2T]."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

from polydyn.search.backbone import Backbone, Tile
from polydyn.search.hardware import Hardware
from polydyn.search.spaces.space import Space, aligned, bind, collect, usage, violation


@lru_cache(maxsize=1)  # consecutive groups often have equal loops
def mutations(backbone: Backbone, hardware: Hardware, seed: Tile) -> Space:
    """Return all viable micro-kernels whose inner tile sizes are in [T/2, 2T] of the seed's.

    The seed is the result of an auto-scheduler for the *largest* instance, where occupancy does not matter, so only the
    local factor is searched. Viable: the instruction divides the register tile, which divides the block tile, and all
    hard constraints hold. Instruction and pipeline parameters do not change.
    """
    return collect("dietcode", _mutants(backbone, hardware, seed))


def _mutants(backbone: Backbone, hardware: Hardware, seed: Tile) -> Iterator[tuple[Tile, str | None]]:
    loops = [x.name for x in backbone.loops]
    unit, warp, block = seed.level("v"), seed.level("w"), seed.level("b")
    fixed = {n: v for n, v in seed.compile + seed.launch if n[:2] not in ("w.", "b.")}
    reductions = {x.name for x in backbone.reduction}
    steps = {n: _step(hardware, warp[n], unit.get(n, 1)) for n in loops}
    for w in product(*(_multiples_near(warp[n], steps[n], n in reductions) for n in loops)):
        for b in product(*(_whole(block[n], s) for n, s in zip(loops, w, strict=True))):
            sizes = {f"b.{n}": v for n, v in zip(loops, b, strict=True)}
            sizes |= {f"w.{n}": v for n, v in zip(loops, w, strict=True)}
            tile = bind(backbone, hardware, sizes | fixed)
            yield tile, violation(hardware, usage(backbone, hardware, tile))


def _step(hardware: Hardware, size: int, unit: int) -> int:
    """Return the granularity of a register tile: the instruction, or 8 if the lanes of a warp divide scalar work."""
    return 8 if hardware.kind == "gpu" and unit == 1 and size % 8 == 0 else unit


def _multiples_near(size: int, step: int, reduction: bool) -> list[int]:
    """Return the multiples of ``step`` in [size/2, 2*size]; for a reduction only T/2, T and 2T."""
    if reduction:
        return sorted({v for v in (size // 2, size, 2 * size) if v and v % step == 0})
    return [v for v in range(step, 2 * size + 1, step) if 2 * v >= size]


def _whole(size: int, step: int) -> list[int]:
    """Return block sizes in [size/2, 2*size] with 1, 2, 3, 4, 6, 8, 12 ... register tiles of ``step``, and the size."""
    sizes = {v for v in aligned(step, 2 * size, thirds=True) if size <= 2 * v <= 4 * size}
    return sorted(sizes | ({size} if size % step == 0 else set()))
