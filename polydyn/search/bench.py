"""Benches, which measure kernels, and their record wrappers, which make a stopped run resumable."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from polydyn.errors import BuildError
from polydyn.search.backbone import GroupKey, Shape, Tile
from polydyn.search.cost import MacroKernel
from polydyn.search.explorers.explore import Objective
from polydyn.search.hardware import Hardware
from polydyn.search.records import Record, Records
from polydyn.search.spaces.space import Usage


class Bench(Protocol):
    """Measures kernels of one group. ``replay.Simulated`` is one; the real benches build and run kernels.

    ``source``: ``measured``, or ``model`` if the machine is absent and an analytical model estimates times.
    """

    @property
    def source(self) -> str:
        """The source that records of this bench state."""

    def per_operation(self, tiles: Sequence[Tile]) -> Sequence[float]:
        """Return seconds per operation on a saturating instance; ``inf`` if building or running failed."""

    def kernel(self, tile: Tile) -> MacroKernel:
        """Return the resources, wave times and single-block times of a tile that ran."""

    def seconds(self, tiles: Sequence[Tile], shape: Shape, turns: int = 1) -> Sequence[float]:
        """Return the seconds of a full launch of each tile at a shape, the minimum of ``turns`` rounds."""


class RecordedObjective:
    """An objective that looks up costs in a record file first and records its measurements, batch by batch.

    Only records of the same ``source`` count: an estimate never replaces a measurement. Their kind is ``throughput``
    with value ``cost``. Failures are recorded too, so that a tile that does not build is tried only once.
    ``measured`` counts real measurements.
    """

    def __init__(
        self, objective: Objective, records: Records, key: GroupKey, hardware: Hardware, source: str = "measured"
    ) -> None:
        self._objective, self._records, self._key, self._hardware = objective, records, key, hardware
        self._source, self.measured = source, 0
        self._costs: dict[Tile, float] = {}
        for r in _matching(records, key, hardware, source):
            if r.kind == "failed" and not r.shape:
                self._costs.setdefault(r.tile, math.inf)
            elif r.kind == "throughput" and not r.shape:
                self._costs[r.tile] = min(r.value("cost"), self._costs.get(r.tile, math.inf))

    def __call__(self, tiles: Sequence[Tile]) -> list[float]:
        """Return the costs of a batch."""
        new = [t for t in dict.fromkeys(tiles) if t not in self._costs]
        costs = self._objective(new) if new else []
        self.measured += len(new)
        if new and not self._records.readonly:
            self._records.put(self._record(t, c) for t, c in zip(new, costs, strict=True))
        self._costs.update(zip(new, costs, strict=True))
        return [self._costs[t] for t in tiles]

    def _record(self, tile: Tile, cost: float) -> Record:
        if math.isinf(cost):
            return Record(self._key, self._hardware, tile, "failed", (), source=self._source)
        return Record(self._key, self._hardware, tile, "throughput", (("cost", cost),), source=self._source)


def _matching(records: Records, key: GroupKey, hardware: Hardware, source: str) -> Iterator[Record]:
    return (r for r in records.rows(group=key, hardware=hardware) if r.source == source)


_TIMES = ("fixed", "step", "alone_fixed", "alone_step", "one_row", "three_rows", "one_vector", "least")
_RESOURCES = ("local", "registers", "threads")


class RecordedBench:
    """A bench that looks up records first and records its measurements (unless the records are read-only)."""

    def __init__(self, bench: Bench, records: Records, key: GroupKey, hardware: Hardware) -> None:
        self._bench, self._records, self._key, self._hardware = bench, records, key, hardware
        self._objective = RecordedObjective(bench.per_operation, records, key, hardware, bench.source)
        self._waves: dict[Tile, Record] = {}
        self._used: dict[Tile, Record] = {}
        self._failed: set[Tile] = set()
        self._launches: dict[tuple[Tile, tuple[tuple[str, int], ...]], float] = {}
        for r in _matching(records, key, hardware, bench.source):
            if r.kind == "wave" and {n for n, _ in r.values} >= {*_TIMES}:  # older records are measured again
                self._waves[r.tile] = r
            elif r.kind == "resources":
                self._used[r.tile] = r
            elif r.kind == "throughput" and r.shape:
                best = self._launches.get((r.tile, r.shape), math.inf)
                self._launches[r.tile, r.shape] = min(best, r.value("seconds"))
            elif r.kind == "failed" and r.shape:
                self._launches.setdefault((r.tile, r.shape), math.inf)
            elif r.kind == "failed":
                self._failed.add(r.tile)

    @property
    def source(self) -> str:
        """The source of the wrapped bench."""
        return self._bench.source

    def per_operation(self, tiles: Sequence[Tile]) -> list[float]:
        """Implement ``Bench.per_operation``."""
        return self._objective(tiles)

    def kernel(self, tile: Tile) -> MacroKernel:
        """Implement ``Bench.kernel`` with one ``wave`` and one ``resources`` record, or one ``failed`` record."""
        if tile not in self._waves or tile not in self._used:
            k = self._measured(tile)
            self._waves[tile] = self._record(tile, "wave", {n: getattr(k, n) for n in _TIMES})
            self._used[tile] = self._record(tile, "resources", {n: getattr(k.used, n) for n in _RESOURCES})
            self._add([self._waves[tile], self._used[tile]])
        wave, used = self._waves[tile], self._used[tile]
        resources = Usage(*(int(used.value(n)) for n in _RESOURCES))
        return MacroKernel(tile, resources, *(wave.value(n) for n in _TIMES))

    def _measured(self, tile: Tile) -> MacroKernel:
        """Return the kernel of the wrapped bench. BuildError: it fails, or failed before."""
        if tile in self._failed:
            raise BuildError(f"according to the records, tile {tile} did not run")
        try:
            return self._bench.kernel(tile)
        except BuildError as e:
            self._failed.add(tile)
            self._add([replace(self._record(tile, "failed", {}), note=str(e))])
            raise

    def seconds(self, tiles: Sequence[Tile], shape: Shape, turns: int = 1) -> list[float]:
        """Implement ``Bench.seconds`` with one ``throughput`` or ``failed`` record per tile and shape."""
        instance = tuple(sorted(shape.items()))
        new = [t for t in dict.fromkeys(tiles) if (t, instance) not in self._launches]
        if new:
            spent = dict(zip(new, self._bench.seconds(new, shape, turns), strict=True))
            self._launches |= {(t, instance): x for t, x in spent.items()}
            self._add([replace(self._launched(t, x), shape=instance) for t, x in spent.items()])
        return [self._launches[t, instance] for t in tiles]

    def _launched(self, tile: Tile, spent: float) -> Record:
        ran = math.isfinite(spent)
        return self._record(tile, "throughput" if ran else "failed", {"seconds": spent} if ran else {})

    def _record(self, tile: Tile, kind: str, values: dict[str, float]) -> Record:
        numbers = tuple((n, float(v)) for n, v in values.items())
        return Record(self._key, self._hardware, tile, kind, numbers, source=self.source)

    def _add(self, records: list[Record]) -> None:
        if not self._records.readonly:
            self._records.put(records)
