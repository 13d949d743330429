"""Explorers on fully recorded spaces, and on a simulated machine with a known optimum."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from polydyn.errors import ArtifactError
from polydyn.search.backbone import Backbone, GroupKey, Loop, Operand, Shape, Tile
from polydyn.search.cost import MacroKernel, blocks_at, blocks_per_unit
from polydyn.search.explorers.explore import Objective, Trial, in_order, saturating_shape
from polydyn.search.hardware import Hardware, Instruction
from polydyn.search.records import Records
from polydyn.search.spaces.space import Space, unit_tile, usage


def gemm(
    m: int | None = None, n: int | None = None, k: int | None = None, *, dtype: str = "float32", item: int = 4
) -> Backbone:
    """Return ``C[i, j] += A[i, k] * B[k, j]``; None marks a dynamic extent."""
    return Backbone(
        (Loop("i", m), Loop("j", n), Loop("k", k, "reduction")),
        (
            Operand("A", ((("i", 1),), (("k", 1),)), item),
            Operand("B", ((("k", 1),), (("j", 1),)), item),
            Operand("C", ((("i", 1),), (("j", 1),)), item, written=True),
        ),
        dtype,
    )


def exhaustive(space: Space, objective: Objective, trials: int, seed: int = 0) -> tuple[Trial, ...]:
    """Try every tile in order, up to ``trials``. The seed is not used."""
    return in_order(space.tiles)(space, objective, trials, seed)


def random_search(space: Space, objective: Objective, trials: int, seed: int = 0) -> tuple[Trial, ...]:
    """Try tiles drawn without replacement."""
    order = np.random.default_rng(seed).permutation(len(space))[:trials]
    return in_order([space.tiles[i] for i in order])(space, objective, trials, seed)


def recorded_costs(records: Records, key: GroupKey, hardware: Hardware, space: Space) -> dict[Tile, float]:
    """Return the recorded cost of every tile of a space.

    ArtifactError: some were never measured (their number is named).
    """
    costs: dict[Tile, float] = {}
    for r in records.rows(group=key, hardware=hardware):
        if r.kind == "throughput" and not r.shape:
            costs[r.tile] = min(r.value("cost"), costs.get(r.tile, math.inf))
        elif r.kind == "failed" and not r.shape:
            costs.setdefault(r.tile, math.inf)
    missing = [t for t in space.tiles if t not in costs]
    if missing:
        raise ArtifactError(
            f"{len(missing)} of {len(space)} tuples of space {space.name} are not in the records",
            rule="replay needs a fully recorded space",
            remedy="measure all of them (``exhaustive``)",
        )
    return {t: costs[t] for t in space.tiles}


def regret(trials: Sequence[Trial], optimum: float) -> list[float]:
    """Return the best cost so far over the optimum, minus 1, after each trial; it never increases."""
    out: list[float] = []
    least = math.inf
    for t in trials:
        least = min(least, t.cost)
        out.append(least / optimum - 1)
    return out


@dataclass(frozen=True)
class Simulated:
    """A machine with a few effects of real machines, for tests and benchmarks without one.

    Compute at the instruction's rate, held back by short register tiles; two memory levels, overlapped as far as
    resident blocks and stages allow; a penalty near the register limit and for power-of-two strides; last waves; and a
    fixed few per cent per tile that no model can predict (``noise``, from a hash of tile and ``seed``).
    """

    backbone: Backbone
    hardware: Hardware
    noise: float = 0.03
    seed: int = 0
    source: str = "model"

    def per_operation(self, tiles: Sequence[Tile]) -> list[float]:
        """Return seconds per operation on each tile's own saturating instance: an explorer's objective."""
        return [self._per_operation(t) for t in tiles]

    def _per_operation(self, tile: Tile) -> float:
        shape = saturating_shape(self.backbone, self.hardware, tile)
        return self._seconds(tile, shape) / self.backbone.flops(shape)

    def seconds(self, tiles: Sequence[Tile], shape: Shape, turns: int = 1) -> list[float]:
        """Return times of whole launches at a shape."""
        return [self._seconds(t, shape) for t in tiles]

    def _seconds(self, tile: Tile, shape: Shape) -> float:
        sizes = self.backbone.sizes(shape)
        resident = max(1, blocks_per_unit(usage(self.backbone, self.hardware, tile), self.hardware))
        blocks = blocks_at(self.backbone, tile, sizes)
        per_unit = -(-blocks // self.hardware.units)
        full, rest = divmod(per_unit, resident)
        return (
            2e-6
            + full * self.block_seconds(tile, sizes, resident)
            + (self.block_seconds(tile, sizes, rest) if rest else 0.0)
        )

    def kernel(self, tile: Tile) -> MacroKernel:
        """Return the result of building a tile and measuring one wave, and one block per unit."""
        used = usage(self.backbone, self.hardware, tile)
        resident = max(1, blocks_per_unit(used, self.hardware))
        sizes = {n: 2 * v for n, v in tile.level("b").items()}
        full, alone = [
            [self.block_seconds(tile, sizes | self._depth(tile, n), r) for n in (1, 9)] for r in (resident, 1)
        ]
        wave, lone = (full[1] - full[0]) / 8, (alone[1] - alone[0]) / 8
        return MacroKernel(tile, used, max(full[0] - wave, 0.0), wave, max(alone[0] - lone, 0.0), lone)

    def _depth(self, tile: Tile, steps: int) -> dict[str, int]:
        return {x.name: steps * tile.level("b")[x.name] for x in self.backbone.reduction}

    def block_seconds(self, tile: Tile, sizes: Mapping[str, int], resident: int) -> float:
        """Return the time in which one unit runs ``resident`` blocks in parallel."""
        block, part = tile.level("b"), tile.level("t") or tile.level("w")
        deep = {**block, **{x.name: sizes[x.name] for x in self.backbone.reduction}}
        if self.hardware.kind == "cpu":  # exact tiles; a GPU runs whole ones
            deep = {n: min(v, sizes[n]) for n, v in deep.items()}
        else:
            deep = {n: -(-v // block[n]) * block[n] for n, v in deep.items()}
        work = self.backbone.flops(deep)
        read, written = self.backbone.bytes_moved(deep)
        compute = resident * work / self._rate(tile)
        inner = sum(o.footprint(part) for o in self.backbone.inputs) / self.backbone.flops(part)
        compute = max(compute, resident * work * inner / self.hardware.local_bandwidth)
        share = self.hardware.memory_bandwidth / self.hardware.units
        memory = resident * (0.25 * read + written) / share  # the last-level cache serves most re-reads
        hidden = 1 - 1 / (1 + resident * tile.get("stages", 2) / 2)
        return max(compute, memory) + (1 - hidden) * min(compute, memory)

    def _rate(self, tile: Tile) -> float:
        used = usage(self.backbone, self.hardware, tile)
        unit = instruction_of(self.backbone, self.hardware, tile)
        rate = unit.rate
        inner = tile.level("t") or tile.level("w")
        chains = self.backbone.flops({**inner, **{x.name: 1 for x in self.backbone.reduction}}) / (
            2 * math.prod(unit.tile[:2])
        )
        rate *= 1 - math.exp(-(chains + 2) / 6)
        if used.registers > 0.85 * self.hardware.thread_registers:
            rate *= 0.87
        if tile.level("b").get(self.backbone.loops[-1].name, 1) % 64 == 0:
            rate *= 0.94
        draw = int.from_bytes(sha256(f"{self.seed} {tile}".encode()).digest()[:4], "big") / 2**32
        return rate * (1 - self.noise * draw)


def instruction_of(backbone: Backbone, hardware: Hardware, tile: Tile) -> Instruction:
    """Return the instruction of a tile's level ``v``, or the scalar one if it has none."""
    usable = hardware.usable(backbone.dtype)
    unit = tile.level("v")
    return next((i for i in usable if unit_tile(backbone, i) == unit), usable[-1])
